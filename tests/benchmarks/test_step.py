"""The load step against a server that is played: phases, recovery, decisions, and what the page says."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from benchmarks.step import (
    AFTER,
    BEFORE,
    LOAD,
    Sample,
    StepOptions,
    StepTrace,
    run_step,
    to_markdown,
)
from outrider.lab.bench.load import Prompt, Reply
from outrider.verifier_service.messages.request import SpeculationMetrics

OPTIONS = StepOptions(concurrency=5, alone_s=0.6, load_s=0.6)
AGE_S = 100.0  # of what the played server says of its load


class PlayedServer:
    """Answers in 20 ms and drafts 4 tokens while it is alone, none under load."""

    def __init__(self) -> None:
        self.num_running = self.most_running = self.num_broken_off = self.num_loads = self.num_asked_tokens = 0

    async def ask(self, prompt: Prompt) -> Reply:
        sent_s = time.perf_counter()
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(0.02)
        except asyncio.CancelledError:
            self.num_broken_off += 1
            raise
        finally:
            self.num_running -= 1
        drafts = SpeculationMetrics(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=1)
        now_s = time.perf_counter()
        return Reply(sent_s=sent_s, chunk_times_s=(now_s,), ended_s=now_s, num_tokens=2, drafts=drafts)

    async def read_load(self) -> dict[str, Any]:
        self.num_loads += 1
        is_busy = self.num_running > 1
        self.num_asked_tokens += 0 if is_busy else 4
        verifier = {
            "price": 1.0 if is_busy else None,
            "num_asks": self.num_loads,
            "num_asked_tokens": self.num_asked_tokens,
        }
        decisions = [{"decision": "on", "reason": "pays", "count": 2}]
        decisions.append({"decision": "off", "reason": "load", "count": self.num_loads})
        totals = {"num_running": self.num_running}
        return {"age_s": AGE_S, "verifiers": [verifier], "totals": totals, "decisions": decisions}


async def test_one_many_one():
    server = PlayedServer()
    trace = await run_step(server.ask, server.read_load, ["a", "b"], OPTIONS, clock=time.perf_counter)
    await asyncio.sleep(0)
    assert server.most_running == 5
    assert server.num_running == 0
    assert server.num_broken_off >= 4, "the crowd's streams, and the last one"
    assert all(trace.replies[phase] for phase in (BEFORE, LOAD, AFTER))
    assert len(trace.replies[LOAD]) > 3 * len(trace.replies[BEFORE])
    in_load = [sample.num_asked_tokens for sample in trace.samples if sample.phase == LOAD]
    assert len(in_load) > 1
    assert min(in_load[1:]) == max(in_load[1:]), "nothing was asked for"
    assert trace.samples[0].decisions == {"on: pays": 2, "load": 1}
    assert all(sample.decisions == {"load": 1} for sample in trace.samples[1:])
    assert trace.drafts(BEFORE).num_accepted_tokens == len(trace.replies[BEFORE])
    assert trace.errors == []
    assert all(sample.time_s < trace.load_ended_s - AGE_S + 10.0 for sample in trace.samples), "when it was so"


def samples(*rows: tuple[float, str, float], **decisions: int) -> list[Sample]:
    """Return samples of a stream that decodes 8 times a second: when, phase, and the length asked for until then."""
    made: list[Sample] = []
    num_tokens, before_s = 0.0, 0.0
    for time_s, phase, draft_length in rows:
        num_tokens, before_s = num_tokens + 8 * (time_s - before_s) * draft_length, time_s
        made.append(
            Sample(
                time_s=time_s,
                phase=phase,
                num_running=1,
                price=0.25,
                num_asks=round(8 * time_s),
                num_asked_tokens=round(num_tokens),
                decisions=decisions,
            )
        )
    return made


def trace_of(made: list[Sample]) -> StepTrace:
    return StepTrace(samples=made, load_ended_s=20.0)


BEFORE_LOAD = ((0.0, BEFORE, 0.0), (1.5, BEFORE, 1.0), (2.0, BEFORE, 4.0), (3.0, BEFORE, 4.0), (10.0, LOAD, 0.0))


def test_recovery_counts_from_the_loads_end_to_a_second_of_drafts_as_long_as_before():
    slowly = ((20.5, AFTER, 0.5), (21.25, AFTER, 1.0), (21.75, AFTER, 4.0), (22.25, AFTER, 3.5), (22.75, AFTER, 4.0))
    trace = trace_of(samples(*BEFORE_LOAD, *slowly))
    assert trace.draft_length(BEFORE) == 4.0, "the first second does not count"
    assert trace.recovery_s == 1.75, "seen at the end of the first half second of long drafts"
    stale = trace_of(samples(*BEFORE_LOAD, (19.0, AFTER, 4.0), (19.75, AFTER, 4.0), *slowly))
    assert stale.recovery_s == 1.75, "read after the load's end, but of before it"


@pytest.mark.parametrize(
    "after",
    [
        ((20.5, AFTER, 0.0), (21.5, AFTER, 3.5), (22.5, AFTER, 3.5)),
        ((20.5, AFTER, 0.0), (21.0, AFTER, 4.0), (21.25, AFTER, 4.0)),
        ((20.5, AFTER, 0.0), (21.0, AFTER, 4.0), (21.5, AFTER, 0.0), (22.5, AFTER, 0.0)),
        ((20.5, AFTER, 0.0), (21.0, AFTER, 2.0), (21.5, AFTER, 7.0), (22.5, AFTER, 1.0)),
    ],
    ids=["shorter than before", "seen for less than a second", "not for a second", "shorter at first"],
)
def test_no_recovery(after: tuple[tuple[float, str, float], ...]):
    assert trace_of(samples(*BEFORE_LOAD, *after)).recovery_s is None


def test_the_page_has_both_runs_and_every_second():
    trace = trace_of(samples(*BEFORE_LOAD, (20.5, AFTER, 0.0), (21.5, AFTER, 4.0), on=1))
    drafts = SpeculationMetrics(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=1)
    for first_token_s in (1.75, 1.25):
        reply = Reply(sent_s=1.0, chunk_times_s=(first_token_s,), ended_s=2.0, drafts=drafts)
        trace.replies[BEFORE].append(reply)
    page = to_markdown("title", StepTrace(), trace)
    assert "| TTFT p50 before, ms | - | 500 |" in page
    assert "| TTFT p90 before, ms | - | 700 |" in page
    assert "| accepted before | - | 25% |" in page
    assert "| full drafts again after the load's end, s | - | 1.50 |" in page
    assert "| 21 | after | 1 | 0.25 | 4.00 | on 1 |" in page
