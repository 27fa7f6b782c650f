"""Shards of what a played model answers: whole, in order, gone on with where a run stopped."""

from __future__ import annotations

import pytest

from outrider.cluster.offline.outputs import CompletionOutput, RequestOutput
from outrider.drafter_service.training.shards import Conversation, read_shard
from outrider.lab.corpus.generate import CorpusOptions, generate_corpus


class PlayedModel:
    """Answers a prompt by its length, the last prompt first; fails at a prompt that holds `bad`."""

    def __init__(self, bad="\0"):
        self.bad, self.asked, self.num_requests = bad, [], 0

    def as_completed(self, prompts, samplings):
        first, self.num_requests = self.num_requests, self.num_requests + len(prompts)
        rows = list(enumerate(zip(prompts, samplings, strict=True), start=first))
        for number, (prompt, sampling) in reversed(rows):
            (message,) = prompt["messages"]
            assert message["role"] == "user"
            self.asked.append((message["content"], sampling))
            answer = CompletionOutput(index=0, text="", token_ids=[7] * 4, finish_reason="stop")
            yield RequestOutput(
                request_id=str(number),
                prompt=message["content"],
                prompt_token_ids=[len(message["content"])] * 2,
                outputs=[answer],
                error="it would not" if self.bad in message["content"] else None,
            )


def options(folder, **changes):
    return CorpusOptions(**{"output": folder, "num_tokens": 40, "prompts_per_shard": 3, **changes})


def test_shards_hold_answers_in_the_prompts_order_until_there_are_tokens_enough(tmp_path):
    model, told = PlayedModel(), []
    assert generate_corpus(model, options(tmp_path), told.append) == 54
    shards = sorted(tmp_path.iterdir())
    assert [shard.name for shard in shards] == [f"shard-0000{number}.npz" for number in range(3)]
    texts = [text for text, _ in model.asked]
    in_order = [texts[start + offset] for start in (0, 3, 6) for offset in (2, 1, 0)]
    said = [conversation for shard in shards for conversation in read_shard(shard)]
    assert said == [Conversation((len(text),) * 2, (7,) * 4) for text in in_order]
    assert told == list(range(6, 55, 6))


def test_a_run_that_stopped_goes_on_with_the_shard_that_is_missing(tmp_path):
    whole = PlayedModel()
    generate_corpus(whole, options(tmp_path / "whole"), lambda _: None)
    stopped = PlayedModel(bad=whole.asked[4][0])  # within the second shard
    with pytest.raises(RuntimeError, match="it would not"):
        generate_corpus(stopped, options(tmp_path / "parts"), lambda _: None)
    assert [file.name for file in (tmp_path / "parts").iterdir()] == ["shard-00000.npz"]
    resumed, told = PlayedModel(), []
    assert generate_corpus(resumed, options(tmp_path / "parts"), told.append) == 54
    assert resumed.asked == whole.asked[3:]
    assert told[0] == 18
    for one, other in zip(sorted((tmp_path / "whole").iterdir()), sorted((tmp_path / "parts").iterdir()), strict=True):
        assert list(read_shard(one)) == list(read_shard(other))


def test_time_that_is_over_ends_a_corpus_after_a_whole_shard_and_no_sooner_than_the_first(tmp_path):
    model, folder = PlayedModel(), tmp_path / "corpus"
    assert generate_corpus(model, options(folder), lambda _: None, is_over=lambda: True) == 18
    assert len(model.asked) == 3
    assert generate_corpus(model, options(folder), lambda _: None, is_over=lambda: len(model.asked) >= 6) == 36
    assert generate_corpus(model, options(folder), lambda _: None, is_over=lambda: True) == 36, "what is there counts"
    assert len(model.asked) == 6


def test_temperatures_and_seeds_are_each_prompts_own(tmp_path):
    model = PlayedModel()
    generate_corpus(model, options(tmp_path, num_tokens=600), lambda _: None)
    samplings = [sampling for _, sampling in model.asked]
    assert {sampling.temperature for sampling in samplings} == {0.0, 0.8}
    assert 30 < sum(sampling.temperature == 0 for sampling in samplings) < 70
    assert len({sampling.seed for sampling in samplings}) == len(samplings) >= 100
