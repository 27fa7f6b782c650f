"""A pause of the fleet over the doors: who joins later is paused, too; a trainer that dies lets go by its lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until
from tiny.trained_fleet import TrainedFleet, trained_fleet

BODY = {"input_ids": [5, 9, 13], "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[TrainedFleet]:
    async with trained_fleet(tmp_path) as fleet:
        yield fleet


async def is_paused(fleet: TrainedFleet) -> bool:
    return bool((await fleet.http.get("/is_paused")).json()["is_paused"])


def paused(fleet: TrainedFleet) -> dict[str, bool]:
    return {report.verifier_id: report.load.is_paused for report in fleet.fleet.verifiers}


async def test_who_joins_a_paused_fleet_is_paused_and_answers_nothing_before_that(fleet: TrainedFleet):
    """Two of six requests were answered under the old weights, and the fleet said that it was not paused."""
    assert (await fleet.http.post("/pause?mode=keep")).status_code == 200
    await fleet.add_verifier("late")
    asking = [asyncio.create_task(fleet.http.post("/generate", json=BODY)) for _ in range(6)]
    await until(lambda: paused(fleet) == {"v0": True, "late": True})
    assert await is_paused(fleet)
    assert not any(task.done() for task in asking)
    assert (await fleet.http.post("/resume")).status_code == 200
    answers = await asyncio.gather(*asking)
    assert [answer.status_code for answer in answers] == [200] * 6
    await until(lambda: paused(fleet) == {"v0": False, "late": False})
    assert not await is_paused(fleet)


async def test_the_only_verifier_is_paused_again_when_it_is_started_anew(fleet: TrainedFleet):
    assert (await fleet.http.post("/pause?mode=keep")).status_code == 200
    await until(lambda: paused(fleet) == {"v0": True})
    await fleet.verifiers.pop().stop()
    await fleet.add_verifier("anew")
    asking = asyncio.create_task(fleet.http.post("/generate", json=BODY))
    await until(lambda: paused(fleet) == {"anew": True})
    assert not asking.done()
    assert (await fleet.http.post("/resume")).status_code == 200
    assert (await asking).status_code == 200


@pytest.mark.parametrize(
    ("path", "options"),
    [("/pause?mode=keep&lease_s=0.3", {}), ("/pause_generation", {"json": {"mode": "in_place", "lease_s": 0.3}})],
)
async def test_a_trainer_that_dies_between_pause_and_resume_lets_go_by_its_lease(
    fleet: TrainedFleet, path: str, options: dict[str, Any]
):
    assert (await fleet.http.post(path, **options)).status_code == 200
    asking = asyncio.create_task(fleet.http.post("/generate", json=BODY))
    assert await is_paused(fleet)
    assert (await asking).status_code == 200
    assert not await is_paused(fleet)


async def test_a_lease_is_renewed_by_the_same_call(fleet: TrainedFleet):
    for _ in range(6):
        assert (await fleet.http.post("/pause?mode=keep&lease_s=1")).status_code == 200
        await asyncio.sleep(0.25)
        assert await is_paused(fleet)
    await fleet.http.post("/resume")
    assert not await is_paused(fleet)


@pytest.mark.parametrize("lease_s", ["0", "-1", "nan", "inf", "soon", ""])
async def test_a_lease_that_is_none_is_named_and_pauses_nothing(fleet: TrainedFleet, lease_s: str):
    answers = [await fleet.http.post(f"/pause?mode=keep&lease_s={lease_s}")]
    if lease_s in ("0", "-1"):
        answers.append(await fleet.http.post("/pause_generation", json={"mode": "in_place", "lease_s": float(lease_s)}))
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lease_s"), answer.text
    assert not await is_paused(fleet)
