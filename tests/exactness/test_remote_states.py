"""EAGLE-3 in a process of its own, its states as bytes and over gloo: draft for draft what it is co-located."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from exactness.remote_states import (
    DRAFT_DEADLINE_S,
    Colocated,
    DrafterProcess,
    RemoteVerifier,
    Run,
    drafting,
    request,
    verifying,
    write_pair,
)
from outrider.verifier_service.links.tensor_channel import ChannelLimits
from outrider.verifier_service.messages.draft import Resync
from outrider.verifier_service.messages.engine import Relay
from outrider.verifier_service.messages.request import GenerationRequest
from outrider.verifier_service.messages.wire import encode
from tiny.models import random_sequences

BYTES_PER_TOKEN = 3 * 64 * 4  # three taps of a 64 wide model in float32
PROMPTS = random_sequences((9, 30, 17), seed=3)
SAMPLINGS: tuple[dict[str, Any], ...] = ({}, {"temperature": 0.8, "seed": 11}, {"temperature": 0.8})
GLOO = ("gloo",)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def drafter(pair: tuple[Path, Path]) -> Iterator[DrafterProcess]:
    """A drafter that can do gloo; whether it is used is the verifier's choice."""
    with drafting(*pair, GLOO) as process:
        assert process.endpoint
        yield process


def requests(name: str) -> Iterator[list[GenerationRequest]]:
    """Yield requests one at a time: greedy, coupled and rejection sampling, so that all randomness is in order."""
    for index, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        yield [request(f"{name}{index}", prompt, **sampling)]


def run_all(engine: Colocated | RemoteVerifier, name: str) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for each in requests(name):
        tokens |= engine.run(each).token_ids
    engine.engine.check_integrity()
    return tokens


def num_state_bytes(drafts: Sequence[tuple[str, int, tuple[int, ...]]]) -> int:
    """Every position once: those before the last position that was drafted from."""
    last = {request_id: position for request_id, position, _ in drafts}
    return sum((position - 1) * BYTES_PER_TOKEN for position in last.values())


def test_the_same_tokens_and_drafts_as_co_located_by_either_transport(pair: tuple[Path, Path]):
    near = Colocated(*pair)
    tokens = run_all(near, "a")
    assert any(len(token_ids) > 1 for _, _, token_ids in near.client.drafts)
    for transports in ((), GLOO):
        with drafting(*pair, GLOO) as drafter, verifying(*pair, transports) as far:  # a new one: its noise begins anew
            far.connect(drafter)
            assert run_all(far, "a") == tokens
            assert far.client.drafts == near.client.drafts
            transport = "gloo" if transports else "grpc"
            assert far.relay.num_state_bytes == {transport: num_state_bytes(near.client.drafts)}
            assert far.relay.num_tensor_fallbacks == 0


def seeded_run(verifier: RemoteVerifier | Colocated, name: str, prompt: Sequence[int], **options: Any) -> Run:
    return verifier.run([request(name, prompt, temperature=0.8, seed=5, **options)])


def drafts_of(verifier: RemoteVerifier | Colocated, name: str) -> list[tuple[int, tuple[int, ...]]]:
    return [(position, token_ids) for request_id, position, token_ids in verifier.client.drafts if request_id == name]


@pytest.mark.parametrize("transports", [(), GLOO], ids=["bytes", "gloo"])
def test_states_of_a_cached_prefix_are_told_again(
    pair: tuple[Path, Path], drafter: DrafterProcess, transports: tuple[str, ...]
):
    near = Colocated(*pair)
    with verifying(*pair, transports) as far:
        far.connect(drafter)
        for verifier in (near, far):
            first = seeded_run(verifier, "a", PROMPTS[1])
            second = seeded_run(verifier, "b", PROMPTS[1])
            assert second.num_cached_tokens >= 24
            assert first.token_ids["a"] == second.token_ids["b"]
        assert drafts_of(far, "b") == drafts_of(near, "b") == drafts_of(far, "a")
        assert next((position, size) for name, position, size in far.client.states if name == "b") == (
            0,
            len(PROMPTS[1]) * BYTES_PER_TOKEN,
        )


@pytest.mark.parametrize("transports", [(), GLOO], ids=["bytes", "gloo"])
def test_a_resync_brings_all_states_again(
    pair: tuple[Path, Path], drafter: DrafterProcess, transports: tuple[str, ...]
):
    near = Colocated(*pair)
    expected = seeded_run(near, "a", PROMPTS[0])
    with verifying(*pair, transports) as far:
        far.connect(drafter)
        asked: list[bool] = []

        def ask_for_resync(run: Run) -> None:
            if len(run.token_ids.get("a", [])) > 8 and not asked:
                asked.append(True)
                far.relay.feed(Relay(peer="d", payload=encode(Resync(request_id="a"))))

        run = far.run([request("a", PROMPTS[0], temperature=0.8, seed=5)], on_turn=ask_for_resync)
        assert far.engine.drafting.num_resyncs == 1
        assert run.token_ids == expected.token_ids
        assert set(drafts_of(far, "a")) == set(drafts_of(near, "a"))
        assert sum(position == 0 for _, position, _ in far.client.states) == 2
        assert set(far.relay.num_state_bytes) == {"gloo" if transports else "grpc"}


@pytest.mark.parametrize("transports", [(), GLOO], ids=["bytes", "gloo"])
def test_a_drafter_killed_half_way_is_replaced_and_told_all_states(
    pair: tuple[Path, Path], drafter: DrafterProcess, transports: tuple[str, ...]
):
    near = Colocated(*pair)
    expected = seeded_run(near, "a", PROMPTS[2], max_tokens=200)
    with drafting(*pair, GLOO) as first, verifying(*pair, transports) as far:
        far.connect(first)
        killed: list[int] = []

        def replace(run: Run) -> None:
            if len(run.token_ids.get("a", [])) > 40 and not killed:
                killed.append(len(far.client.drafts))
                first.kill()
                far._await(far._pool.hold([drafter.endpoint]))

        run = far.run([request("a", PROMPTS[2], temperature=0.8, seed=5, max_tokens=200)], on_turn=replace)
        assert run.token_ids == expected.token_ids
        after = drafts_of(far, "a")[killed[0] + 1 :]
        assert len(after) > 3, "the replacement drafts"
        known = dict(drafts_of(near, "a"))
        assert all(known.get(position, token_ids) == token_ids for position, token_ids in after)
        assert any(position in known for position, _ in after)
        assert sum(position == 0 for _, position, _ in far.client.states) == 2


def test_a_frozen_drafter_costs_its_drafts_and_no_step(pair: tuple[Path, Path]):
    timeout_s = 1.0
    limits = ChannelLimits(transfer_timeout_s=timeout_s)
    with drafting(*pair, GLOO) as drafter, verifying(*pair, GLOO, limits=limits) as far:
        far.connect(drafter)
        expected = seeded_run(far, "a", PROMPTS[0])
        drafter.signal(signal.SIGSTOP)
        begin_s = time.monotonic()
        run = seeded_run(far, "b", PROMPTS[0])  # until the link is down, which is longer than a transfer may take
        assert run.token_ids["b"] == expected.token_ids["a"]
        assert time.monotonic() - begin_s < DRAFT_DEADLINE_S / 2, "it went on once the link was down"
        far.wait_until(lambda: far.senders[0].failure is not None)
        drafter.signal(signal.SIGCONT)
        far.wait_until(lambda: len(far.senders) > 1 and far.senders[-1].is_connected)
        again = seeded_run(far, "c", PROMPTS[0])
        assert again.token_ids["c"] == expected.token_ids["a"]
        assert drafts_of(far, "c") == drafts_of(far, "a")
        assert far.relay.num_state_bytes["grpc"] == 0


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
def test_states_in_half_precision_take_half_the_bytes_and_no_token(
    pair: tuple[Path, Path], drafter: DrafterProcess, state_dtype: str
):
    plain, half = Colocated(*pair), Colocated(*pair, state_dtype=state_dtype)
    expected = seeded_run(plain, "a", PROMPTS[1])
    seeded_run(half, "a", PROMPTS[1])
    with verifying(*pair, GLOO, state_dtype=state_dtype) as far:
        far.connect(drafter)
        assert seeded_run(far, "a", PROMPTS[1]).token_ids == expected.token_ids
        assert far.client.drafts == half.client.drafts
        assert far.relay.num_state_bytes == {"gloo": num_state_bytes(half.client.drafts) // 2}
