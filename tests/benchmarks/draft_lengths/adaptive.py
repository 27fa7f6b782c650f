"""The adaptive policy of the replay: the engine's own `DraftPricing`, called as the engine calls it.

Every request asks how much it may draft; a drafter answers with what was recorded; the draft is cut to what is worth
verifying; the step ends, and is learnt from once all have asked again. The cost model starts from a profile of short
contexts, as an engine's does, at the token counts at which vLLM captures graphs: powers of two alone would smear the
knee, which costs 2 % where it matters.

Prompt lookup's tokens come with confidences, as from our own drafter: how often such copies were right lately, by the
length of the match and by how their context went on before. EAGLE's were not recorded: history alone judges its drafts.
Where both are there, the service's own hybrid drafter chooses between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.draft_lengths.recorded_drafters import OTHER_TOKEN, RecordedPool
from benchmarks.draft_lengths.replay import MAX_LENGTH, Batch, Drafts, StepOutcome
from outrider.drafter_service.engine.acceptance import AcceptanceEstimate
from outrider.drafter_service.lookup.ngram_drafter import PRIOR
from outrider.lab.replay.machine import MachineFit
from outrider.lab.replay.traces import NGRAM
from outrider.verifier_service.messages.draft import Draft
from outrider.verifier_service.messages.engine import StepTime
from outrider.verifier_service.messages.request import Request, SamplingParams, SpeculationPlan
from outrider.verifier_service.pricing.cost_model import StepShape
from outrider.verifier_service.pricing.draft_pricing import DraftPricing
from outrider.verifier_service.pricing.offer import Ask, PricedStep
from outrider.verifier_service.scheduling.outcome import Outcome

PROFILED_TOKENS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16), 1024, 2048)  # as vLLM captures its graphs
SAMPLING = SamplingParams(temperature=0.0)


@dataclass(slots=True)
class _Played:
    """A request as the engine knows it, and its part of the step that runs."""

    request: Request
    draft: Draft | None = None  # what of it is verified
    kinds: Sequence[int] = field(default_factory=list)  # of a copy's tokens


class Adaptive:
    """Draft as much as the engine would: the price is that of the steps before this one."""

    def __init__(self, drafters: Sequence[str], machine: MachineFit) -> None:
        self._pricing = DraftPricing()
        self._pricing.use_profile(profile(machine))
        self._pool = RecordedPool(drafters)
        self._plan = SpeculationPlan(drafter_id="+".join(drafters), draft_length=MAX_LENGTH)
        self._copies = AcceptanceEstimate()  # prompt lookup's, by kind
        self._running: dict[str, _Played] = {}

    @property
    def request_ids(self) -> set[str]:
        """The requests of which anything is kept."""
        return {*self._running} | self._pricing.request_ids

    def plan(self, batch: Batch) -> Drafts:
        played = [self._played(request_id) for request_id in batch.request_ids]
        asks = [Ask(one.request, self._plan.drafter_id or "", MAX_LENGTH) for one in played]
        asked = [found.length for found in self._pricing.ask_all(asks)]
        self._pricing.learn()
        drafters, lengths = [0] * batch.size, [0] * batch.size
        for lane, (one, length) in enumerate(zip(played, asked, strict=True)):
            one.draft = None
            if length:
                drafters[lane] = self._draft(one, batch, lane, length)
                lengths[lane] = 0 if one.draft is None else len(one.draft.token_ids)
        return Drafts(drafters=np.array(drafters), lengths=np.array(lengths), asked=np.array(asked))

    def _played(self, request_id: str) -> _Played:
        if request_id not in self._running:
            request = Request(
                request_id=request_id,
                sampling=SAMPLING,
                token_ids=[],
                num_prompt_tokens=0,
                plan=self._plan,
                arrival_s=0.0,
            )
            self._running[request_id] = _Played(request)
        return self._running[request_id]

    def _draft(self, one: _Played, batch: Batch, lane: int, length: int) -> int:
        """Let a request's draft come and be cut; return the place of the drafter that made it."""
        request_id, token_ids = one.request.request_id, one.request.token_ids
        one.kinds = batch.ngram_kinds[lane].tolist()
        claims = [self._copies.rate(kind, PRIOR) for kind in one.kinds]
        self._pool.tell(request_id, batch.offered[:, lane].tolist(), claims)
        place, result = self._pool.draft(request_id, token_ids, length)
        if result.token_ids:  # who has nothing answers with an empty draft, which is not priced
            (draft,) = self._pricing.admit_all([(one.request, _as_sent(result, len(token_ids)))])
            one.draft = draft if draft.token_ids else None
        return place

    def observe(self, batch: Batch, drafts: Drafts, outcome: StepOutcome) -> None:
        played = [self._running[request_id] for request_id in batch.request_ids]
        accepted = outcome.accepted.tolist()
        outcomes = [_outcome(one, num_accepted) for one, num_accepted in zip(played, accepted, strict=True)]
        num_drafted = int(drafts.lengths.sum())
        shape = StepShape(batch.size + num_drafted, batch.num_context_tokens + num_drafted)
        step = PricedStep(outcomes, (), shape, step_s=outcome.step_s, exposed_s=outcome.draft_s)
        self._pricing.end_step(step)
        for lane, (one, num_accepted) in enumerate(zip(played, accepted, strict=True)):
            if one.draft is not None and self._pool.names[int(drafts.drafters[lane])] == NGRAM:
                for depth, kind in enumerate(one.kinds[: min(len(one.draft.token_ids), num_accepted + 1)]):
                    self._copies.observe(kind, is_accepted=depth < num_accepted)
            begin = one.request.num_tokens
            one.request.token_ids += [*range(begin, begin + num_accepted), OTHER_TOKEN]
            if outcome.is_finished[lane]:
                request_id = one.request.request_id
                self._pricing.forget(request_id)
                self._pool.release(request_id)
                del self._running[request_id]


def _as_sent(result: Draft, position: int) -> Draft:
    return Draft(
        request_id=result.request_id,
        round_id=result.round_id,
        position=position,
        token_ids=result.token_ids,
        confidences=result.confidences,
    )


def _outcome(one: _Played, num_accepted: int) -> Outcome:
    return Outcome.counted(
        one.request,
        one.draft,
        num_new_tokens=1 + (0 if one.draft is None else len(one.draft.token_ids)),
        num_committed=num_accepted + 1,
        num_accepted=num_accepted,
    )


def profile(machine: MachineFit) -> list[StepTime]:
    """Return what an engine measures when it starts: steps of short contexts."""
    counts = np.array(PROFILED_TOKENS, dtype=np.float64)
    seconds = machine.forward_s(counts, 0.0) + machine.overhead_s
    return [StepTime(num_tokens=count, seconds=time_s) for count, time_s in zip(PROFILED_TOKENS, seconds, strict=True)]
