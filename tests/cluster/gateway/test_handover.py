"""Requests that change their verifier with their KV: what the client sees, whoever dies, refuses or drains, and when.

gRPC servers play the verifiers by the contract of `verifier_service/messages/handover.py`; no engine draws a token.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from fakes.played_fleet import PLAN, REQUEST, Fleet, PlayedVerifier, fleet_of, snapshot_of, tokens_of
from outrider.cluster.common.errors import InvalidRequest
from outrider.cluster.gateway import handover
from outrider.cluster.gateway.kv_transfer import KeptOutput, prompt_digest
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.cluster.gateway.verifier_streams import NotTaken
from outrider.cluster.router.fleet import Assignment, PlacementReason, RouteAsk
from outrider.verifier_service.messages.handover import KVSource
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
    SpeculationPlan,
    TokenLogprobs,
)
from outrider.verifier_service.messages.requests_link import Accepted, Refused
from support.waiting import until

DIES, HANGS = object(), object()
EOS = 96
SHORT_S = 0.05


def tokens(*ids: int, **fields: Any) -> RequestOutput:
    return RequestOutput(request_id="", token_ids=ids, **fields)


def held(*ids: int, **fields: Any) -> RequestOutput:
    return tokens(*ids, is_held=True, **fields)


def last(*ids: int, reason: FinishReason = FinishReason.STOP) -> RequestOutput:
    return tokens(*ids, finish_reason=reason)


def refused(error: str = "gone: it has ended") -> RequestOutput:
    return tokens(finish_reason=FinishReason.NOT_TAKEN, error=error)


class Player(PlayedVerifier):
    """A verifier that plays a script for each of its requests, in their order, the last one for all further ones.

    A step is an output; an event that it waits for; or its death, or silence for ever.
    """

    def __init__(self, *plays: Sequence[Any]) -> None:
        super().__init__()
        self.plays = plays

    async def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
        play = self.plays[min(len(self.requests), len(self.plays)) - 1]
        yield Accepted(request_id=request.request_id)
        for step in play:
            if isinstance(step, asyncio.Event):
                await step.wait()
            elif step is DIES:
                yield grpc.StatusCode.UNAVAILABLE
            elif step is HANGS:
                await asyncio.get_running_loop().create_future()
            else:
                yield dataclasses.replace(step, request_id=request.request_id)


@contextlib.asynccontextmanager
async def roles(giver: Player, *others: Player, **options: Any) -> AsyncIterator[Fleet]:
    """Run a fleet with a verifier for prompts, v0; the router names the first other one that is not excluded."""
    async with fleet_of(giver, *others, **options) as fleet:
        endpoints = list(fleet.router.endpoints.items())

        def answer(ask: RouteAsk) -> Assignment | None:
            left = [place for place in endpoints[1:] if place[0] not in ask.excluded_verifier_ids]
            if not left:
                return None
            prefill = endpoints[0] if ask.may_hand_over else (None, "")
            return Assignment(
                verifier_id=left[0][0],
                endpoint=left[0][1],
                plan=PLAN,
                reason=PlacementReason.ONLY,
                prefill_verifier_id=prefill[0],
                prefill_endpoint=prefill[1],
            )

        fleet.router.choose = answer
        yield fleet


def sampled(request: GenerationRequest = REQUEST, **fields: Any) -> GenerationRequest:
    return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, **fields))


# --- prefill and decode apart ---


async def test_the_first_token_is_the_givers_and_the_rest_the_takers():
    giver, taker = Player([held(5), HANGS]), Player([tokens(6), last(7)])
    async with roles(giver, taker) as fleet:
        outputs = await fleet.generate(sampled(prompt_logprobs=0))
        assert [output.token_ids for output in outputs] == [(5,), (6,), (7,)]
        assert {(output.request_id, output.is_held) for output in outputs} == {("mine", False)}
        await until(lambda: giver.cancelled)
        place = KVSource(endpoint=fleet.router.endpoints["v0"], request_id=giver.requests[0].request_id)
    (given,), (taken,) = giver.requests, taker.requests
    assert (given.hands_over, given.kv_source, given.plan) == (True, None, SpeculationPlan())
    assert (taken.hands_over, taken.kv_source, taken.plan) == (False, place, PLAN)
    assert (given.output_token_ids, taken.output_token_ids) == ((), ()), "the taker learns the token from the giver"
    assert (given.sampling.prompt_logprobs, taken.sampling.prompt_logprobs) == (0, None)
    assert given.request_id != taken.request_id
    assert (giver.cancelled, taker.cancelled) == ([given.request_id], [])
    assert fleet.handovers == [("taken", "", True)]


async def test_the_taker_begins_while_the_giver_prefills_and_the_giver_stays_until_the_taker_has_all():
    prefilled, has_all = asyncio.Event(), asyncio.Event()
    giver, taker = Player([prefilled, held(5), HANGS]), Player([has_all, tokens(6), last(7)])
    async with roles(giver, taker) as fleet:
        call = asyncio.create_task(fleet.generate())
        await until(lambda: giver.requests and taker.requests)
        prefilled.set()
        await asyncio.sleep(SHORT_S)
        assert (giver.cancelled, call.done()) == ([], False)
        has_all.set()
        assert tokens_of(await call) == (5, 6, 7)
        await until(lambda: giver.cancelled)


REST = [tokens(6), last(7)]
ALL = [tokens(5), *REST]
GONE = ("not_taken", "gone", False)
TAKEN = ("taken", "", True)


@pytest.mark.parametrize(
    ("giver", "taker", "third", "continued", "handovers"),
    [
        # the giver dies
        ([DIES], [[HANGS], ALL], None, (), []),
        ([DIES], [[refused()], ALL], None, (), []),
        ([tokens(5), DIES], [[HANGS], REST], None, (5,), []),
        ([held(5), DIES], [REST], None, None, [TAKEN]),
        ([held(5), DIES], [[refused()], REST], None, (5,), [GONE]),
        # the taker refuses
        ([held(5), HANGS], [[refused()], REST], None, (5,), [GONE]),
        ([held(5), HANGS], [[refused("<nobody knows>")], REST], None, (5,), [("not_taken", "other", False)]),
        # the taker dies
        ([held(5), HANGS], [[DIES]], REST, (5,), []),
        ([held(5), HANGS], [[tokens(6), DIES]], [last(7)], (5, 6), [TAKEN]),
        # the taker says what it never should: that nothing was drawn, after a token
        ([held(5), HANGS], [[tokens(6), refused()], [last(7)]], None, (5, 6), [TAKEN, GONE]),
    ],
    ids=[
        "the giver dies before its token",
        "the giver dies before its token, and the taker knows",
        "the giver dies between token and word",
        "the giver dies, the taker has all",
        "the giver dies, the taker lacks some",
        "the taker refuses",
        "the taker refuses in its own words",
        "the taker dies before its token",
        "the taker dies after its token",
        "the taker refuses after a token",
    ],
)
async def test_whoever_fails_every_token_is_seen_once(
    giver: list[Any],
    taker: list[list[Any]],
    third: list[Any] | None,
    continued: tuple[int, ...] | None,
    handovers: list[tuple[str, str, bool]],
):
    players = [Player(giver), Player(*taker), *([] if third is None else [Player(third)])]
    async with roles(*players) as fleet:
        outputs = await fleet.generate()
    assert tokens_of(outputs) == (5, 6, 7)
    assert [output.finish_reason for output in outputs if output.finish_reason] == [FinishReason.STOP]
    again = players[-1].requests[-1]
    if continued is not None:
        assert (again.output_token_ids, again.kv_source, again.hands_over) == (continued, None, False)
        assert not fleet.router.asks[-1].may_hand_over, "what was lost once stays at one verifier"
    assert fleet.handovers == handovers
    assert len(players[0].requests) == 1


async def test_a_taker_that_refuses_early_leaves_the_giver_to_its_token():
    prefilled = asyncio.Event()
    giver, taker = Player([prefilled, held(5), HANGS]), Player([refused()], REST)
    async with roles(giver, taker) as fleet:
        call = asyncio.create_task(fleet.generate())
        await until(lambda: taker.requests)
        await asyncio.sleep(SHORT_S)
        prefilled.set()
        assert tokens_of(await call) == (5, 6, 7)
        await until(lambda: giver.cancelled)
    assert fleet.handovers == [GONE]


async def test_a_taker_that_dies_early_is_a_loss_of_its_own():
    prefilled = asyncio.Event()
    giver, taker, third = Player([prefilled, held(5), HANGS]), Player([DIES]), Player(REST)
    async with roles(giver, taker, third) as fleet:
        call = asyncio.create_task(fleet.generate())
        await until(lambda: taker.requests)
        prefilled.set()
        assert tokens_of(await call) == (5, 6, 7)
    assert fleet.router.asks[-1].excluded_verifier_ids == ("v1",)


@pytest.mark.parametrize(
    ("output", "reason"), [(last(EOS), FinishReason.STOP), (last(5, reason=FinishReason.LENGTH), FinishReason.LENGTH)]
)
async def test_a_request_that_ends_with_its_first_token_is_handed_to_nobody(
    output: RequestOutput, reason: FinishReason
):
    giver, taker = Player([output]), Player([HANGS])
    async with roles(giver, taker) as fleet:
        (only,) = await fleet.generate()
        assert (only.token_ids, only.finish_reason) == (output.token_ids, reason)
        await until(lambda: len(taker.cancelled) == len(taker.requests))
    assert fleet.handovers == []


@pytest.mark.parametrize("giver", [[HANGS], [held(5), HANGS]], ids=["while it prefills", "while the taker takes"])
async def test_a_client_that_leaves_ends_both_streams(giver: list[Any]):
    players = Player(giver), Player([HANGS])
    async with roles(*players) as fleet:
        call = asyncio.create_task(fleet.generate())
        await until(lambda: all(player.requests for player in players))
        await asyncio.sleep(SHORT_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: all(player.cancelled for player in players))


async def test_a_refused_request_is_the_clients_error_whichever_verifier_says_so():
    class Strict(Player):
        async def answer(self, request: GenerationRequest) -> AsyncGenerator[Any]:
            yield Accepted(request_id=request.request_id)
            yield Refused(request_id=request.request_id, error="said so")

    for players in ((Strict(), Player([HANGS])), (Player([held(5), HANGS]), Strict())):
        async with roles(*players) as fleet:
            with pytest.raises(InvalidRequest, match="said so"):
                await fleet.generate()


async def test_counters_of_both_verifiers_add_up():
    def speculation(num_drafts: int) -> SpeculationMetrics:
        return SpeculationMetrics(enabled=True, num_drafts=num_drafts)

    logprobs = (None, TokenLogprobs(token_id=2, logprob=-1.0, rank=1), TokenLogprobs(token_id=3, logprob=-1.0, rank=1))
    giver = Player([held(5, num_cached_tokens=2, speculation=speculation(1), prompt_logprobs=logprobs), HANGS])
    taker = Player([tokens(6, num_cached_tokens=3, speculation=speculation(4)), last(7)])
    async with roles(giver, taker) as fleet:
        outputs = await fleet.generate(sampled(prompt_logprobs=0))
    assert [output.prompt_logprobs for output in outputs] == [logprobs, None, None]
    assert {output.num_cached_tokens for output in outputs} == {2}
    assert outputs[-1].speculation.num_drafts == 5


async def test_what_shares_or_remembers_stays_together():
    for request, options in (
        (dataclasses.replace(REQUEST, group_id="g"), {}),
        (REQUEST, {"memory": RolloutMemory()}),
    ):
        giver, taker = Player([HANGS]), Player(ALL)
        async with roles(giver, taker, **options) as fleet:
            assert tokens_of(await fleet.generate(request)) == (5, 6, 7)
        assert giver.requests == []
        assert not fleet.router.asks[0].may_hand_over


async def test_not_taken_where_nothing_was_to_be_taken_is_a_loss():
    async with fleet_of(Player([tokens(5), refused()]), Player(REST)) as fleet:
        assert tokens_of(await fleet.generate()) == (5, 6, 7)
    assert fleet.router.asks[-1].excluded_verifier_ids == ("v0",)
    assert fleet.handovers == []


# --- verifiers that drain ---


async def test_a_request_leaves_a_verifier_that_drains_and_goes_on_at_another():
    first, second = Player([tokens(5), held(), HANGS]), Player(REST)
    async with fleet_of(first, second) as fleet:
        outputs = await fleet.generate()
        assert [output.token_ids for output in outputs] == [(5,), (6,), (7,)]
        await until(lambda: first.cancelled)
        place = KVSource(endpoint=fleet.router.endpoints["v0"], request_id=first.requests[0].request_id)
    (taken,) = second.requests
    assert (taken.kv_source, taken.output_token_ids, taken.hands_over) == (place, (5,), False)
    assert [ask.excluded_verifier_ids for ask in fleet.router.asks] == [(), ("v0",)]
    assert fleet.handovers == [("moved", "", True)]


async def test_it_moves_as_often_as_verifiers_drain_and_after_its_prefill_too():
    players = Player([held(5), HANGS]), Player([tokens(6), held(), HANGS]), Player([last(7)])
    async with roles(*players) as fleet:
        assert tokens_of(await fleet.generate()) == (5, 6, 7)
        await until(lambda: players[0].cancelled and players[1].cancelled)
    assert players[2].requests[0].output_token_ids == (5, 6)
    assert players[2].requests[0].kv_source.request_id == players[1].requests[0].request_id
    assert fleet.handovers == [("taken", "", True), ("moved", "", True)]


async def test_without_another_verifier_it_goes_on_where_it_is():
    only = Player([tokens(5), held(), tokens(6), held(), last(7)])
    async with fleet_of(only) as fleet:
        assert [output.token_ids for output in await fleet.generate()] == [(5,), (6,), (7,)]
    assert [ask.excluded_verifier_ids for ask in fleet.router.asks] == [(), ("v0",), ("v0",)]
    assert (len(only.requests), fleet.handovers) == (1, [])


@pytest.mark.parametrize(
    ("old", "new", "third", "continued"),
    [
        ([tokens(5), held(), DIES], [REST], None, (5,)),
        ([tokens(5), held(), DIES], [[refused()]], REST, (5,)),
        ([tokens(5), held(), HANGS], [[refused()]], REST, (5,)),
        ([tokens(5), held(), HANGS], [[DIES]], REST, (5,)),
        ([tokens(5), held(), HANGS], [[tokens(6), DIES]], [last(7)], (5, 6)),
    ],
    ids=["the old one dies", "and the new one lacks some", "the new one refuses", "it dies", "it dies after a token"],
)
async def test_whoever_fails_in_a_move_every_token_is_seen_once(
    old: list[Any], new: list[list[Any]], third: list[Any] | None, continued: tuple[int, ...]
):
    players = [Player(old), Player(*new), *([] if third is None else [Player(third)])]
    async with fleet_of(*players) as fleet:
        endpoints = list(fleet.router.endpoints.items())
        num_asked = iter(range(3))

        def answer(ask: RouteAsk) -> Assignment:
            verifier_id, endpoint = endpoints[next(num_asked)]
            reason = PlacementReason.ONLY
            return Assignment(verifier_id=verifier_id, endpoint=endpoint, plan=PLAN, reason=reason)

        fleet.router.choose = answer
        assert tokens_of(await fleet.generate()) == (5, 6, 7)
    assert players[-1].requests[-1].output_token_ids == continued
    assert (players[-1].requests[-1].kv_source is None) == (third is not None)


async def test_a_client_that_leaves_within_a_move_ends_both_streams():
    players = Player([tokens(5), held(), HANGS]), Player([HANGS])
    async with fleet_of(*players) as fleet:
        call = asyncio.create_task(fleet.generate())
        await until(lambda: all(player.requests for player in players))
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await until(lambda: all(player.cancelled for player in players))


async def test_in_rollouts_a_response_that_moved_is_remembered_whole_and_once():
    memory = RolloutMemory()
    async with fleet_of(Player([tokens(5, 6), held(), HANGS]), Player(REST[1:]), memory=memory) as fleet:
        assert tokens_of(await fleet.generate()) == (5, 6, 7)
    assert [found.token_ids for found in memory.exported()] == [[5, 6, 7]]


# --- KV that another request takes ---

OFFER = dataclasses.replace(sampled(max_tokens=1), hands_over=True)


def known_at(fleet: Fleet, *endpoints: str) -> None:
    """Let the gateway's snapshot have verifiers at these endpoints."""
    states = snapshot_of(*(f"s{index}" for index in range(len(endpoints)))).verifiers
    verifiers = tuple(
        dataclasses.replace(state, report=dataclasses.replace(state.report, endpoint=endpoint))
        for state, endpoint in zip(states, endpoints, strict=True)
    )
    fleet.router.know(dataclasses.replace(snapshot_of(), verifiers=verifiers))


async def offer(fleet: Fleet) -> KVSource:
    """Have the KV of the request's prompt kept; return where it is."""
    (output,) = await fleet.generate(OFFER)
    assert isinstance(output, KeptOutput)
    assert (output.token_ids, output.finish_reason, output.request_id) == ((5,), FinishReason.LENGTH, "mine")
    return dataclasses.replace(output.kept, draws_anew=True)


async def test_kv_is_kept_behind_the_answer_until_another_request_has_it():
    giver = Player([held(5), HANGS], ALL)
    async with fleet_of(giver) as fleet:
        source = await offer(fleet)
        (given,) = giver.requests
        assert (given.hands_over, given.sampling.max_tokens) == (True, 2), "or it would end with its only token"
        assert source == KVSource(endpoint=fleet.router.endpoints["v0"], request_id=given.request_id, draws_anew=True)
        known_at(fleet, source.endpoint)
        await asyncio.sleep(SHORT_S)
        assert giver.cancelled == []
        assert tokens_of(await fleet.generate(dataclasses.replace(REQUEST, kv_source=source))) == (5, 6, 7)
        await until(lambda: giver.cancelled == [given.request_id])
    assert (giver.requests[1].kv_source, giver.requests[1].output_token_ids) == (source, ())
    assert fleet.handovers == [("taken", "", False)]


@pytest.mark.parametrize("end", ["it goes on by itself", "the time is up", "the gateway stops", "the verifier dies"])
async def test_kv_that_nobody_takes_is_freed(end: str, monkeypatch: pytest.MonkeyPatch):
    if end == "the time is up":
        monkeypatch.setattr(handover, "KEPT_S", SHORT_S)
    now, rest = asyncio.Event(), {"it goes on by itself": [tokens(6), HANGS], "the verifier dies": [DIES]}
    giver = Player([held(5), now, *rest.get(end, [HANGS])])
    async with fleet_of(giver) as fleet:
        await offer(fleet)
        now.set()
        if end == "the gateway stops":
            await fleet.backend.close()
        await until(lambda: not fleet.backend._kept._waits)
        if end != "the verifier dies":
            await until(lambda: giver.cancelled)


async def test_a_prompt_that_ends_with_its_token_leaves_nothing():
    async with fleet_of(Player([last(EOS)])) as fleet:
        (output,) = await fleet.generate(OFFER)
    assert not isinstance(output, KeptOutput)
    assert (output.token_ids, output.finish_reason) == ((EOS,), FinishReason.STOP)


async def test_a_lost_verifier_of_a_prompt_is_one_like_any_other():
    async with fleet_of(Player([DIES]), Player([held(5), HANGS])) as fleet:
        assert (await offer(fleet)).endpoint == fleet.router.endpoints["v1"]


async def test_a_prompt_whose_kv_is_kept_is_computed_where_prompts_are():
    giver, taker = Player([held(5), HANGS]), Player([HANGS])
    async with roles(giver, taker) as fleet:
        assert (await offer(fleet)).endpoint == fleet.router.endpoints["v0"]
    assert taker.requests == []


async def test_kv_that_is_gone_is_computed_again():
    taker = Player([refused()], ALL)
    async with fleet_of(taker, kv_peers=["10.1.2.3"]) as fleet:
        source = KVSource(endpoint="10.1.2.3:9", request_id=f"x.{prompt_digest(REQUEST)}", draws_anew=True)
        assert tokens_of(await fleet.generate(dataclasses.replace(REQUEST, kv_source=source))) == (5, 6, 7)
    assert [request.kv_source for request in taker.requests] == [source, None]
    assert fleet.handovers == [GONE]


@pytest.mark.parametrize(
    ("endpoint", "peers", "reason"),
    [
        ("10.1.2.3:9", (), "unknown_peer"),
        ("10.1.2.3:9", ("10.1.2.30", "10.1.2.3:90", "10.1.2"), "unknown_peer"),
        ("169.254.169.254:80", ("10.1.2.3",), "unknown_peer"),
        ("10.1.2.3:9", ("10.1.2.3",), None),
        ("10.1.2.3:9", ("10.1.2.3:9",), None),
        ("fleet:1", (), None),
    ],
)
async def test_no_client_makes_a_verifier_connect_where_the_operator_did_not_say(
    endpoint: str, peers: tuple[str, ...], reason: str | None
):
    taker = Player(ALL)
    async with fleet_of(taker, kv_peers=peers) as fleet:
        known_at(fleet, "fleet:1")
        source = KVSource(endpoint=endpoint, request_id=f"x.{prompt_digest(REQUEST)}", draws_anew=True)
        assert tokens_of(await fleet.generate(dataclasses.replace(REQUEST, kv_source=source))) == (5, 6, 7)
    assert taker.requests[0].kv_source == (source if reason is None else None)
    assert fleet.handovers == [("taken", "", False) if reason is None else ("not_taken", reason, False)]


@pytest.mark.parametrize("change", [{"prompt_token_ids": (1, 2, 4)}, {"cache_salt": "another tenant's"}, {}])
async def test_nobody_gets_the_kv_of_another_prompt_or_of_another_salt(change: dict[str, Any]):
    request = dataclasses.replace(REQUEST, **change)
    taker = Player(ALL)
    async with fleet_of(taker, kv_peers=["p"]) as fleet:
        source = KVSource(endpoint="p:1", request_id=f"x.{prompt_digest(REQUEST)}", draws_anew=True)
        await fleet.generate(dataclasses.replace(request, kv_source=source))
    assert taker.requests[0].kv_source == (None if change else source)
    assert fleet.handovers == [("not_taken", "other_prompt", False) if change else ("taken", "", False)]


async def test_log_probabilities_of_the_prompt_need_its_computation():
    taker = Player(ALL)
    async with fleet_of(taker, kv_peers=["p"]) as fleet:
        source = KVSource(endpoint="p:1", request_id=f"x.{prompt_digest(REQUEST)}", draws_anew=True)
        await fleet.generate(dataclasses.replace(sampled(prompt_logprobs=0), kv_source=source))
    assert (taker.requests[0].kv_source, taker.requests[0].sampling.prompt_logprobs) == (None, 0)


# --- what operators see ---


@pytest.mark.parametrize(
    ("error", "label"),
    [
        ("other weights: 1, not 2", "other_weights"),
        ("other_weights", "other_weights"),
        ("UNAVAILABLE: failed to connect to 10.1.2.3", "unavailable"),
        ("", "other"),
        ("Request 'r' is not here", "other"),
        ("x" * 33 + ": long", "other"),
    ],
)
def test_a_reason_is_a_label_if_it_is_short_and_plain(error: str, label: str):
    assert NotTaken(error).label == label
