"""Whether a batch of samples ends earlier if its longest ones speculate first (DAS, 2025): tried here, not served.

The survivals of a request's draft are multiplied by its expected remaining length, in means of the running requests. In
virtual time, with the engine, scheduler and pricing that serve (`Bench`), so that a figure has no noise but which
tokens a drafter gets wrong; the lengths are known up to a factor.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.pricing.survival import SurvivalEstimator

MIN_WEIGHT, MAX_WEIGHT = 0.25, 4.0
MAX_DRAFT = 8
NUM_SAMPLES = 64
KNEE = tuple(StepTime(num_tokens=n, seconds=0.02 * max(1.0, n / 96)) for n in (1, 48, 96, 192, 512))


class WeighedSurvival(SurvivalEstimator):
    """Survivals, weighed by the expected remaining lengths of the running requests; `expect` gives whole lengths."""

    def __init__(self, requests: Callable[[], Iterable[Request]]) -> None:
        super().__init__()
        self._requests_now = requests
        self.expect: Callable[[Request], float | None] = lambda request: None
        self._weights: dict[str, float] = {}

    def end_step(self) -> None:
        """Take new weights; a request that has outlived its expectation counts as the longest."""
        self._weights = {}
        expected = {request.request_id: (self.expect(request), request) for request in self._requests_now()}
        left = {
            name: max(0.0, length - request.num_output_tokens)
            for name, (length, request) in expected.items()
            if length is not None
        }
        known = [tokens for tokens in left.values() if tokens]
        if known:
            mean, longest = statistics.fmean(known), max(known)
            bounded = {name: max(MIN_WEIGHT, (tokens or longest) / mean) for name, tokens in left.items()}
            self._weights = {name: min(MAX_WEIGHT, weight) for name, weight in bounded.items()}

    def survivals(
        self, request_id: str, drafter_id: str, length: int, confidences: Sequence[float] | None = None
    ) -> list[float]:
        weight = self._weights.get(request_id, 1.0)
        return [weight * survival for survival in super().survivals(request_id, drafter_id, length, confidences)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A machine, and a drafter: in the verifier's process and at once (`is_found`), or priced as any."""

    name: str
    has_knee: bool
    is_found: bool
    share_wrong: float = 0.3
    share_told: float | None = None


SCENARIOS = tuple(
    Scenario(
        name=f"{'knee at 96 tokens' if has_knee else 'one core'}, {'look-ups' if is_found else 'priced'}, {told}",
        has_knee=has_knee,
        is_found=is_found,
        share_wrong=0.3 if told == "untold" else 0.5,
        share_told=None if told == "untold" else 0.8,
    )
    for has_knee in (False, True)
    for is_found in (True, False)
    for told in ("untold", "told")
)


def lengths_of(order: int) -> list[int]:
    """Return the samples' lengths: most are short, the longest ten times the median."""
    chance = random.Random(order)
    return [min(400, max(8, int(chance.lognormvariate(3.6, 0.9)))) for _ in range(NUM_SAMPLES)]


def last_sample_s(scenario: Scenario, order: int, *, is_weighed: bool, noise: float = 0.4) -> float:
    """Return the time to the last sample of a second epoch; `noise` is the spread of the expected lengths."""
    from fakes.engine_bench import make_request
    from fakes.priced_bench import ONE_CORE, Bench, GuessingDrafts
    from outrider.verifier_service.messages.draft import DrafterEvent, DraftNeeds

    drafts = GuessingDrafts(share_wrong=scenario.share_wrong, share_told=scenario.share_told)
    needs = DraftNeeds(is_found=scenario.is_found)
    drafts.events = [DrafterEvent(drafter_id="d", vocab_size=97, needs=needs)]
    bench = Bench(drafts, KNEE if scenario.has_knee else ONE_CORE, num_blocks=8192)
    expected: dict[str, float] = {}
    chance = random.Random(order)
    survival = WeighedSurvival(lambda: bench.engine.requests.values())
    survival.expect = lambda request: expected.get(request.request_id)
    bench.pricing.survival = survival
    began_s = 0.0
    for epoch in range(2):
        began_s = bench.now_s
        for place, length in enumerate(lengths_of(1000 * epoch + order)):
            name = f"{order}-{epoch}-{place}"
            request = make_request(name, draft_length=MAX_DRAFT, max_tokens=length, drafter_id="d")
            if is_weighed:
                expected[name] = length * chance.lognormvariate(0.0, noise)
            assert bench.engine.add(replace(request)) is None
        while bench.engine.has_work():
            bench.engine.step()
            survival.end_step()
    return bench.now_s - began_s


def gains(num_orders: int, on_scenario: Callable[[str], None]) -> dict[str, list[float]]:
    """Return, by scenario and order, the time to the last sample without weights by that with them."""
    found: dict[str, list[float]] = {}
    for scenario in SCENARIOS:
        found[scenario.name] = [
            last_sample_s(scenario, order, is_weighed=False) / last_sample_s(scenario, order, is_weighed=True)
            for order in range(num_orders)
        ]
        on_scenario(f"{scenario.name}: {statistics.fmean(found[scenario.name]):.3f}")
    return found
