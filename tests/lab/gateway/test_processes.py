"""Which part of a service a process is, and what it has taken."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from outrider.lab.gateway.processes import (
    GATEWAY,
    OTHERS,
    PROXY,
    RANK,
    RAYLET,
    ROUTER,
    SERVER,
    SHELL,
    Spent,
    processor_s,
    role_of,
    snapshot,
    spent_between,
)

BURN_S = 0.1
BURNING = f"import time\nwhile time.process_time() < {BURN_S}: pass\nprint('done', flush=True)\ninput()"


@pytest.mark.parametrize(
    ("command", "role"),
    [
        ("ray::ServeReplica:outrider:Gateway", GATEWAY),
        ("ray::ProxyActor", PROXY),
        ("ray::ServeReplica:outrider:Router.snapshot", ROUTER),
        ("ray::ServeReplica:outrider:Verifier", SHELL),
        ("ray::Rank.run", RANK),
        ("/venv/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/x", RAYLET),
        ("/venv/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/x", OTHERS),
        ("/venv/bin/python /venv/ray/dashboard/dashboard.py --host=127.0.0.1", OTHERS),
        ("ray::ServeController", OTHERS),
        ("ray::ServeReplica:outrider:Drafter", OTHERS),
        ("VLLM::EngineCore", "VLLM::EngineCore"),
        ("/usr/bin/nginx -g daemon", "nginx"),
        ("/usr/bin/python3 -m vllm.entrypoints.openai.api_server", "/usr/bin/python3 -m vllm.entrypo"),
        ("", OTHERS),
    ],
)
def test_a_process_is_known_by_its_command(command: str, role: str) -> None:
    assert role_of(command) == role


def test_time_is_added_up_by_role_and_what_is_new_began_at_nothing() -> None:
    before = {1: Spent(role=GATEWAY, seconds=3.0), 2: Spent(role=RANK, seconds=1.0), 3: Spent(role=RANK, seconds=9.0)}
    after = {1: Spent(role=GATEWAY, seconds=3.5), 2: Spent(role=RANK, seconds=1.25), 4: Spent(role=RANK, seconds=0.5)}
    assert spent_between(before, after) == {GATEWAY: 0.5, RANK: 0.75}


@pytest.fixture
def burnt() -> Iterator[subprocess.Popen[str]]:
    """A child that has used its share of a core."""
    command = [sys.executable, "-c", BURNING]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        yield child


def test_the_clock_is_that_of_the_other_process(burnt: subprocess.Popen[str]) -> None:
    assert BURN_S <= processor_s(burnt.pid) < BURN_S + 5.0
    assert processor_s(os.getpid()) == pytest.approx(time.process_time(), abs=0.5)
    found = snapshot(os.getpid())
    assert found[os.getpid()].role == SERVER
    assert found[burnt.pid].seconds >= BURN_S
    assert burnt.pid not in snapshot(os.getpid(), without={burnt.pid})
