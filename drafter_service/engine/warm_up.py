"""Draft once in every shape before anybody asks: the first call of a kernel, or of a shape, is slow.

The drafting engine itself runs, over sessions of an invented peer: openings, and rounds after some tokens were
accepted; chains and trees; greedy, seeded and drawn; for one session, then for 2, 4 and more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from outrider.drafter_service.engine.engine import DraftEngine
from outrider.verifier_service.engine.warm_up import doubled
from outrider.verifier_service.messages.draft import Commit, DraftSampling, Open, States

PEER = "warm-up"
PROMPT_LENGTH = 20  # tokens: more than a KV block
NUM_ACCEPTED = 2  # tokens of the first round's draft, so that the second has some to catch up with
SAMPLINGS = (DraftSampling(temperature=0.0), DraftSampling(temperature=1.0, seed=0), DraftSampling(temperature=1.0))


def warm_up(engine: DraftEngine, *, state_width: int, patience_s: float, clock: Callable[[], float]) -> int:
    """Draft for 1, 2, 4 … sessions within `patience_s`; return the largest number of sessions that were drafted for.

    `engine` must be used for nothing else. `state_width` is that of one token's states, all taps together.
    """
    config = engine.config
    length = min(config.max_draft_length, engine.max_model_len - PROMPT_LENGTH - NUM_ACCEPTED - 2)
    if length < 1:
        return 0
    rounds = itertools.count(1)
    num_done = 0
    for count in doubled(config.max_sessions, patience_s, clock):
        for sampling in SAMPLINGS:
            for max_nodes in {0, config.max_tree_nodes}:
                _draft(engine, count, sampling, length, max_nodes, state_width, rounds)
        num_done = count
    return num_done


def _draft(
    engine: DraftEngine,
    count: int,
    sampling: DraftSampling,
    length: int,
    max_nodes: int,
    state_width: int,
    rounds: Iterator[int],
) -> None:
    """Open `count` sessions and ask twice for a draft of each."""
    token_ids = tuple(place % engine.vocab_size for place in range(PROMPT_LENGTH))
    accepted = tuple(place % engine.vocab_size for place in range(NUM_ACCEPTED))
    names = [str(index) for index in range(count)]
    for name in names:
        engine.handle(PEER, Open(request_id=name, sampling=sampling, token_ids=token_ids))
    num_states = 0
    for position, new in ((PROMPT_LENGTH, ()), (PROMPT_LENGTH, accepted)):
        num_known = position + len(new) - 1  # the last token has no state yet
        for name in names:
            if engine.needs.taps:
                engine.handle(PEER, _states(name, num_states, num_known, state_width))
            engine.handle(
                PEER,
                Commit(
                    request_id=name,
                    round_id=next(rounds),
                    position=position,
                    token_ids=new,
                    max_length=length,
                    max_nodes=max_nodes,
                ),
            )
        num_states = num_known
        while engine.has_work():
            engine.step()
    engine.forget_peer(PEER)


def _states(name: str, start: int, stop: int, width: int) -> States:
    data = np.full((stop - start, width), 0.5, np.float32).tobytes()
    return States(request_id=name, position=start, dtype="float32", width=width, data=data)
