"""Rollouts over two verifiers with engines and look-ups of their own: histories go with requests, and to no others.

The network is gRPC on this machine; targets are fakes that repeat no token of these prompts so early.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from fakes.engine_bench import make_request
from fakes.played_fleet import EngineVerifier, Fleet, fleet_of, snapshot_of, tokens_of
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.lookup.prompt_history import SavedHistories
from outrider.drafter_service.lookup.suffix_drafter import SuffixDrafter
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.verifier_service.messages.draft import DraftNeeds
from outrider.verifier_service.messages.history import PastResponse, filed_under
from outrider.verifier_service.messages.request import GenerationRequest, RequestOutput
from outrider.verifier_service.messages.wire import decode

PROMPTS = ((5, 9, 2), (11, 4))
LENGTH = 16


class LookUps(EngineVerifier):
    """A verifier with a suffix drafter in its process."""

    def __init__(self, *, rollouts: bool = True, dies_after: int | None = None) -> None:
        self.drafter = SuffixDrafter(vocab_size=97, needs=DraftNeeds(is_found=True, history=True))
        engine = DraftEngine(self.drafter, clock=lambda: 0.0, config=DraftEngineConfig())
        self.client = LocalDraftClient(engine)
        super().__init__(dies_after, drafts=self.client, rollouts=rollouts)

    @property
    def histories(self) -> dict[str, list[tuple[int, ...]]]:
        self.client._draft()  # the last responses are known at the next step
        saved = decode(self.drafter.export(), (SavedHistories,))
        return {key: [tuple(one.token_ids) for one in responses] for key, responses in saved.keys.items()}

    @property
    def salted(self) -> dict[str, list[tuple[int, ...]]]:
        """The responses that are remembered out of rollouts, by salt."""
        self.client._draft()
        found: dict[str, list[tuple[int, ...]]] = {}
        for salt, text in self.drafter._past._texts:
            found.setdefault(salt, []).append(tuple(text))
        return found


def sample(prompt: Sequence[int] = PROMPTS[0], seed: int | None = None, **fields: object) -> GenerationRequest:
    temperature = 0.0 if seed is None else 5.0
    made = make_request(prompt=prompt, max_tokens=LENGTH, ignore_eos=True, seed=seed, temperature=temperature)
    return GenerationRequest(
        request_id=f"{prompt} {seed}", prompt_token_ids=tuple(prompt), sampling=made.sampling, **fields
    )


def first_round(outputs: Sequence[RequestOutput]) -> int:
    """Return the accepted tokens of the first verification."""
    return outputs[1].num_accepted_tokens


def num_accepted(*samples: Sequence[RequestOutput]) -> int:
    """Return the accepted tokens of whole samples."""
    return sum(output.num_accepted_tokens for outputs in samples for output in outputs)


async def epoch(fleet: Fleet, **fields: object) -> list[list[RequestOutput]]:
    """Run a greedy sample of each prompt, one after another."""
    return [await fleet.generate(sample(prompt, **fields)) for prompt in PROMPTS]


# --- they follow ---


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "planted: not sent"])
async def test_what_ended_at_a_lost_verifier_is_drafted_from_at_the_next_one_at_once(is_sent: bool):
    first, second = LookUps(), LookUps()
    async with fleet_of(memory=RolloutMemory() if is_sent else None) as fleet:
        server = await fleet.add(first)
        await fleet.add(second)
        before = await epoch(fleet, cache_salt="policy 1")
        assert second.requests == []
        await server.stop(None)
        del fleet.router.endpoints["v0"]
        after = await epoch(fleet, cache_salt="policy 2")
    assert [tokens_of(outputs) for outputs in after] == [tokens_of(outputs) for outputs in before]
    assert [first_round(outputs) for outputs in before] == [0, 0], "nothing was known"
    accepted = [first_round(outputs) for outputs in after]
    assert all(number > 0 for number in accepted) if is_sent else accepted == [0, 0]
    if is_sent:
        assert second.histories == {
            filed_under(None, prompt): 2 * [tokens_of(outputs)] for prompt, outputs in zip(PROMPTS, before, strict=True)
        }, "what came along, and what ended here"


async def test_a_sample_that_loses_its_verifier_takes_the_history_to_the_next_one():
    before = 3 * LENGTH + 4
    first, second = LookUps(dies_after=before), LookUps()
    async with fleet_of(first, second, memory=RolloutMemory()) as fleet:
        for seed in (3, 4, None):
            await fleet.generate(sample(seed=seed))
        known = first.histories[filed_under(None, PROMPTS[0])]
        outputs = await fleet.generate(sample())
        fleet.backend._memory.check_integrity()
    (moved,) = second.requests
    assert moved.output_token_ids
    assert [one.token_ids for one in moved.history] == known
    assert len(known) == 3
    assert tokens_of(outputs) == known[-1]
    assert num_accepted(outputs) > LENGTH // 2
    assert second.histories[filed_under(None, PROMPTS[0])] == [*known, known[-1]], "the whole of it, at its end"


async def test_samples_of_one_group_take_it_along_once_and_it_is_filed_once():
    first, second = LookUps(), LookUps()
    async with fleet_of(memory=RolloutMemory()) as fleet:
        await fleet.add(first)
        await fleet.generate(sample(seed=3))
        del fleet.router.endpoints["v0"]
        await fleet.add(second)
        fleet.router.endpoints = {"v1": fleet.router.endpoints.popitem()[1]}
        await asyncio.gather(*(fleet.generate(sample(seed=seed, group_id="g")) for seed in range(4, 8)))
    assert sum(bool(request.history) for request in second.requests) == 1
    ended = second.histories[filed_under(None, PROMPTS[0])]
    assert len(ended) == 5
    assert ended[0] == first.histories[filed_under(None, PROMPTS[0])][0]


async def test_a_verifier_with_a_new_drafter_is_sent_all_of_it_again():
    verifier = LookUps()
    async with fleet_of(verifier, memory=RolloutMemory()) as fleet:
        for drafters in ((), ("d",), ("d",), (), ("e",)):
            fleet.router.know(snapshot_of("other", "v0", linked_drafters=drafters))
            await fleet.generate(sample())
    assert [len(request.history) for request in verifier.requests] == [0, 1, 0, 0, 4]
    assert len(verifier.histories[filed_under(None, PROMPTS[0])]) == 5, "what was there is filed once"


# --- privacy ---


async def test_out_of_rollouts_no_request_brings_anything_and_salts_are_borders():
    verifiers = LookUps(rollouts=False), LookUps(rollouts=False)
    async with fleet_of(*verifiers) as fleet:
        mine = await epoch(fleet, cache_salt="mine")
        theirs = await epoch(fleet, cache_salt="theirs", history_key="mine")
        again = await epoch(fleet, cache_salt="mine")
        del fleet.router.endpoints["v0"]
        elsewhere = await epoch(fleet, cache_salt="mine")
    accepted = [num_accepted(*outputs) for outputs in (mine, theirs, elsewhere, again)]
    assert accepted[:3] == [0, 0, 0]
    assert accepted[3] > LENGTH, "the salt's own"
    for verifier in verifiers:
        assert all(request.history == () for request in verifier.requests)
        assert verifier.histories == {}
    assert [{salt: len(texts) for salt, texts in one.salted.items()} for one in verifiers] == [
        {"mine": 4, "theirs": 2},
        {"mine": 2},
    ]


async def test_out_of_rollouts_a_history_that_came_all_the_same_is_passed_over():
    verifier = LookUps(rollouts=False)
    async with fleet_of(verifier) as fleet:
        response = PastResponse(token_ids=tokens_of(await fleet.generate(sample(cache_salt="mine"))))
        crafted = await fleet.generate(sample(cache_salt="theirs", history=(response,)))
    assert verifier.requests[-1].history == (response,)
    assert num_accepted(crafted) == 0
    assert verifier.histories == {}


async def test_in_rollouts_what_was_declined_is_nowhere_and_found_by_nobody():
    memory, verifiers = RolloutMemory(), (LookUps(), LookUps())
    async with fleet_of(*verifiers, memory=memory) as fleet:
        declined = await epoch(fleet, history_key="", cache_salt="mine")
        assert list(memory.exported()) == []
        assert all(verifier.histories == verifier.salted == {} for verifier in verifiers)
        others = await epoch(fleet, cache_salt="mine")
        del fleet.router.endpoints["v0"]
        elsewhere = await epoch(fleet, history_key="", cache_salt="mine")
        memory.check_integrity()
    assert num_accepted(*declined, *others, *elsewhere) == 0
    assert [request.history for request in verifiers[1].requests] == 2 * [()], "it gives nothing and gets nothing"
    keys = {filed_under(None, prompt) for prompt in PROMPTS}
    assert verifiers[0].histories.keys() == {one.key for one in memory.exported()} == keys
    assert all(len(responses) == 1 for responses in verifiers[0].histories.values())
    assert verifiers[1].histories == verifiers[1].salted == verifiers[0].salted == {}


async def test_in_rollouts_two_keys_never_see_each_other_on_any_verifier():
    memory, verifiers = RolloutMemory(), (LookUps(), LookUps())
    async with fleet_of(*verifiers, memory=memory) as fleet:
        await epoch(fleet, history_key="mine")
        assert first_round((await epoch(fleet, history_key="theirs"))[0]) == 0
        del fleet.router.endpoints["v0"]
        moved = await fleet.generate(sample(history_key="ours"))
        assert first_round(moved) == 0
        mine = await fleet.generate(sample(history_key="mine"))
        assert first_round(mine) > 0
    assert [len(request.history) for request in verifiers[1].requests] == [0, 2]
    assert verifiers[1].histories.keys() == {filed_under("ours", ()), filed_under("mine", ())}
    assert verifiers[0].histories.keys() == {filed_under("mine", ()), filed_under("theirs", ())}


async def test_outside_rollouts_what_was_declined_is_in_no_tree_and_finds_none():
    verifier = LookUps(rollouts=False)
    async with fleet_of(verifier) as fleet:
        declined = await fleet.generate(sample(history_key=""))
        assert verifier.salted == {}
        kept = await fleet.generate(sample())
        assert verifier.salted.keys() == {""}
        again = await fleet.generate(sample(history_key=""))
        found = await fleet.generate(sample())
    assert num_accepted(declined, kept, again) == 0 < num_accepted(found)
    assert tokens_of(declined) == tokens_of(found)
