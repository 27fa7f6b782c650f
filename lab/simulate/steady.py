"""What a fleet comes to in a steady state, by the arithmetic of one round (drafting.py): an answer in milliseconds.

Every request is alike and as many decode all the time; prompts are computed evenly; drafts have the best fixed length,
and rounds the way to run that is best for the fleet, where in a simulation each verifier takes what is best for itself.
Left out, unlike in a simulation: queues and bursts, the router, how the engine finds that length. So layouts are
compared over many prices, acceptances and links with it, and simulated at one of them (docs/results/money.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.lab.simulate.drafting import DraftSpeed, RoundLoad, Way, choose_round, ways_of
from outrider.lab.simulate.load import LengthLaw
from outrider.lab.simulate.simulation import FleetShape

MAX_ITERATIONS = 24  # rows in flight and prompts depend on the round, which depends on them: errors halve in each
NUM_AVERAGED = 12  # of the last rounds, where a drafter that gets as far as a position in one does not in the next
TOLERANCE = 1e-3  # of the rows of a round, from which on they are taken as found


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """A fleet at one number of requests per verifier and one draft length."""

    num_decoding: int
    draft_length: int
    tokens_per_s: float  # of the fleet
    tpot_s: float


def best_state(fleet: FleetShape, lengths: LengthLaw, acceptance: float, tpot_s: float) -> SteadyState | None:
    """Return the state with the most tokens per second that keeps a time per output token; None: none does."""
    room = fleet.verifier.kv_tokens // (lengths.num_prompt_tokens + lengths.num_output_tokens)
    longest = fleet.drafter.max_draft_length if fleet.num_drafters and fleet.drafter else 0
    if fleet.verifier.own_drafter is not None:
        longest = fleet.verifier.own_draft_length
    most = min(room, fleet.verifier.max_num_seqs)
    states = (_fullest(fleet, lengths, acceptance, tpot_s, most, length) for length in range(longest + 1))
    return max((state for state in states if state), key=lambda at: at.tokens_per_s, default=None)


def _fullest(
    fleet: FleetShape, lengths: LengthLaw, acceptance: float, tpot_s: float, most: int, draft_length: int
) -> SteadyState | None:
    """Return the state with the most requests that keeps the time: both it and throughput grow with their number."""
    best: SteadyState | None = None
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        state = steady_state(fleet, lengths, acceptance, middle, draft_length)
        if state.tpot_s <= tpot_s:
            low, best = middle, state
        else:
            high = middle - 1
    return best


def steady_state(
    fleet: FleetShape, lengths: LengthLaw, acceptance: float, num_decoding: int, draft_length: int
) -> SteadyState:
    """Return what so many requests per verifier with so long drafts come to, by the best way to run rounds."""
    probe = draft_speed(fleet, num_decoding, 1.0, 0.0) if draft_length else None
    ways: list[Way | None] = [None] if probe is None else [*ways_of(num_decoding, probe)]
    states = (_settled(fleet, lengths, acceptance, num_decoding, draft_length, way) for way in ways)
    return max(states, key=lambda state: state.tokens_per_s)


def _settled(
    fleet: FleetShape, lengths: LengthLaw, acceptance: float, num_decoding: int, draft_length: int, way: Way | None
) -> SteadyState:
    """Return the state of one way to run rounds; None: without drafts."""
    timing = fleet.verifier.timing
    context = lengths.num_prompt_tokens + lengths.num_output_tokens / 2  # of a request, half-way
    rows_in_flight, num_prefill = 0.0, num_decoding * lengths.num_prompt_tokens / lengths.num_output_tokens
    committed = seconds = 0.0
    for iteration in range(MAX_ITERATIONS):
        load = RoundLoad(
            num_decoding=num_decoding,
            num_at_least=(num_decoding,) * draft_length,
            num_context_tokens=round(num_decoding * context),
            num_prefill_tokens=round(num_prefill),
        )
        speed = draft_speed(fleet, num_decoding, context, rows_in_flight)
        if way is None or speed is None:
            found = choose_round(load, timing, None, acceptance)
        else:
            found = way(load, timing, speed)
        committed_now = num_decoding + found.share * load.expected_accepted(acceptance)[found.longest]
        # requests end as fast as others begin, each with its prompt
        prefill_error = committed_now * lengths.num_prompt_tokens / lengths.num_output_tokens - num_prefill
        rows_error = found.rows_in_flight - rows_in_flight
        if max(abs(prefill_error), abs(rows_error)) <= TOLERANCE * num_decoding:
            committed, seconds = committed_now, found.seconds
            break
        if iteration >= MAX_ITERATIONS - NUM_AVERAGED:
            committed, seconds = committed + committed_now, seconds + found.seconds
        num_prefill += prefill_error / 2
        rows_in_flight += rows_error / 2
    return SteadyState(
        num_decoding=num_decoding,
        draft_length=draft_length,
        tokens_per_s=fleet.num_verifiers * committed / seconds,
        tpot_s=seconds * num_decoding / committed,
    )


def draft_speed(fleet: FleetShape, num_decoding: int, context: float, rows_in_flight: float) -> DraftSpeed | None:
    """Return how fast drafts come where every verifier has so many rows at the drafters."""
    own = fleet.verifier.own_drafter
    if own is not None:
        return DraftSpeed(token_s=own.seconds(num_decoding, num_decoding * context), is_local=True)
    shape = fleet.drafter
    if shape is None or not fleet.num_drafters:
        return None
    rows = num_decoding * min(1.0, fleet.num_verifiers / fleet.num_drafters)  # several drafters share a verifier's
    others = max(0.0, fleet.num_verifiers / fleet.num_drafters - 1.0) * rows_in_flight

    def token_s(num_rows: float) -> float:
        return shape.timing.seconds(num_rows + others, (num_rows + others) * context)

    return DraftSpeed(
        token_s=token_s(rows),
        ahead_token_s=token_s(rows * shape.num_branches),
        link_s=shape.link_s,
        hit_rate=shape.hit_rate,
        num_branches=shape.num_branches,
    )
