"""Replay drafters over recorded requests: what would have been accepted, and how long drafting takes.

A replay knows the tokens that the target generated, so a draft is right as far as it equals them: greedy acceptance
without the target. Every arm meets the same requests in the same order, one after another. The traces are those of
"Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580; SpecDecode-Bench/simulator), Llama-3.1-8B-Instruct
on an H100; they are not part of this repository.

Definitions
    verification            a draft, maybe an empty one, and the tokens that it commits: those accepted and one more
    mean acceptance length  generated tokens / verifications, those of empty drafts included: recorded lengths do not
                            say whether there was a draft
    accepted at i           verifications that accept at least i tokens / verifications
    drafted                 draft tokens / verifications
    empty                   verifications of empty drafts / verifications
    per draft               time of one call of the drafter, the tokens committed since its last one taken in; CPU time
                            of the calling thread, so that whatever else the machine does is left out
    per prompt token        time of a request's first call / the tokens of its prompt
"""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter
from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig, SuffixDrafter
from outrider.verifier_service.messages.draft import ROOT, Draft, DraftNeeds, DraftSampling

NUM_POSITIONS = 6  # of acceptance by position
GREEDY = DraftSampling(temperature=0.0)
NO_BUDGET = 1 << 31  # these drafters compute nothing

Clock = Callable[[], float]


class TraceError(ValueError):
    """A file that is no trace; the text names it and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded request."""

    prompt_ids: list[int]
    generated_ids: list[int]
    recorded: dict[str, list[int]]  # per recorded drafter: tokens that a verification at each position would commit


@dataclass(slots=True)
class Figures:
    """What one arm did on one dataset; the module says what the names mean."""

    num_tokens: int = 0
    num_verifications: int = 0
    num_at_least: list[int] = field(default_factory=lambda: [0] * NUM_POSITIONS)  # verifications that accept more
    num_draft_tokens: int | None = None  # None: not recorded
    num_empty: int | None = None
    draft_s: list[float] = field(default_factory=list)
    prompt_s: float = 0.0
    num_prompt_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        return self.num_tokens / self.num_verifications

    @property
    def acceptance_by_position(self) -> list[float]:
        return [number / self.num_verifications for number in self.num_at_least]

    @property
    def drafted(self) -> float | None:
        return None if self.num_draft_tokens is None else self.num_draft_tokens / self.num_verifications

    @property
    def empty(self) -> float | None:
        return None if self.num_empty is None else self.num_empty / self.num_verifications

    @property
    def draft_p50_s(self) -> float | None:
        return statistics.median(self.draft_s) if self.draft_s else None

    @property
    def draft_p99_s(self) -> float | None:
        return sorted(self.draft_s)[len(self.draft_s) * 99 // 100] if self.draft_s else None

    @property
    def prompt_token_s(self) -> float | None:
        return self.prompt_s / self.num_prompt_tokens if self.num_prompt_tokens else None

    def add(self, num_accepted: int, num_committed: int) -> None:
        self.num_tokens += num_committed
        self.num_verifications += 1
        for position in range(min(num_accepted, NUM_POSITIONS)):
            self.num_at_least[position] += 1


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafter in a replay; `max_nodes` as in `Ask`."""

    name: str
    make: Callable[[int], Drafter]  # from a vocabulary size
    max_nodes: int = 0


def read_traces(path: Path, max_requests: int | None = None) -> list[Trace]:
    """Read a JSONL file, gzipped or not; the first `max_requests` lines of it."""
    traces: list[Trace] = []
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if max_requests is not None and number > max_requests:
                break
            try:
                traces.append(_parse(json.loads(line)))
            except (ValueError, TypeError, AttributeError, LookupError) as error:
                raise TraceError(f"{path}, line {number}: {error!r}") from error
    if not traces:
        raise TraceError(f"{path} holds no request")
    return traces


def _parse(fields: dict[str, object]) -> Trace:
    prompt_ids, generated_ids = _ids(fields["prompt_token_ids"]), _ids(fields["generated_token_ids"])
    if not prompt_ids or not generated_ids:
        raise ValueError("no tokens")
    recorded = {
        name.removeprefix("acc_"): _ids(value["acc_len"])
        for name, value in fields.items()
        if name.startswith("acc_") and isinstance(value, dict)
    }
    if any(min(lengths, default=1) < 1 for lengths in recorded.values()):
        raise ValueError("acc_len below 1")
    return Trace(prompt_ids=prompt_ids, generated_ids=generated_ids, recorded=recorded)


def _ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(id_, int) and id_ >= 0 for id_ in value):
        raise ValueError("expected a list of integers from 0 on")
    return value


def recorded_figures(traces: Sequence[Trace], name: str) -> Figures:
    """Walk through the recorded lengths as a replay does: from each verification to the token after what it commits."""
    figures = Figures()
    for trace in traces:
        lengths = trace.recorded.get(name, [])
        at = 0
        while at < len(lengths):
            num_committed = min(lengths[at], len(lengths) - at)
            figures.add(min(lengths[at] - 1, num_committed), num_committed)
            at += num_committed
    return figures


def replay_arm(arm: Arm, traces: Sequence[Trace], *, num_speculative_tokens: int, clock: Clock) -> Figures:
    """Let a fresh drafter draft every request through, one after another."""
    figures = Figures(num_draft_tokens=0, num_empty=0)
    highest = max(max(*trace.prompt_ids, *trace.generated_ids, 0) for trace in traces)
    drafter = arm.make(highest + 1)
    for number, trace in enumerate(traces):
        _replay_one(arm, drafter, SessionKey("replay", str(number)), trace, figures, num_speculative_tokens, clock)
    return figures


def _replay_one(
    arm: Arm, drafter: Drafter, key: SessionKey, trace: Trace, figures: Figures, length: int, clock: Clock
) -> None:
    token_ids = list(trace.prompt_ids)
    end = len(token_ids) + len(trace.generated_ids)
    while len(token_ids) < end:
        ask = Ask(
            key=key,
            ask_id=figures.num_verifications,
            token_ids=token_ids,
            sampling=GREEDY,
            length=length,
            max_nodes=arm.max_nodes,
        )
        begin_s = clock()
        (draft,) = drafter.draft([ask], max_num_tokens=NO_BUDGET)
        elapsed_s = clock() - begin_s
        num_generated = len(token_ids) - len(trace.prompt_ids)
        if num_generated:
            figures.draft_s.append(elapsed_s)
        else:
            figures.prompt_s += elapsed_s
            figures.num_prompt_tokens += len(token_ids)
        coming = trace.generated_ids[num_generated : num_generated + length + 1]
        num_accepted = count_accepted(draft, coming)
        committed = coming[: num_accepted + 1]
        figures.add(num_accepted, len(committed))
        assert figures.num_draft_tokens is not None
        assert figures.num_empty is not None
        figures.num_draft_tokens += len(draft.token_ids)
        figures.num_empty += not draft.token_ids
        token_ids += committed
    drafter.release(key)


def count_accepted(draft: Draft, coming: Sequence[int]) -> int:
    """Return how many tokens of a draft, chain or tree, a greedy target accepts that goes on with `coming`."""
    depths = {ROOT: 0}  # of the accepted nodes
    for index, token_id in enumerate(draft.token_ids):
        depth = depths.get(index - 1 if draft.parents is None else draft.parents[index])
        if depth is not None and depth < len(coming) and coming[depth] == token_id:
            depths[index] = depth + 1
    return max(depths.values())


class SuffixElseNgram:
    """The draft of two that expects more accepted tokens by its confidences: a hybrid without a model."""

    def __init__(self, vocab_size: int) -> None:
        self._drafters = (SuffixDrafter(vocab_size=vocab_size), NgramDrafter(vocab_size=vocab_size))
        self.vocab_size, self.max_model_len = vocab_size, self._drafters[0].max_model_len
        self.needs = DraftNeeds()

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        answers = [drafter.draft(asks, max_num_tokens=max_num_tokens) for drafter in self._drafters]
        return [max(pair, key=expected_accepted) for pair in zip(*answers, strict=True)]

    def release(self, key: SessionKey) -> None:
        for drafter in self._drafters:
            drafter.release(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        for drafter in self._drafters:
            drafter.check_integrity(keys)


def expected_accepted(draft: Draft) -> float:
    """Return how many tokens a chain expects to be accepted, by its confidences."""
    expected, survival = 0.0, 1.0
    for confidence in draft.confidences or ():
        survival *= confidence
        expected += survival
    return expected


def arms(max_nodes: int) -> list[Arm]:
    """Return the model-free drafters with their defaults, and at others' settings where that tells something."""

    def ngram(smallest: int, largest: int) -> Callable[[int], Drafter]:
        return lambda vocab_size: NgramDrafter(
            vocab_size=vocab_size, prompt_lookup_min=smallest, prompt_lookup_max=largest
        )

    def suffix(config: SuffixConfig) -> Callable[[int], Drafter]:
        return lambda vocab_size: SuffixDrafter(vocab_size=vocab_size, config=config)

    default = SuffixConfig()
    return [
        Arm("n-gram, 3 to 7 tokens", ngram(3, 7)),
        Arm("n-gram, 2 to 5 tokens", ngram(2, 5)),
        Arm(f"n-gram, 2 to 5, tree of {max_nodes}", ngram(2, 5), max_nodes),
        Arm("suffix, this request alone", suffix(SuffixConfig(max_cached_requests=0))),
        Arm("suffix, past responses too", suffix(default)),
        Arm("suffix, past, vLLM's limit 1.0", suffix(SuffixConfig(max_spec_factor=1.0))),
        Arm(f"suffix, past, tree of {max_nodes}", suffix(default), max_nodes),
        Arm("suffix or n-gram, past", SuffixElseNgram),
    ]
