"""Have a target answer prompts, shard after shard, until there are tokens enough.

A shard's prompts, temperatures and seeds depend on its number alone, so that a run that was stopped goes on with the
first shard that is not there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.cluster.offline.llm import LLM
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.drafter_service.training.shards import SUFFIX, Conversation, count_tokens, write_shard
from outrider.lab.corpus.prompts import templated_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusOptions:
    """What to ask and how much of it."""

    output: Path
    num_tokens: int  # of all shards, prompts included
    prompts_per_shard: int = 512
    max_tokens: int = 256  # of an answer
    temperatures: tuple[float, ...] = (0.0, 0.8)  # one of them for each prompt
    seed: int = 0
    prompts: Sequence[str] = ()  # in place of templated ones; they end the corpus when all were answered

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.prompts_per_shard, self.max_tokens) < 1:
            raise ValueError("num_tokens, prompts_per_shard and max_tokens must be positive")
        if not self.temperatures or min(self.temperatures) < 0:
            raise ValueError("temperatures: at least one, none of them negative")

    def shard_path(self, number: int) -> Path:
        return self.output / f"shard-{number:05d}{SUFFIX}"

    def texts(self, shard: int) -> list[tuple[int, str]]:
        """Return a shard's prompts with their numbers."""
        numbers = range(shard * self.prompts_per_shard, (shard + 1) * self.prompts_per_shard)
        if self.prompts:
            return [(number, self.prompts[number]) for number in numbers if number < len(self.prompts)]
        return [(number, templated_prompt(number, self.seed).text) for number in numbers]

    def sampling(self, number: int) -> SamplingParams:
        """Return how the answer to a prompt is sampled."""
        temperature = random.Random(f"{self.seed}/{number}/temperature").choice(self.temperatures)
        seed = self.seed * 1_000_003 + number
        return SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=seed, detokenize=False)


def generate_corpus(
    llm: LLM, options: CorpusOptions, on_tokens: Callable[[int], None], *, is_over: Callable[[], bool] = lambda: False
) -> int:
    """Write the shards that are missing and return how many tokens there are in all.

    `on_tokens` is told so on the way, of finished conversations alone. No shard is begun once `is_over`, but the first:
    a corpus is not empty.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    total = shard = 0
    while total < options.num_tokens and (texts := options.texts(shard)):
        path = options.shard_path(shard)
        if shard and not path.exists() and is_over():
            break
        if path.exists():
            total += count_tokens(path)
            on_tokens(total)
        else:
            answered: dict[int, Conversation] = {}
            for number, conversation in _answers(llm, options, texts):
                answered[number] = conversation
                total += len(conversation.prompt_ids) + len(conversation.answer_ids)
                on_tokens(total)
            write_shard(path, [answered[number] for number in sorted(answered)])
        shard += 1
    return total


def _answers(llm: LLM, options: CorpusOptions, texts: Sequence[tuple[int, str]]) -> Iterator[tuple[int, Conversation]]:
    """Yield conversations as they end, each with a number that grows in the prompts' order.

    Raises `RuntimeError` for a prompt that could not be run.
    """
    prompts = [{"messages": [{"role": "user", "content": text}]} for _, text in texts]
    for output in llm.as_completed(prompts, [options.sampling(number) for number, _ in texts]):
        if output.error is not None:
            raise RuntimeError(f"prompt {output.prompt!r}: {output.error}")
        answer = output.outputs[0]
        yield int(output.request_id), Conversation(tuple(output.prompt_token_ids), tuple(answer.token_ids))
