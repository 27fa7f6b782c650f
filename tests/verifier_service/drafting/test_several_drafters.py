"""Drafts of several drafters in one step: each by its own record, and nothing of it shows in the tokens."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from fakes.engine_bench import greedy_tokens, make_request, tokens_of
from fakes.priced_bench import KNEED, Bench, GuessingDrafts
from outrider.verifier_service.messages.draft import Draft, DrafterEvent
from outrider.verifier_service.messages.request import RequestOutput

MAX_TOKENS = 200


class SeveralDrafters:
    """A `DraftClient` of drafters of different quality, by their ids."""

    def __init__(self, drafters: Mapping[str, GuessingDrafts]) -> None:
        self.drafters = drafters

    def send(self, drafter_id, messages) -> None:
        self.drafters[drafter_id].send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        return [
            dataclasses.replace(event, drafter_id=drafter_id)
            for drafter_id, drafter in self.drafters.items()
            for event in drafter.poll()
        ]

    def wait_s(self, draft: Draft) -> float:
        return 0.0


def run(bench: Bench, drafter_ids: Sequence[str]) -> tuple[dict[str, list[RequestOutput]], set[frozenset[str]]]:
    """Run a request with each of the drafters; return the outputs, and whose drafts shared a step."""
    for number, drafter_id in enumerate(drafter_ids):
        request = make_request(f"{drafter_id} {number}", draft_length=4, max_tokens=MAX_TOKENS, drafter_id=drafter_id)
        assert bench.engine.add(request) is None
    outputs: dict[str, list[RequestOutput]] = {}
    together: set[frozenset[str]] = set()
    while bench.engine.has_work():
        found = bench.engine.step() or []
        for output in found:
            outputs.setdefault(output.request_id, []).append(output)
        drafted = {output.request_id.split()[0] for output in found if output.num_draft_tokens}
        together.add(frozenset(drafted))
    return outputs, together


def test_a_step_mixes_drafts_of_several_drafters_and_each_is_asked_for_as_much_as_it_is_worth():
    drafts = SeveralDrafters({"good": GuessingDrafts(), "poor": GuessingDrafts(share_wrong=0.6)})
    bench = Bench(drafts, KNEED)
    outputs, together = run(bench, ["good", "poor"] * 3)
    assert all(tokens_of(found) == greedy_tokens(MAX_TOKENS) for found in outputs.values())
    assert frozenset({"good", "poor"}) in together
    # after the first two tokens, and while the good drafter's requests still run
    asked = {name: statistics.fmean(drafter.asked[9:36]) for name, drafter in drafts.drafters.items()}
    assert asked["good"] > asked["poor"] + 0.5
