"""A drafter that runs ahead changes no token of a greedy or seeded request, and no law of a drawn one.

The drafter is in this process and gets as many forwards of spare time between two steps of the verifier as a die says:
some outcomes are drafted to their end, some half, some not at all. The law is that of `markov_target`: 25 laws over 5
ids, Pearson's chi-square, alpha 1e-5; the planted defect looks at what was drawn before it uses it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from exactness.drafter_cells import CELLS, Bench, Place, Shape
from exactness.drafter_runs import ALPHA, MarkovRuns, Run, law_requests
from exactness.small_engines import Limits as EngineLimits
from exactness.small_engines import NoDrafts, generate, load, make_engine, perturbed_copy
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.models.model_drafter import ModelState
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.speculative_config import Method
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID, DrafterEvent, VerifierMessage
from outrider.verifier_service.messages.request import (
    GenerationRequest,
    SamplingParams,
    SpeculationPlan,
    VerificationMode,
)
from tiny.drafters import model_drafter
from tiny.models import make_model, random_sequences

NUM_BRANCHES = 6
MAX_AHEAD_TOKENS = 4096
NUM_LAW_REQUESTS = 150  # of 48 tokens each
PROMPTS = random_sequences((5, 21, 9, 14))


class AheadDrafts:
    """A drafter in this process with spare time: none, or up to `max_spare` forwards before each step."""

    def __init__(self, engine: DraftEngine, *, max_spare: int) -> None:
        self.engine = engine
        self._client = LocalDraftClient(engine)
        self._rng = random.Random(2)
        self._max_spare = max_spare

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self._client.send(LOCAL_DRAFTER_ID, messages)

    def poll(self) -> list[DrafterEvent]:
        events = self._client.poll()
        for _ in range(self._rng.randint(0, self._max_spare)):
            self.engine.run_ahead(MAX_AHEAD_TOKENS)
        return events

    def check_integrity(self) -> None:
        self.engine.check_integrity()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- equal tokens ---


def requests(**sampling: float) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=40, ignore_eos=True, **sampling),
            plan=SpeculationPlan(draft_length=4),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 3.0, "seed": 7}], ids=["greedy", "seeded"])
def test_tokens_are_those_without_a_drafter(sampling: dict[str, float], tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("ahead")
    target = load(make_model("llama"), folder / "target")
    draft = load(perturbed_copy("llama", 0.05), folder / "draft")
    plain = generate(make_engine(target, NoDrafts(), EngineLimits()), NoDrafts(), requests(**sampling))
    drafter = model_drafter(draft, torch.Generator().manual_seed(3), num_ahead_branches=NUM_BRANCHES)
    engine = DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig(), ahead=drafter)
    drafts = AheadDrafts(engine, max_spare=12)
    limits = EngineLimits(num_blocks=48, max_num_batched_tokens=32)  # some are preempted on the way
    generated = generate(make_engine(target, drafts, limits), drafts, requests(**sampling))
    assert generated.token_ids == plain.token_ids
    assert engine.counters.num_cache_hits > 2
    assert engine.counters.num_cache_misses > 2


# --- the law ---


@pytest.fixture(scope="module")
def markov(tmp_path_factory) -> Iterator[MarkovRuns]:
    bench = Bench()
    yield MarkovRuns(bench, tmp_path_factory.mktemp("markov"))
    bench.close()


def run_law(
    markov: MarkovRuns,
    method: Method,
    spoil: Callable[[PagedDrafter[Any]], None] | None = None,
    num_requests: int = NUM_LAW_REQUESTS,
) -> tuple[Run, DraftEngine]:
    """Draw from the target through a drafter that runs ahead."""
    cells = (cell for cell in CELLS if cell.variant.name == method)
    (cell,) = [cell for cell in cells if (cell.shape, cell.place) == (Shape.CHAIN, Place.REMOTE)]
    engines: list[DraftEngine] = []

    def link(spec: DrafterSpec) -> AheadDrafts:
        speculative = replace(spec.speculative, ahead_branches=NUM_BRANCHES)
        spec = replace(spec, speculative=speculative)
        drafter = build_drafter(spec, runner=markov._bench.draft_model(spec))
        assert isinstance(drafter, PagedDrafter)
        if spoil is not None:
            spoil(drafter)
        # no time passes, so that a run is the same wherever it runs
        engine = DraftEngine(drafter, clock=lambda: 0.0, config=DraftEngineConfig(), ahead=drafter)
        engines.append(engine)
        return AheadDrafts(engine, max_spare=12)

    generated = markov._bench.run(markov.checkpoints.config_of(cell), law_requests(num_requests=num_requests), link)
    return markov._counted(generated), engines[0]


# a random head guesses few of the target's tokens, and this EAGLE-3 head never the commonest one
LEAST_HITS = {Method.DRAFT_MODEL: 0.2, Method.EAGLE: 0.1, Method.EAGLE3: 0.05, Method.MTP: 0.1}


# heads run ahead in the same way, of EAGLE's features or of the target's
@pytest.mark.parametrize(
    "method",
    [
        Method.DRAFT_MODEL,
        Method.EAGLE3,
        pytest.param(Method.EAGLE, marks=pytest.mark.soak),
        pytest.param(Method.MTP, marks=pytest.mark.soak),
    ],
)
def test_the_law_is_the_targets(markov: MarkovRuns, method: Method) -> None:
    run, engine = run_law(markov, method)
    assert run.p_value >= ALPHA
    for mode in (VerificationMode.GREEDY, VerificationMode.COUPLED):  # the same batches hold greedy and seeded requests
        assert run.tokens(mode) == markov.plain.tokens(mode)
    counters = engine.counters
    assert counters.num_cache_hits > LEAST_HITS[method] * counters.num_drafts, "hits are what is put to the test"
    assert counters.num_cache_misses > 0


@pytest.mark.parametrize("method", [Method.DRAFT_MODEL, Method.EAGLE3])
def test_a_drafter_that_looks_at_what_it_drew_is_found_out(markov: MarkovRuns, method: Method) -> None:
    """A prepared draft begins with its row's unlikeliest token, as if it were chosen from many that were drawn."""

    def spoil(drafter: PagedDrafter[Any]) -> None:
        honest = drafter._cache.take

        def take(ask: Ask):
            branch = honest(ask)
            rows = () if branch is None else branch.growth.rows()
            if rows:
                chosen, first = rows[0].token_ids[-1], len(branch.ask.token_ids)
                branch.growth.tree.token_ids[0] = chosen
                if isinstance(branch, ModelState):  # a model's knows the draft's tokens by heart
                    branch.tokens[first] = chosen
            return branch

        drafter._cache.take = take

    run, engine = run_law(markov, method, spoil, NUM_LAW_REQUESTS // 2)  # p < 1e-52
    assert engine.counters.num_cache_hits > 0
    assert run.p_value < ALPHA
