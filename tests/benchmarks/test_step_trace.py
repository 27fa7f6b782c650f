"""The load step against a server that is played: phases, recovery, decisions, and what the page says."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

import pytest

from benchmarks.step_trace import (
    AFTER,
    BEFORE,
    LOAD,
    Sample,
    StepOptions,
    StepTrace,
    run_step,
    seconds_of,
    to_markdown,
)
from outrider.lab.bench.figures import DraftCounts
from outrider.lab.bench.load import Prompt, Reply

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
        drafts = DraftCounts(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=1)
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


async def test_a_server_that_does_not_tell_its_load_ends_the_run():
    async def broken() -> dict[str, Any]:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await run_step(PlayedServer().ask, broken, ["a"], OPTIONS, clock=time.perf_counter)


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


def test_a_time_without_anybody_who_decodes_is_no_recovery():
    made = samples(*BEFORE_LOAD, (20.5, AFTER, 0.0))
    idle = dataclasses.replace(made[-1], time_s=22.0)
    assert trace_of([*made, idle]).recovery_s is None


def test_what_came_late_is_put_in_order():
    made = samples(*BEFORE_LOAD, (20.5, AFTER, 0.5), (21.25, AFTER, 1.0), (22.25, AFTER, 4.0))
    made[-1], made[-2] = made[-2], made[-1]
    assert trace_of(made).recovery_s == 2.25


def test_decisions_of_a_second_are_added_up():
    made = [
        *samples((3.0, LOAD, 1.0), load=2),
        *samples((3.0, LOAD, 1.0), (3.5, LOAD, 0.5), load=1, on=1)[1:],
        *samples((3.0, LOAD, 1.0), (3.5, LOAD, 0.5), (4.0, LOAD, 2.0))[2:],
    ]
    first, second = seconds_of(trace_of(made))
    assert (first.begin_s, first.last, first.draft_length) == (3.0, made[1], 0.5)
    assert (first.decisions, second.decisions) == ({"load": 3, "on": 1}, {})
    assert second.draft_length == 2.0, "since the last sample of the second before"


def test_the_page_has_both_runs_and_every_second():
    trace = trace_of(samples(*BEFORE_LOAD, (20.5, AFTER, 0.0), (21.5, AFTER, 4.0), on=1))
    drafts = DraftCounts(num_drafts=1, num_draft_tokens=4, num_accepted_tokens=1)
    for first_token_s in (1.75, 1.25):
        reply = Reply(sent_s=1.0, chunk_times_s=(first_token_s,), ended_s=2.0, drafts=drafts)
        trace.replies[BEFORE].append(reply)
    page = to_markdown("title", StepTrace(), trace)
    assert "| TTFT p50 before, ms | - | 500 |" in page
    assert "| TTFT p90 before, ms | - | 700 |" in page
    assert "| accepted before | - | 25% |" in page
    assert "| full drafts again after the load's end, s | - | 1.50 |" in page
    assert "| 21 | after | 1 | 0.25 | 4.00 | on 1 |" in page


@pytest.mark.parametrize(("field", "value"), [("concurrency", 1), ("alone_s", 0.0), ("load_s", -1.0)])
def test_bad_options_are_named(field: str, value: float):
    with pytest.raises(ValueError, match=field):
        StepOptions(**{field: value})
