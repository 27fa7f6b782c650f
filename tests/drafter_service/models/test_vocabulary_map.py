"""A model of another vocabulary answers in the target's ids, and knows nothing beyond what both share."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fakes.runner import FakeRunner
from outrider.drafter_service.models.vocabulary_map import FileTokenizer, MappedRunner, VocabularyMap
from outrider.verifier_service.messages.batch import ScheduledBatch

MAP = VocabularyMap(draft_ids=(3, -1, 0))


def batch_of(token_ids: list[int]) -> ScheduledBatch:
    return ScheduledBatch(
        token_ids=token_ids,
        positions=list(range(len(token_ids))),
        slot_mapping=list(range(len(token_ids))),
        query_lengths=[len(token_ids)],
        context_lengths=[len(token_ids)],
        block_tables=[[0]],
        logits_indices=[len(token_ids) - 1],
    )


class CountingRunner(FakeRunner):
    """Says its own ids as logits."""

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        super().execute(batch, chosen)
        return torch.arange(float(self.vocab_size)).repeat(len(batch.logits_indices), 1)


def test_tokens_are_matched_by_their_strings() -> None:
    target = {"a": 0, "Ġb": 1, "c": 2, "Ġ": 3}
    draft = {"Ġb": 7, "a": 5, "d": 1, "Ġ": 0}
    assert VocabularyMap.of(target, draft, target_vocab_size=6, draft_vocab_size=8).draft_ids == (5, 7, -1, 0, -1, -1)


def test_signs_for_a_space_may_differ() -> None:
    found = VocabularyMap.of({"Ġa": 0, "b": 1}, {"▁a": 1, "b": 0}, target_vocab_size=2, draft_vocab_size=2)
    assert found.draft_ids == (1, 0)
    assert found.num_shared == 2


def test_ids_beyond_a_model_are_left_out() -> None:
    vocabulary = {"a": 0, "b": 1, "c": 2}
    assert VocabularyMap.of(vocabulary, vocabulary, target_vocab_size=2, draft_vocab_size=3).draft_ids == (0, 1)
    found = VocabularyMap.of(vocabulary, vocabulary, target_vocab_size=3, draft_vocab_size=2)
    assert found.draft_ids == (0, 1, -1)
    assert [found.is_shared(token_id) for token_id in range(3)] == [True, True, False]


def test_vocabularies_that_share_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="share no token"):
        VocabularyMap.of({"a": 0}, {"b": 0}, target_vocab_size=1, draft_vocab_size=1)


def test_a_map_for_a_larger_model_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_ids"):
        MappedRunner(FakeRunner(vocab_size=3), MAP)


def test_a_mapped_runner_reads_and_answers_in_the_targets_ids() -> None:
    inner = CountingRunner(vocab_size=5)
    runner = MappedRunner(inner, MAP)
    assert (runner.target_vocab_size, runner.vocab_size) == (3, 8)
    logits = runner.execute(batch_of([2, 0, 3 + 4]))
    assert inner.batches[0].token_ids == [0, 3, 4]
    assert logits.tolist() == [[3.0, float("-inf"), 0.0]]


def test_a_token_without_counterpart_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="does not know"):
        MappedRunner(FakeRunner(vocab_size=5), MAP).execute(batch_of([1]))


def test_a_tokenizer_from_a_checkpoint(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        FileTokenizer.from_folder(tmp_path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = FileTokenizer.from_folder(tmp_path)
    assert loaded.encode("é") == [alphabet.index(token) for token in "Ã©"]
    assert loaded.decode(loaded.encode("<s> né")) == "<s> né"
    assert loaded.vocabulary()["<s>"] == 256
