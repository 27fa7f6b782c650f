"""A trainer's call reaches every verifier once; ranks follow each other; an error names its verifier."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest

from fakes.reports import drafter_report, verifier_report
from outrider.cluster.common.errors import Conflict, InvalidRequest, RequestFailed, Unavailable
from outrider.cluster.gateway.fleet_control import FleetControl, TrainerLimits
from outrider.cluster.router.fleet import DrafterState, FleetSnapshot, VerifierState
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_rules import NO_ORDERS, ControlRules
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.engine import (
    AskState,
    ContinueGeneration,
    Control,
    ControlResult,
    InitWeightsGroup,
    PauseGeneration,
    PauseMode,
    UpdateDraftWeights,
    UpdateWeights,
)
from outrider.verifier_service.messages.request import SpeculationPlan
from support.waiting import until


class Fleet:
    """Verifiers that the test answers for."""

    def __init__(self, *verifiers: Any, drafters: Sequence[Any] = (), trainers: TrainerLimits | None = None) -> None:
        self.calls: list[tuple[str, Control]] = []
        self.answers: dict[str, Any] = {}  # by endpoint: a `ControlResult`, or an error
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        states = [VerifierState(report=report, reported_s=0.0, default_plan=SpeculationPlan()) for report in verifiers]
        drafting = [DrafterState(report=report, reported_s=0.0) for report in drafters]
        snapshot = FleetSnapshot(verifiers=tuple(states), drafters=tuple(drafting), decided_at_s=0.0)
        self.snapshot: FleetSnapshot | None = None  # that of before the last change, as a gateway's may be
        self._now = snapshot
        self.control = FleetControl(self, self._call, self._call, trainers)

    async def refresh(self) -> None:
        self.snapshot = self._now

    async def _call(self, endpoint: str, message: Control) -> ControlResult:
        self.calls.append((endpoint, message))
        await self.may_answer.wait()
        answer = self.answers.get(endpoint, ControlResult(call_id=""))
        if isinstance(answer, Exception):
            raise answer
        return replace(answer, call_id=message.call_id)

    def sent(self, kind: type) -> list[Any]:
        return [message for _, message in self.calls if isinstance(message, kind)]


GROUP = {"master_address": "127.0.0.1", "master_port": 5, "group_name": "g", "backend": "gloo"}


async def test_every_verifier_that_does_not_drain_hears_it_once_under_an_id_of_its_own():
    fleet = Fleet(verifier_report("b"), verifier_report("a"), verifier_report("gone", draining=True))
    fleet.answers = {
        "a:1": ControlResult(call_id="", num_requests=2, is_paused=True, weight_version="3"),
        "b:1": ControlResult(call_id="", num_requests=1, is_paused=False, weight_version="3"),
    }
    result = await fleet.control.pause(PauseMode.KEEP)
    assert [endpoint for endpoint, _ in fleet.calls] == ["a:1", "b:1"]
    assert {message.mode for message in fleet.sent(PauseGeneration)} == {PauseMode.KEEP}
    assert len({message.call_id for message in fleet.sent(PauseGeneration)}) == 2
    assert (result.num_requests, result.is_paused, result.weight_version) == (3, True, "3"), (
        "one is paused, so the fleet is"
    )


async def test_every_order_to_pause_or_to_go_on_has_a_higher_number_than_all_before():
    """A verifier that hears them in another order, or by way of the router, knows which one holds."""
    fleet = Fleet(verifier_report("a", pause_asked_s=50.0), verifier_report("b"))
    now_s = [10.0]  # of a gateway whose clock is behind
    control = FleetControl(fleet, fleet._call, fleet._call, wall_clock=lambda: now_s[0])
    await control.pause(PauseMode.KEEP, lease_s=7.0)
    await control.resume()
    now_s[0] = 60.0
    await control.pause(PauseMode.ABORT)
    first, second = fleet.sent(PauseGeneration)[::2]
    (goes_on,) = fleet.sent(ContinueGeneration)[::2]
    assert 50.0 < first.asked_s < goes_on.asked_s < second.asked_s == 60.0
    assert (first.lease_s, second.lease_s) == (7.0, None)
    assert fleet.sent(PauseGeneration)[1].asked_s == first.asked_s, "one order, whoever hears it"


async def test_ranks_of_a_group_follow_each_other():
    fleet = Fleet(verifier_report("a", num_ranks=2), verifier_report("b", num_ranks=4))
    assert await fleet.control.num_ranks() == 6
    await fleet.control.join_group(**GROUP, rank_offset=1, world_size=7)
    assert [message.rank_offset for message in fleet.sent(InitWeightsGroup)] == [1, 3]
    assert {message.world_size for message in fleet.sent(InitWeightsGroup)} == {7}


@pytest.mark.parametrize(("rank_offset", "world_size"), [(0, 7), (1, 6), (2, 7)])
async def test_a_group_without_room_is_refused_before_anyone_waits_in_it(rank_offset: int, world_size: int):
    fleet = Fleet(verifier_report("a", num_ranks=2), verifier_report("b", num_ranks=4))
    with pytest.raises(InvalidRequest, match="world_size") as refusal:
        await fleet.control.join_group(**GROUP, rank_offset=rank_offset, world_size=world_size)
    assert refusal.value.field == "world_size"
    assert fleet.calls == []


async def test_weights_without_a_name_get_the_next_number_of_the_fleet():
    fleet = Fleet(verifier_report("a"), verifier_report("b"))
    fleet.answers = {
        "a:1": ControlResult(call_id="", weight_version="default"),
        "b:1": ControlResult(call_id="", weight_version="9"),
    }
    await fleet.control.update_from_folder("/w")
    assert len(fleet.sent(AskState)) == 2
    assert {message.weight_version for message in fleet.sent(UpdateWeights)} == {"10"}
    await fleet.control.update_from_folder("/w", "mine")
    assert {message.weight_version for message in fleet.sent(UpdateWeights)} == {"10", "mine"}
    await fleet.control.update_from_group(names=["x"], dtypes=["float32"], shapes=[[2, 3]], group_name="g")
    assert fleet.sent(UpdateWeights)[-1].shapes == ((2, 3),)
    assert fleet.sent(UpdateWeights)[-1].weight_version == "10"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (ConnectionError("refused"), Unavailable),
        (ControlResult(call_id="", error="another model"), InvalidRequest),
    ],
)
async def test_a_verifier_that_fails_is_named_once_all_have_answered(answer: Any, kind: type[Exception]):
    fleet = Fleet(verifier_report("a"), verifier_report("b"))
    fleet.answers = {"a:1": answer}
    with pytest.raises(kind, match="verifier a"):
        await fleet.control.update_from_folder("/w", "1")
    assert [endpoint for endpoint, _ in fleet.calls] == ["a:1", "b:1"]


async def test_drafters_in_pools_take_their_own_weights_else_those_in_verifiers():
    drafters = [drafter_report("d0"), drafter_report("d1"), drafter_report("gone", draining=True)]
    fleet = Fleet(verifier_report("a"), drafters=drafters)
    await fleet.control.update_drafters("/head", "3")
    assert [endpoint for endpoint, _ in fleet.calls] == ["d0:1", "d1:1"]
    assert {(message.folder, message.weight_version) for message in fleet.sent(UpdateDraftWeights)} == {("/head", "3")}
    fleet.answers = {"d1:1": ControlResult(call_id="", error="another head")}
    with pytest.raises(InvalidRequest, match="drafter d1: another head"):
        await fleet.control.update_drafters("/head")
    alone = Fleet(verifier_report("a"))
    await alone.control.update_drafters("/head")
    assert [endpoint for endpoint, _ in alone.calls] == ["a:1"]


async def test_without_a_verifier_there_is_nothing_to_call():
    with pytest.raises(Unavailable, match="no verifier is ready"):
        await Fleet().control.resume()
    assert Fleet().control.reported_version == ""


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (NO_ORDERS, "verifier a: this service is not for rollouts"),
        (
            ControlRules(is_open=True, weights_root="/weights"),
            "verifier a: model_path: /etc does not lie below",
        ),
    ],
)
async def test_what_a_replicas_port_does_not_let_in_is_the_callers_error(rules: ControlRules, said: str):
    sent: list[Any] = []
    server = grpc.aio.server()
    servicer = VerifierLinkServicer(RequestTable(sent.append), ControlTable(sent.append), rules=rules)
    link_pb2_grpc.add_VerifierLinkServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    fleet = Fleet(verifier_report("a", endpoint=f"127.0.0.1:{port}"))
    with pytest.raises(InvalidRequest, match=said):
        await FleetControl.over_links(fleet, None).update_from_folder("/etc", "1")
    await server.stop(None)
    assert sent == []


async def changes(control: FleetControl) -> list[Any]:
    """Return all calls that change weights, none of them begun."""
    bucket = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "g"}
    return [
        control.update_from_folder("f", "7"),
        control.join_group(**GROUP, rank_offset=1, world_size=3),
        control.update_from_group(**bucket, weight_version="7"),
        control.update_drafters("f"),
    ]


async def test_of_two_changes_at_once_the_second_is_refused_and_the_end_of_a_group_is_not():
    fleet = Fleet(verifier_report("a"), verifier_report("b"))
    for number in range(4):
        fleet.may_answer.clear()
        calls = await changes(fleet.control)
        first = asyncio.create_task(calls.pop(number))
        await until(lambda: fleet.calls)
        for second in calls:
            with pytest.raises(Conflict, match="another change"):
                await second
        ending = asyncio.create_task(fleet.control.leave_group("g"))
        await asyncio.sleep(0)
        assert not first.done()
        assert not ending.done(), "it waits for its own answer alone"
        fleet.may_answer.set()
        await first
        await ending
        fleet.calls.clear()


async def test_the_same_change_again_while_it_goes_on_is_that_change():
    fleet = Fleet(verifier_report("a"))
    fleet.may_answer.clear()
    first, again = (asyncio.create_task(fleet.control.update_from_folder("f", "7")) for _ in range(2))
    await until(lambda: fleet.calls)
    with pytest.raises(Conflict):
        await fleet.control.update_from_folder("g", "7")
    first.cancel()  # its client has hung up; the verifiers go on
    await asyncio.gather(first, return_exceptions=True)
    assert not again.done()
    with pytest.raises(Conflict):
        await fleet.control.update_from_folder("f", "8")
    fleet.may_answer.set()
    await again
    assert len(fleet.sent(UpdateWeights)) == 1
    await fleet.control.update_from_folder("g", "8")


async def test_a_change_that_failed_is_over():
    fleet = Fleet(verifier_report("a"))
    fleet.answers = {"a:1": ConnectionError("gone")}
    with pytest.raises(Unavailable):
        await fleet.control.update_from_folder("f", "7")
    fleet.answers.clear()
    await fleet.control.update_from_folder("g", "7")


async def test_one_name_is_of_one_digest():
    fleet = Fleet(verifier_report("a"), verifier_report("b"))
    fleet.answers = {
        f"{name}:1": ControlResult(call_id="", weight_version="7", weight_digest=f"of {name}") for name in "ab"
    }
    with pytest.raises(RequestFailed, match="called 7: of a,of b"):
        await fleet.control.update_from_folder("f", "7")
    assert (await fleet.control.state()).weight_digest == "of a,of b"
    fleet.answers["b:1"] = fleet.answers["a:1"]
    assert (await fleet.control.update_from_folder("f", "7")).weight_digest == "of a"


@pytest.mark.parametrize("version", ["a,b", "a\0", "a\nb", "7" * 129])
async def test_a_name_that_cannot_stand_in_a_list_of_names_is_refused(version: str):
    fleet = Fleet(verifier_report("a"))
    bucket = {"names": [], "dtypes": [], "shapes": [], "group_name": "g"}
    for call in (
        fleet.control.update_from_folder("f", version),
        fleet.control.update_from_group(**bucket, weight_version=version),
        fleet.control.update_drafters("f", version),
    ):
        with pytest.raises(InvalidRequest) as raised:
            await call
        assert raised.value.field == "weight_version"
    assert not fleet.sent(UpdateWeights)


async def test_verifiers_connect_to_hosts_that_the_operator_names_and_wait_as_long_as_it_says():
    fleet = Fleet(verifier_report("a"), trainers=TrainerLimits(hosts=("trainer.example",), timeout_s=7.0))
    for host in ("127.0.0.1", "trainer.example.org", ""):
        with pytest.raises(InvalidRequest, match="--trainer-hosts") as raised:
            await fleet.control.join_group(**{**GROUP, "master_address": host}, rank_offset=1, world_size=2)
        assert raised.value.field == "master_address"
    assert fleet.calls == []
    await fleet.control.join_group(**{**GROUP, "master_address": "trainer.example"}, rank_offset=1, world_size=2)
    (message,) = fleet.sent(InitWeightsGroup)
    assert (message.master_address, message.timeout_s) == ("trainer.example", 7.0)


async def test_the_buckets_of_one_update_without_a_name_have_one_number_which_is_asked_for_once():
    fleet = Fleet(verifier_report("a"), verifier_report("b"))
    bucket = {"names": ["x"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"}
    half = ControlResult(call_id="", weight_version="4", num_missing_tensors=1)
    fleet.answers = {"a:1": half, "b:1": half}
    for _ in range(3):
        await fleet.control.update_from_group(**bucket)
    whole = ControlResult(call_id="", weight_version="5")
    fleet.answers = {"a:1": whole, "b:1": whole}
    await fleet.control.update_from_group(**bucket)
    assert {message.weight_version for message in fleet.sent(UpdateWeights)} == {"5"}
    assert len(fleet.sent(AskState)) == 2, "each verifier once"
    await fleet.control.update_from_group(**bucket)
    assert fleet.sent(UpdateWeights)[-1].weight_version == "6", "the next update has the next"


async def test_an_update_that_was_broken_off_leaves_no_number_behind():
    fleet = Fleet(verifier_report("a"))
    bucket = {"names": ["x"], "dtypes": ["float32"], "shapes": [[2]], "group_name": "g"}
    fleet.answers = {"a:1": ControlResult(call_id="", weight_version="4", num_missing_tensors=1)}
    await fleet.control.update_from_group(**bucket)
    await fleet.control.leave_group("g")
    fleet.answers = {"a:1": ControlResult(call_id="", weight_version="7")}
    await fleet.control.update_from_group(**bucket)
    assert fleet.sent(UpdateWeights)[-1].weight_version == "8"
