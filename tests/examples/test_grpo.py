"""examples/grpo.py trains: through the engine of its process with and without look-ups, and over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from outrider.verifier_service.model.ranks import free_port
from support.waiting import until
from tiny.models import make_model
from tiny.trained_fleet import trained_fleet

PATH = Path(__file__).parents[2] / "examples" / "grpo.py"
EXAMPLE: dict[str, Any] = runpy.run_path(str(PATH))
FEW = ["--steps", "2", "--epochs", "1", "--n", "4", "--max-tokens", "24", "--temperature", "0.3"]
ROUNDING = 1e-3  # of log probabilities at this temperature


def rows(printed: str) -> list[dict[str, float]]:
    """Return what was printed for each step."""
    head, *lines = printed.strip().splitlines()
    names = re.split(r"\s{2,}", head.strip())
    return [dict(zip(names, map(float, line.split()), strict=True)) for line in lines]


def trained(capsys: pytest.CaptureFixture[str], speculation: str) -> list[dict[str, float]]:
    EXAMPLE["main"]([*FEW, "--speculation", speculation])
    return rows(capsys.readouterr().out)


def test_two_steps_with_and_without_look_ups(capsys: pytest.CaptureFixture[str]):
    plain, drafted = trained(capsys, "off"), trained(capsys, "always")
    assert [row["tokens per verification"] for row in plain] == [1.0, 1.0]
    assert drafted[1]["tokens per verification"] > 1.1
    assert plain[0]["reward"] == drafted[0]["reward"], "the same samples: seeded"
    assert plain[1]["reward"] == pytest.approx(drafted[1]["reward"], abs=0.05)
    for row in (*plain, *drafted):
        assert row["logprob difference"] < ROUNDING, "after an update, too, the engine has the trainer's weights"


async def test_a_server_is_trained_over_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    policy = make_model().requires_grad_(True)
    options = argparse.Namespace(steps=2, epochs=2, n=2, max_tokens=12, temperature=0.7, lr=1e-2, seed=0)
    async with trained_fleet(tmp_path) as fleet:
        port = free_port()
        app = fleet.http._transport.app  # type: ignore[attr-defined]
        server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
        serving = asyncio.create_task(server.serve())  # on this loop, as the fleet's links are
        await until(lambda: server.started)
        try:
            client = EXAMPLE["SglangClient"](f"http://127.0.0.1:{port}")
            await asyncio.to_thread(EXAMPLE["train"], policy, [[5, 9, 13], [7, 8]], client, options)
            sampling = {"temperature": 0.7, "max_tokens": 12, "seed": 9}
            (last,) = await asyncio.to_thread(client.sample, [[5, 9, 13]], 1, sampling)
        finally:
            server.should_exit = True
            await serving
        assert (await fleet.http.get("/get_weight_version")).json()["weight_version"] == "step 2"
    steps = rows(capsys.readouterr().out)
    assert [row["logprob difference"] < ROUNDING for row in steps] == [True, True]
    own = EXAMPLE["token_logprobs"](policy, last, 0.7)
    assert last.logprobs == pytest.approx(own.tolist(), abs=ROUNDING), "the server has the trained weights"


def test_the_objective_is_clipped_and_gains_are_of_a_group():
    gains = EXAMPLE["advantages"](torch.tensor([[0.0, 1.0], [0.5, 0.5]]))
    assert gains.sum(dim=1).tolist() == pytest.approx([0.0, 0.0])
    assert gains[0, 1] > 0.7
    assert gains[1].tolist() == [0.0, 0.0], "a group of equals teaches nothing"


def test_it_is_short():
    assert len(PATH.read_text().splitlines()) <= 250
