"""The law with priced drafts, through the engine: what pays is verified, and what is committed stays the target's.

The target and the drafter are those of `law_cases`, joined in memory. Steps take virtual time with a knee, on a machine
whose speed comes and goes, and requests come in waves: so the price moves. The drafter's rows are sharp and flat by
turns, so drafts are cut within. Planted beside it: a draft whose own tokens decide how much of it is verified.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from exactness import law
from exactness.law_cases import GOOD_LAWS, PROMPT, TARGET_LAWS, VOCAB_SIZE, Population, weight_of
from fakes.scripted import PERIOD, DraftScript, ScriptedDrafter, ScriptedTarget
from outrider.verifier_service.drafting.asking import CoordinatorConfig
from outrider.verifier_service.drafting.coordinator import DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.experts.routing import ExpertRouting
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, Draft, DrafterEvent, Resync, VerifierMessage
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.survival import bins_of_rows
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.schedule import first_nodes
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from support.clock import Clock

ALPHA = 1e-4
NUM_DRAWS, NUM_SEEDED_DRAWS = 12_000, 1_500
NUM_SLOTS = 96  # requests at once, in the wave's crest
KNEE = 128  # tokens in a step
PROFILE = tuple(StepTime(num_tokens=n, seconds=0.02 * max(1.0, n / KNEE)) for n in (1, 32, 64, 128, 256, 512))
SURE = np.where(np.arange(VOCAB_SIZE) % 2, 0.2, 1.0)[:, None]  # by the token before
DRAFT_LAWS = SURE * GOOD_LAWS + (1.0 - SURE) / VOCAB_SIZE  # sharp after some tokens, flat and often wrong after others
pytestmark = pytest.mark.timeout(120)


class MemoryLink:
    """A `DraftClient` of a scripted drafter in this process."""

    def __init__(self, seed: int) -> None:
        self._drafter = ScriptedDrafter(DraftScript(laws=DRAFT_LAWS, seed=seed))
        self._drafter.subscribe("test", self._receive)
        self._events = [DrafterEvent(drafter_id="scripted", vocab_size=VOCAB_SIZE)]

    def _receive(self, payload: bytes) -> None:
        self._events.append(DrafterEvent(drafter_id="scripted", message=decode(payload, (Draft, Resync))))

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        for message in messages:
            self._drafter.submit("test", encode(message))

    def poll(self) -> list[DrafterEvent]:
        events, self._events = self._events, []
        return events


class TimedTarget(ScriptedTarget):
    """Takes virtual time; the machine is slowed down by others every now and then, most of all for large steps."""

    experts: ExpertShape | None = None
    routing: ExpertRouting | None = None

    def __init__(self) -> None:
        super().__init__(TARGET_LAWS, num_blocks=4096, block_size=4)
        self.clock, self.num_steps = Clock(), 0

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        self.num_steps += 1
        slowdown = 1.0 + 0.5 * (self.num_steps % 60 > 40)
        self.clock.now_s += 0.02 * max(1.0, batch.num_tokens * slowdown / KNEE)
        return super().execute(batch, chosen)


class TimedMixture(TimedTarget):
    """Takes the time of reading the experts that a step's tokens take; most of the vocabulary shares one."""

    experts = ExpertShape(num_experts=3, num_active=1)

    def __init__(self) -> None:
        super().__init__()
        self.routing = ExpertRouting(1, 3, 1, torch.device("cpu"))

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        taken = torch.tensor(batch.token_ids)[:, None].clamp(max=2)
        self.routing.chosen[0, : batch.num_tokens] = taken
        self.clock.now_s += 0.004 * len(taken.unique())
        return super().execute(batch, chosen)


class ByTheDrawnToken(DraftPricing):
    """Mistake: take what the drafter thinks of the very token that it drew for the confidence."""

    def admit_all(self, drafts: Sequence[tuple[Request, Draft]]) -> list[Draft]:
        return [self._admit(*one) for one in drafts]

    def _admit(self, request: Request, draft: Draft) -> Draft:
        assert draft.draft_probs is not None
        pairs = zip(draft.draft_probs, draft.token_ids, strict=True)
        claimed = [weight_of(row, token_id) / DRAFT_PROB_SCALE for row, token_id in pairs]
        rows, drafter = self.books.table.rows([request.request_id]), self.survival.number_of("scripted")
        bins = bins_of_rows([claimed], len(claimed))
        survivals = self.survival.survivals(rows, drafter, len(claimed), bins)[0].tolist()
        price = self.price or 0.0
        num_paying = next((i for i, s in enumerate(survivals) if s <= price), len(survivals))
        super().admit_all([(request, draft)])  # the books are right
        return first_nodes(draft, max_nodes=num_paying, max_depth=num_paying)


@dataclass(slots=True)
class Played:
    """What a run gave."""

    counts: np.ndarray = field(default_factory=lambda: np.zeros((VOCAB_SIZE,) * 3))
    outputs: dict[str, list[int]] = field(default_factory=dict)
    prices: list[float] = field(default_factory=list)
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cut_tokens: int = 0


def make_engine(pricing: DraftPricing, seed: int, profile: Sequence[StepTime], target: TimedTarget) -> VerifierEngine:
    limits = {"max_model_len": target.max_model_len, "vocab_size": VOCAB_SIZE}
    config = SchedulerConfig(max_num_batched_tokens=1 << 14, max_num_seqs=NUM_SLOTS, **limits)
    pricing.use_profile(profile, target.experts)
    engine = VerifierEngine(
        target,
        Scheduler(config, BlockPool(target.num_blocks, target.block_size), pricing),
        DraftCoordinator(MemoryLink(seed), CoordinatorConfig(**limits), pricing=pricing),
        clock=target.clock,
        generator=torch.Generator().manual_seed(seed),
        pricing=pricing,
    )
    engine.routing = target.routing
    return engine


def play(
    pricing: DraftPricing,
    num_draws: int,
    *,
    is_seeded: bool = False,
    draft_lengths: tuple[int, ...] = (2, 4, 6),
    seed: int = 0,
    profile: Sequence[StepTime] = PROFILE,
    target: type[TimedTarget] = TimedTarget,
) -> Played:
    """Generate so many triples in waves of requests and count them."""
    engine = make_engine(pricing, seed, profile, target())
    requests = Population(is_seeded=is_seeded, draft_lengths=draft_lengths).requests("p", num_draws)
    played = Played()
    outputs = played.outputs
    for num_steps in itertools.count():
        num_wanted = NUM_SLOTS if num_steps % 100 < 60 else NUM_SLOTS // 8
        while len(engine.requests) < num_wanted and (request := next(requests, None)) is not None:
            assert engine.add(request) is None
        if not engine.has_work():
            break
        for output in engine.step() or []:
            outputs.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                played.num_draft_tokens += output.speculation.num_draft_tokens
                played.num_accepted_tokens += output.speculation.num_accepted_tokens
                played.num_cut_tokens += output.speculation.num_cut_tokens
        engine.check_integrity()
        if engine.pricing.price is not None:
            played.prices.append(engine.pricing.price)
    tokens = np.asarray([token for output in outputs.values() for token in output])
    played.counts = law.joint_counts(tokens.reshape(-1, PERIOD), VOCAB_SIZE)
    return played


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


LAW = Population().law


def test_priced_drafts_keep_the_law():
    played = play(DraftPricing(), NUM_DRAWS)
    assert played.counts.sum() == NUM_DRAWS
    law.assert_law(played.counts, LAW, ALPHA)
    assert min(played.prices[30:]) < 0.45 < 0.75 < max(played.prices), "the price has moved"
    assert len(set(played.prices)) > 10
    assert played.num_draft_tokens > NUM_DRAWS / 2
    assert played.num_cut_tokens > played.num_draft_tokens / 12, "and drafts were cut within"


def test_drafts_priced_by_committed_tokens_experts_keep_the_law():
    pricing = DraftPricing()
    played = play(pricing, NUM_DRAWS, target=TimedMixture)
    law.assert_law(played.counts, LAW, ALPHA)
    assert len(set(played.prices)) > 10
    assert played.num_cut_tokens > played.num_draft_tokens / 20
    assert pricing.cost is not None
    assert pricing.cost.experts is not None
    assert pricing.cost.experts.share(2) < 5 / 9 - 0.01, "it has learnt that routing is not uniform"


def test_a_draft_that_decides_on_itself_is_detected():
    played = play(ByTheDrawnToken(), NUM_DRAWS)
    assert played.num_cut_tokens > NUM_DRAWS / 6
    assert law.rejects_law(played.counts, LAW, ALPHA)


def test_seeded_requests_get_the_same_tokens_priced_or_not():
    priced, plain = (play(DraftPricing(), NUM_SEEDED_DRAWS, is_seeded=True, profile=p) for p in (PROFILE, ()))
    assert priced.outputs == plain.outputs
    assert 0 < priced.num_draft_tokens < 0.8 * plain.num_draft_tokens
    law.assert_law(priced.counts, LAW, ALPHA)


def test_the_comparison_has_power():
    assert law.power(LAW, law.shifted(LAW, 0.06), NUM_DRAWS, ALPHA) > 0.9
    assert PROMPT  # whole triples, as the target wants them
