"""The scenarios of the test of the law, each run in a worker process: what the drafter does and who asks for what.

`CASES` are honest: everything that may go wrong without touching the law. `DEFECTS` are the mistakes that the design
warns of, planted between what the scripted drafter drew and what it sends.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from exactness import law
from fakes.scripted import (
    PERIOD,
    DraftScript,
    Drawn,
    Result,
    Scenario,
    random_laws,
    run_scenario,
    sparse_row,
    triple_law,
)
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, SparseRow
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

VOCAB_SIZE = 6
NUM_DRAWS = 7_500  # of each population
DEFECT_FACTOR = 2  # as many times as many show what is planted
LONG = 10 * PERIOD  # output tokens of a request that yields ten draws
PROMPT = (1, 2, 3)

TARGET_LAWS = random_laws(VOCAB_SIZE, seed=1)
GOOD_LAWS = 0.7 * TARGET_LAWS + 0.3 * random_laws(VOCAB_SIZE, seed=2)
BAD_LAWS = random_laws(VOCAB_SIZE, seed=3, spread=1.5)
# one quarter of the mass on two ids that the target does not have, and a shape of its own on the others
PADDED_LAWS = np.concatenate([0.75 * GOOD_LAWS, np.full((*GOOD_LAWS.shape[:-1], 2), 0.125)], axis=-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Requests of one kind; all populations of a case share one engine and its batches."""

    num_output_tokens: int = LONG
    sampling: Mapping[str, float] = field(default_factory=dict)
    is_seeded: bool = False
    draft_lengths: tuple[int, ...] = (1, 2, 3)  # one request after the other

    def requests(self, name: str, num_draws: int) -> Iterator[GenerationRequest]:
        num_requests = num_draws * PERIOD // self.num_output_tokens
        seeds = np.random.default_rng(7).integers(-(1 << 63), 1 << 63, size=num_requests)
        for index in range(num_requests):
            length = self.draft_lengths[index % len(self.draft_lengths)]
            choice: dict[str, Any] = {"seed": int(seeds[index]), "choice_index": index % 3} if self.is_seeded else {}
            yield GenerationRequest(
                request_id=f"{name}/{index}",
                prompt_token_ids=PROMPT,
                sampling=SamplingParams(max_tokens=self.num_output_tokens, **self.sampling, **choice),
                plan=SpeculationPlan(draft_length=length),
            )

    @property
    def law(self) -> np.ndarray:
        """Return the joint law of one draw: [VOCAB_SIZE] * 3."""
        return triple_law(shaped(TARGET_LAWS, **self.sampling))


def shaped(
    laws: np.ndarray, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Reshape laws [..., vocab_size] by the definition of each parameter, one after the other, token by token."""
    tempered = laws ** (1.0 / temperature)
    shaped_laws = tempered / tempered.sum(axis=-1, keepdims=True)
    for row in shaped_laws.reshape(-1, laws.shape[-1]):  # views: written in place
        order = np.argsort(-row)
        if top_k:
            row[order[top_k:]] = 0.0
            row /= row.sum()
        reached = np.concatenate([[0.0], np.cumsum(row[order])[:-1]])
        row[order[reached >= top_p]] = 0.0
        row /= row.sum()
        row[row < min_p * row.max()] = 0.0
        row /= row.sum()
    return shaped_laws


# --- planted defects ---


def weight_of(row: SparseRow, token_id: int) -> int:
    return row.weights[row.token_ids.index(token_id)]


def cut(drawn: Drawn, is_kept: Callable[[int], bool]) -> Drawn:
    """Keep the tokens before the first index that is not kept."""
    length = next((index for index in range(len(drawn.token_ids)) if not is_kept(index)), len(drawn.token_ids))
    return Drawn(drawn.token_ids[:length], drawn.rows[:length])


def only_confident(drawn: Drawn) -> Drawn:
    """Have only those tokens verified that the drafter itself found likely."""
    return cut(drawn, lambda i: weight_of(drawn.rows[i], drawn.token_ids[i]) >= 0.25 * DRAFT_PROB_SCALE)


def without_invalid(drawn: Drawn) -> Drawn:
    """Drop a drawn token that the target does not have, and what follows it."""
    return cut(drawn, lambda i: drawn.token_ids[i] < VOCAB_SIZE)


def until_deadline(drawn: Drawn) -> Drawn:
    """Send what is there when the time is up; some tokens take longer to draw (or to check) than others."""
    ready_ms = list(itertools.accumulate(1 + token_id % 3 for token_id in drawn.token_ids))
    return cut(drawn, lambda i: ready_ms[i] <= 4)


def claiming_sharper(drawn: Drawn) -> Drawn:
    """Report a law that is more certain than the one drawn from."""
    return Drawn(drawn.token_ids, [_sharpened(row) for row in drawn.rows])


@functools.cache
def _sharpened(row: SparseRow) -> SparseRow:
    weights = np.zeros(max(row.token_ids) + 1)
    weights[list(row.token_ids)] = np.asarray(row.weights, dtype=np.float64) ** 1.5
    return sparse_row(weights / weights.sum(), len(row.token_ids))


# --- cases ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    scenario: Scenario
    populations: Mapping[str, Population]


def _scenario(draft_laws: np.ndarray = GOOD_LAWS, *, top_n: int = VOCAB_SIZE + 2, **options: Any) -> Scenario:
    return Scenario(laws=TARGET_LAWS, script=DraftScript(laws=draft_laws, top_n=top_n), **options)


def _is_late(prefix: Sequence[int]) -> bool:
    """By what the draft follows: a third of the places, and there after half of the tokens."""
    return len(prefix) % PERIOD == 1 and prefix[-1] < VOCAB_SIZE // 2


def _shapes(**samplings: Mapping[str, float]) -> Case:
    populations = {name: Population(sampling=sampling) for name, sampling in samplings.items()}
    return Case(scenario=_scenario(), populations=populations)


FRESH = Population(num_output_tokens=PERIOD)
CASES: dict[str, Case] = {
    # requests of exactly one draw (prompt, three tokens, gone), half of them without speculation in the same batches
    "fresh": Case(scenario=_scenario(), populations={"fresh": FRESH, "off": replace(FRESH, draft_lengths=(0,))}),
    "shapes": _shapes(
        temperature={"temperature": 0.6},
        top_k={"top_k": 3},
        combined={"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    ),
    "nuclei": _shapes(top_p={"top_p": 0.8}, min_p={"min_p": 0.2}),
    "bad": Case(scenario=_scenario(BAD_LAWS), populations={"bad": Population()}),
    "truncated": Case(scenario=_scenario(top_n=3), populations={"truncated": Population()}),
    "late": Case(scenario=_scenario(is_late=_is_late), populations={"late": Population()}),
    "preempted": Case(scenario=_scenario(num_blocks=1500), populations={"preempted": Population()}),
    "padded": Case(scenario=_scenario(PADDED_LAWS), populations={"padded": Population()}),
    "seeded": Case(scenario=_scenario(), populations={"seeded": Population(is_seeded=True)}),
}


def _planted(report: Callable[[Drawn], Drawn], draft_laws: np.ndarray = GOOD_LAWS) -> Case:
    honest = _scenario(draft_laws)
    scenario = replace(honest, script=replace(honest.script, report=report))
    return Case(scenario=scenario, populations={"planted": Population()})


DEFECTS: dict[str, Case] = {
    "only_confident": _planted(only_confident),
    "without_invalid": _planted(without_invalid, PADDED_LAWS),
    "until_deadline": _planted(until_deadline),
    "claiming_sharper": _planted(claiming_sharper),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a worker sends back: counts per population, and what happened on the way."""

    counts: dict[str, np.ndarray]  # [VOCAB_SIZE] * 3 each
    result: Result


def run_case(name: str, num_draws: int) -> Outcome:
    """Run one case to its end, `num_draws` of each population; everything random has a fixed seed."""
    torch.set_num_threads(1)
    case = {**CASES, **DEFECTS}[name]
    streams = [population.requests(label, num_draws) for label, population in case.populations.items()]
    taking_turns = itertools.chain.from_iterable(itertools.zip_longest(*streams))
    requests = (request for request in taking_turns if request is not None)
    result = asyncio.run(run_scenario(case.scenario, requests))
    outputs, result.outputs = result.outputs, {}
    counts = {label: _count(outputs, label) for label in case.populations}
    return Outcome(counts=counts, result=result)


def _count(outputs: Mapping[str, Sequence[int]], label: str) -> np.ndarray:
    tokens = [token for request_id, output in outputs.items() if request_id.startswith(f"{label}/") for token in output]
    return law.joint_counts(np.asarray(tokens).reshape(-1, PERIOD), VOCAB_SIZE)
