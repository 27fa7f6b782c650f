"""Drafts cross between two tokenizers, and whatever is lost on the way costs speed alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from exactness.small_engines import load
from fakes.drafter_play import DRAWN, GREEDY, KEY, SEEDED, ask_of, draft_of
from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.models.translated_drafter import IntersectionDrafter, TextDrafter
from outrider.drafter_service.models.vocabulary_map import FileTokenizer, VocabularyMap
from outrider.verifier_service.messages.draft import Draft, DraftNeeds, DraftSampling
from tiny.models import make_model

TEXT = (
    "the drafter guesses what the verifier would say, and the verifier says whether it was right; "
    "naïve façades déjà vu, 東京 und Grüße 🙂 all the same. "
) * 3


def trained(vocab_size: int, corpus: str) -> FileTokenizer:
    """Train a byte-level BPE; another size or corpus makes other merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([corpus], trainer)
    return FileTokenizer(tokenizer)


TARGET = trained(340, TEXT)
DRAFT = trained(400, TEXT[::-1] + TEXT)
MAP = VocabularyMap.of(TARGET.vocabulary(), DRAFT.vocabulary(), target_vocab_size=340, draft_vocab_size=400)
SHARED_IDS = [token_id for token_id in range(340) if MAP.is_shared(token_id)]


def ask(token_ids: Sequence[int], *, length: int = 6, **more: Any) -> Ask:
    return ask_of(list(token_ids), length=length, **more)


class TextReader:
    """An inner drafter that knows a text by heart: it drafts the tokens after the prefix it is shown."""

    vocab_size = 400
    needs = DraftNeeds()

    def __init__(self, text: str, *, max_model_len: int = 1000) -> None:
        self._text = text
        self.max_model_len = max_model_len
        self.asks: list[Ask] = []
        self.released: list[SessionKey] = []

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        self.asks += asks
        return [a.answer(tuple(self._after(a))) for a in asks]

    def _after(self, one: Ask) -> list[int]:
        shown = DRAFT.decode(one.token_ids)
        assert self._text.startswith(shown), f"shown {shown!r}"
        return DRAFT.encode(self._text[len(shown) :])[: one.length]

    def release(self, key: SessionKey) -> None:
        self.released.append(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Nothing is held."""


def text_drafter(inner: Drafter, **more) -> TextDrafter:
    return TextDrafter(inner, target_tokenizer=TARGET, draft_tokenizer=DRAFT, target_vocab_size=340, **more)


# --- through text ---


def test_the_tokenizers_differ() -> None:
    assert [len(tokenizer.encode(TEXT)) for tokenizer in (TARGET, DRAFT)] == sorted(
        {len(TARGET.encode(TEXT)), len(DRAFT.encode(TEXT))}, reverse=True
    )
    assert 256 <= MAP.num_shared < 340


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, SEEDED])
def test_drafts_are_the_targets_tokens_of_the_drafted_text(sampling: DraftSampling) -> None:
    """Every prefix of the text, one token at a time, cut characters included."""
    token_ids = TARGET.encode(TEXT)
    inner = TextReader(TEXT)
    drafter = text_drafter(inner)
    num_right = 0
    for end in range(1, len(token_ids)):
        result = draft_of(drafter, ask(token_ids[:end], ask_id=end, sampling=sampling))
        assert (result.draft_probs, result.parents) == (None, None)
        assert len(result.token_ids) <= 6
        right = token_ids[end : end + len(result.token_ids)]
        num_right += sum(a == b for a, b in zip(result.token_ids, right, strict=False))
        if result.token_ids[:-1]:  # the last one may be the beginning of a longer one
            assert list(result.token_ids[:-1]) == right[:-1][: len(result.token_ids) - 1]
    assert num_right > 3 * len(token_ids), "drafts of 6 tokens of the other tokenizer"
    assert all(one.sampling == GREEDY and one.max_nodes == 0 for one in inner.asks)


def test_a_draft_ends_before_an_id_that_the_target_does_not_have() -> None:
    """A tokenizer may know tokens that were added to it and that the model has no row for."""
    few = TextDrafter(TextReader(TEXT), target_tokenizer=TARGET, draft_tokenizer=DRAFT, target_vocab_size=300)
    all_, token_ids, num_cut = text_drafter(TextReader(TEXT)), TARGET.encode(TEXT), 0
    for end in range(1, 60):
        whole, cut = (draft_of(one, ask(token_ids[:end], ask_id=end)).token_ids for one in (all_, few))
        assert cut == tuple(itertools.takewhile(lambda token_id: token_id < 300, whole))
        num_cut += cut != whole
    assert num_cut > 10


def test_a_long_text_is_not_encoded_again_and_again() -> None:
    class Counting:
        num_characters = 0

        def encode(self, text: str) -> list[int]:
            self.num_characters += len(text)
            return DRAFT.encode(text)

        def decode(self, token_ids: Sequence[int]) -> str:
            return DRAFT.decode(token_ids)

    text = TEXT * 12
    token_ids = TARGET.encode(text)
    counting, inner = Counting(), TextReader(text, max_model_len=10_000)
    drafter = TextDrafter(inner, target_tokenizer=TARGET, draft_tokenizer=counting, target_vocab_size=340)
    draft_of(drafter, ask(token_ids[:-40]))
    counting.num_characters = 0
    for more in range(1, 40):
        draft_of(drafter, ask(token_ids[: more - 40], ask_id=1 + more))
    assert counting.num_characters < 39 * 400, "the text has ten times as many"
    prefixes = [list(one.token_ids) for one in inner.asks[1:]]
    whole = DRAFT.encode(text)
    for prefix in prefixes:
        assert prefix[:-12] == whole[: len(prefix[:-12])], "only the end may be encoded in another way"


def test_another_prefix_starts_anew() -> None:
    drafter = text_drafter(TextReader(TEXT))
    token_ids = TARGET.encode(TEXT)
    draft_of(drafter, ask(token_ids[:150]))
    other = TextReader("quite " + TEXT)
    drafter._inner = other
    draft_of(drafter, ask(TARGET.encode("quite " + TEXT)[:150], ask_id=2))
    assert len(other.asks) == 1


def test_a_token_that_would_have_been_merged_is_left_alone() -> None:
    """The committed tokens are not what encoding their text would give; the drafted text is encoded by itself."""
    [whole] = TARGET.encode(" the")
    parts = [TARGET.encode(" ")[0], *TARGET.encode("th")]
    assert TARGET.decode(parts) == " th"
    result = draft_of(text_drafter(TextReader(" the verifier")), ask(parts, length=2))
    assert TARGET.decode([*parts, *result.token_ids]).startswith(" the")
    assert whole not in result.token_ids


def test_forced_tokens_lead_and_are_part_of_the_text() -> None:
    token_ids = TARGET.encode(TEXT)
    inner = TextReader(TEXT)
    result = draft_of(text_drafter(inner), ask(token_ids[:20], length=5, forced_ids=token_ids[20:23]))
    assert list(result.token_ids[:4]) == token_ids[20:24]
    assert DRAFT.decode(inner.asks[0].token_ids) == TARGET.decode(token_ids[:23])
    forced_only = draft_of(text_drafter(inner), ask(token_ids[:20], length=2, forced_ids=token_ids[20:23]))
    assert list(forced_only.token_ids) == token_ids[20:22]


def test_texts_without_room_or_tokens_get_empty_drafts() -> None:
    token_ids = TARGET.encode(TEXT)
    inner = TextReader(TEXT, max_model_len=10)
    drafter = text_drafter(inner)
    assert draft_of(drafter, ask(token_ids[:40])).token_ids == ()
    half_a_character = TARGET.encode("🙂")[:1]
    assert draft_of(drafter, ask(half_a_character, ask_id=2)).token_ids == ()
    assert inner.asks == []


def test_the_draft_models_first_tokens_come_first() -> None:
    class Begun(TextReader):
        def _after(self, one: Ask) -> list[int]:
            assert list(one.token_ids[:2]) == [7, 8]
            return super()._after(dataclasses.replace(one, token_ids=one.token_ids[2:]))

    drafter = text_drafter(Begun(TEXT), first_ids=(7, 8))
    token_ids = TARGET.encode(TEXT)
    assert draft_of(drafter, ask(token_ids[:30])).token_ids[:3] == tuple(token_ids[30:33])


def test_a_released_session_is_forgotten_on_both_sides() -> None:
    inner = TextReader(TEXT)
    drafter = text_drafter(inner)
    draft_of(drafter, ask(TARGET.encode(TEXT)[:30]))
    with pytest.raises(AssertionError, match="text of a session"):
        drafter.check_integrity([])
    drafter.release(KEY)
    drafter.check_integrity([])
    assert inner.released == [KEY]


def test_drafters_that_read_the_targets_states_are_refused() -> None:
    inner = TextReader(TEXT)
    inner.needs = DraftNeeds(taps=(1,))
    with pytest.raises(ValueError, match="states"):
        text_drafter(inner)


# --- models, whole engines ---


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    return load(make_model("llama", vocab_size=400, seed=1), tmp_path_factory.mktemp("draft"))


def intersection_drafter(runner, vocabulary: VocabularyMap = MAP) -> IntersectionDrafter:
    return IntersectionDrafter(
        runner,
        torch.Generator().manual_seed(0),
        vocabulary=vocabulary,
        target_tokenizer=TARGET,
        draft_tokenizer=DRAFT,
    )


def test_unknown_committed_tokens_are_spelled_out(draft) -> None:
    """What the draft model reads is the whole text, whatever it has to be cut into."""
    seen: list[list[int]] = []

    class Listening:
        vocab_size, max_model_len = draft.vocab_size, draft.max_model_len
        num_blocks, block_size = draft.num_blocks, draft.block_size

        def execute(self, batch, chosen=None):
            seen.append(list(batch.token_ids))
            return draft.execute(batch, chosen)

    token_ids = TARGET.encode(TEXT)[:60]
    assert any(not MAP.is_shared(token_id) for token_id in token_ids)
    drafter = intersection_drafter(Listening())
    draft_of(drafter, ask(token_ids[:50], length=1))
    assert DRAFT.decode(seen[0]) == TARGET.decode(token_ids[:50]).rstrip("\ufffd")
    computed = list(seen[0])
    for end in range(51, 60):
        seen.clear()
        draft_of(drafter, ask(token_ids[:end], length=1, ask_id=end))
        assert sum(map(len, seen)) <= 6, "the KV of what is known is kept"
    assert len(computed) != 50, "positions in the two vocabularies differ"


def test_forced_tokens_that_the_draft_model_does_not_know_end_the_forcing(draft) -> None:
    unknown = next(token_id for token_id in range(340) if not MAP.is_shared(token_id))
    known = SHARED_IDS[5]
    result = draft_of(intersection_drafter(draft), ask([known, known], length=3, forced_ids=(known, unknown)))
    assert result.token_ids[0] == known
    assert len(result.token_ids) == 3
