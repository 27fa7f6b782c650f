from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from outrider.verifier_service.model.ranks import (
    NUM_PORT_ATTEMPTS,
    PipeListener,
    RankSpec,
    connect,
    free_port,
    free_ports,
    gather,
)

PATIENCE_S = 60.0

# One rank: join, speak over the pipes, sum a tensor over the group.
RANK = """
import json, sys
from pathlib import Path
import torch
from outrider.verifier_service.model.ranks import RankSpec, gather

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
group, pipes = gather(RankSpec(rank=rank, size=size, folder=folder), "gloo", 60.0)
if rank == 0:
    for index, pipe in enumerate(pipes):
        pipe.send_bytes(b"order %d" % index)
    said = sorted(pipe.recv_bytes().decode() for pipe in pipes)
else:
    order = pipes[0].recv_bytes().decode()
    pipes[0].send_bytes(f"rank {rank} heard {order.split()[0]}".encode())
    said = [order.split()[0]]
total = group.all_reduce(torch.tensor([10.0 ** rank])).tolist()
sys.stdout.write(json.dumps({"rank": group.rank, "size": group.size, "said": said, "total": total}))
"""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r")  # a Unix socket's path must be short


def test_what_connects_is_accepted_and_bytes_cross_both_ways(folder: Path):
    address = str(folder / "s")
    with PipeListener(address) as listener:
        ours = connect(address)
        theirs = listener.accept()
        ours.send_bytes(b"\x00hello")
        assert theirs.poll(PATIENCE_S)
        assert theirs.recv_bytes() == b"\x00hello"
        theirs.send_bytes(b"")
        assert ours.recv_bytes() == b""
        theirs.close()
        with pytest.raises(EOFError):
            ours.recv_bytes()


def test_an_accepted_pipe_waits_for_its_bytes(folder: Path):
    """The listener's socket has a timeout; a pipe that inherited it would fail instead of waiting."""
    with PipeListener(str(folder / "s")) as listener:
        ours = connect(str(folder / "s"))
        theirs = listener.accept()
        timer = threading.Timer(0.3, ours.send_bytes, (b"late",))
        timer.start()
        assert theirs.recv_bytes() == b"late"
        timer.join()


def test_accepting_gives_up_when_nobody_is_awaited_any_more(folder: Path):
    answers = [True, True, False]
    begin_s = time.monotonic()
    with PipeListener(str(folder / "s")) as listener, pytest.raises(ConnectionError, match="rank ended"):
        listener.accept(lambda: answers.pop(0))
    assert answers == []
    assert time.monotonic() - begin_s < PATIENCE_S / 2


def test_accepting_gives_up_in_time(folder: Path):
    begin_s = time.monotonic()
    with PipeListener(str(folder / "s")) as listener, pytest.raises(ConnectionError, match="too late"):
        listener.accept(timeout_s=0.25)
    assert 0.25 <= time.monotonic() - begin_s < PATIENCE_S / 2


def test_connecting_gives_up_in_time(folder: Path):
    begin_s = time.monotonic()
    with pytest.raises(FileNotFoundError):
        connect(str(folder / "nobody"), timeout_s=0.1)
    PipeListener(str(folder / "gone")).close()
    with pytest.raises(ConnectionRefusedError):
        connect(str(folder / "gone"), timeout_s=0.1)
    assert 0.2 <= time.monotonic() - begin_s < PATIENCE_S / 2


def test_two_ranks_in_two_processes_find_each_other(folder: Path):
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), "2", str(folder)], stdout=subprocess.PIPE)
        for rank in (1, 0)
    ]
    try:
        second, first = (json.loads(rank.communicate(timeout=120)[0]) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert first == {"rank": 0, "size": 2, "said": ["rank 1 heard order"], "total": [11.0]}
    assert second == {"rank": 1, "size": 2, "said": ["order"], "total": [11.0]}


def test_a_follower_learns_that_rank_zero_is_gone(folder: Path):
    failures: list[BaseException] = []

    def follow() -> None:
        try:
            gather(RankSpec(rank=1, size=2, folder=folder), "gloo", 1.0)
        except (EOFError, ConnectionError) as error:
            failures.append(error)

    spec = RankSpec(rank=0, size=2, folder=folder)
    with PipeListener(spec.ranks_address) as listener:
        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        listener.accept().close()  # before it said where the group meets
    thread.join(PATIENCE_S)
    assert len(failures) == 1


# blocks used and freed again; prints how many MiB of them the process has kept
CHURN = """
import sys
from outrider.verifier_service.model.ranks import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def resident_mib():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) >> 8
before = resident_mib()
blocks = [b"x" * (size << 20) for size in (6, 9, 12, 15)]
del blocks
print(resident_mib() - before)
"""


def kept_mib(mode: str, **environment: str) -> int:
    command = [sys.executable, "-c", CHURN, mode]
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**own, **environment})
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's malloc")
def test_what_is_freed_is_kept_for_the_next_step():
    assert kept_mib("keep") > 30
    assert kept_mib("as glibc likes") < 20, "the control"
    assert kept_mib("keep", MALLOC_TRIM_THRESHOLD_="131072") < 20, "what a user has set stays"


def test_a_free_port_is_none_that_the_system_hands_out():
    first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with socket.create_server(("127.0.0.1", free_port())) as server:
        assert server.getsockname()[1] < first_handed_out


def test_free_ports_are_different_and_too_many_are_refused():
    assert len(set(free_ports(64))) == 64
    with pytest.raises(OSError, match=f"not {NUM_PORT_ATTEMPTS + 1}$"):
        free_ports(NUM_PORT_ATTEMPTS + 1)
