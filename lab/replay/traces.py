"""Recorded requests, and what look-ups would have drafted in them.

The tokens that the target generated are known, so a draft is right as far as it equals them: greedy acceptance without
the target. The traces are those of "Speculative Decoding: Performance or Illusion?" (arXiv 2601.11580;
SpecDecode-Bench/simulator), Llama-3.1-8B-Instruct on an H100; they are not part of this repository.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.drafter_service.engine.drafter import GREEDY, Ask, Drafter, SessionKey
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter
from outrider.drafter_service.lookup.suffix_drafter import SuffixDrafter
from outrider.verifier_service.messages.draft import ROOT, Draft

NO_BUDGET = 1 << 31  # these drafters compute nothing
NUM_TREE_NODES = 8

Make = Callable[[int], Drafter]  # from a vocabulary size


class TraceError(ValueError):
    """A file that is no trace; the text names it and the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One recorded request."""

    prompt_ids: list[int]
    generated_ids: list[int]
    recorded: dict[str, list[int]]  # per recorded drafter: tokens that a verification at each position would commit


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


def drafted_places(make: Make, traces: Sequence[Trace], length: int, max_nodes: int = 0) -> list[list[tuple[int, int]]]:
    """Return of every request and generated position how many tokens a drafter drafts there, and how many are right.

    Requests come one after another; `max_nodes` as in `Ask`.
    """
    drafter, found = make(_vocab_size(traces)), []
    for number, trace in enumerate(traces):
        key, token_ids, places = SessionKey("replay", str(number)), list(trace.prompt_ids), []
        for at, token_id in enumerate(trace.generated_ids):
            ask = Ask(key=key, ask_id=at, token_ids=token_ids, sampling=GREEDY, length=length, max_nodes=max_nodes)
            (draft,) = drafter.draft([ask], max_num_tokens=NO_BUDGET)
            places.append((len(draft.token_ids), count_accepted(draft, trace.generated_ids[at : at + length])))
            token_ids.append(token_id)
        drafter.release(key)
        found.append(places)
    return found


def _vocab_size(traces: Sequence[Trace]) -> int:
    return 1 + max(max(*trace.prompt_ids, *trace.generated_ids, 0) for trace in traces)


def count_accepted(draft: Draft, coming: Sequence[int]) -> int:
    """Return how many tokens of a draft, chain or tree, a greedy target accepts that goes on with `coming`."""
    depths = {ROOT: 0}  # of the accepted nodes
    for index, token_id in enumerate(draft.token_ids):
        depth = depths.get(index - 1 if draft.parents is None else draft.parents[index])
        if depth is not None and depth < len(coming) and coming[depth] == token_id:
            depths[index] = depth + 1
    return max(depths.values())


NGRAM = "ngram"
LOOK_UPS: dict[str, tuple[Make, int]] = {  # by name, with the nodes of a tree
    NGRAM: (lambda vocab_size: NgramDrafter(vocab_size=vocab_size), 0),
    "suffix": (lambda vocab_size: SuffixDrafter(vocab_size=vocab_size), 0),
    "suffix+tree": (lambda vocab_size: SuffixDrafter(vocab_size=vocab_size), NUM_TREE_NODES),
}
