"""The draft loop on a thread of its own, at the end of a real pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.runner import FakeRunner, continuation
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.messages import FROM_DRAFT_ENGINE
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.own_weights import DrafterControl, OwnWeights
from outrider.drafter_service.service.rank_main import DraftLoop, build_draft_engine
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, Open, Resync, States
from outrider.verifier_service.messages.drafter_load import DrafterLoad
from outrider.verifier_service.messages.engine import (
    ControlResult,
    PeerState,
    Relay,
    UpdateDraftWeights,
    UpdateWeights,
)
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.config import ModelConfig
from tiny.drafters import model_drafter
from tiny.heads import HIDDEN_SIZE, eagle_head
from tiny.loop_thread import PATIENCE_S, LoopThread
from tiny.models import make_checkpoint

GREEDY = DraftSampling(temperature=0.0)
PROMPT = (4, 8, 15)


def open_(request_id: str = "r", token_ids: tuple[int, ...] = PROMPT) -> Open:
    return Open(request_id=request_id, sampling=GREEDY, token_ids=token_ids)


def commit(request_id: str = "r", *, round_id: int = 1, position: int = len(PROMPT), length: int = 3) -> Commit:
    return Commit(request_id=request_id, round_id=round_id, position=position, token_ids=(), max_length=length)


def without_confidences(payload: bytes) -> Draft | Resync:
    message = decode(payload, (Draft, Resync))
    return dataclasses.replace(message, confidences=None) if isinstance(message, Draft) else message


def draft(request_id: str = "r", token_ids: tuple[int, ...] = PROMPT, *, round_id: int = 1, length: int = 3) -> Draft:
    return Draft(
        request_id=request_id,
        round_id=round_id,
        position=len(token_ids),
        token_ids=continuation(list(token_ids), length, 97),
    )


class Loop(LoopThread):
    """The shell's end of the pipe to a draft loop."""

    def __init__(self, num_ahead_branches: int = 0, weights: OwnWeights | None = None) -> None:
        super().__init__()
        self.runner = FakeRunner()
        rng = torch.Generator().manual_seed(0)
        drafter = model_drafter(self.runner, rng, num_ahead_branches=num_ahead_branches)
        ahead = drafter if num_ahead_branches else None
        self.engine = DraftEngine(
            drafter,
            clock=time.monotonic,
            config=DraftEngineConfig(),
            ahead=ahead,
            has_weights=weights is not None,
        )
        self.control = DrafterControl(self.engine, weights)
        self.answers: list[tuple[str, Any]] = []
        self.loads: list[DrafterLoad] = []
        self.results: list[ControlResult] = []
        self.start(self._run_loop)

    def _run_loop(self, pipe: Connection) -> None:
        DraftLoop(self.engine, pipe, clock=time.monotonic, check_integrity=True, control=self.control).run()

    def say(self, peer: str, *messages: Any) -> None:
        for message in messages:
            payload = message if isinstance(message, bytes) else encode(message)
            self.pipe.send_bytes(encode(Relay(peer=peer, payload=payload)))

    def state(self, peer: str, *, is_up: bool) -> None:
        self.pipe.send_bytes(encode(PeerState(peer=peer, is_up=is_up)))

    def take(self, frame: bytes) -> None:
        update = decode(frame, FROM_DRAFT_ENGINE)
        self.answers += [(relay.peer, without_confidences(relay.payload)) for relay in update.relays]
        self.loads += [update.load] if update.load is not None else []
        self.results += update.results


@contextlib.contextmanager
def looping(num_ahead_branches: int = 0, weights: OwnWeights | None = None) -> Iterator[Loop]:
    loop = Loop(num_ahead_branches, weights)
    try:
        yield loop
    finally:
        loop.end()


def test_asks_go_in_and_drafts_come_out():
    with looping() as loop:
        loop.say("v", open_(), commit())
        loop.hear_until(lambda: loop.answers)
        assert loop.answers == [("v", draft())]


def test_the_loop_spends_its_spare_time_on_what_comes_next():
    with looping(num_ahead_branches=2) as loop:
        loop.say("v", open_(), commit())
        loop.hear_until(lambda: loop.loads and loop.loads[-1].counters.num_ahead_tokens == 1 + 2 * 3)
        num_batches = len(loop.runner.batches)
        new = continuation(list(PROMPT), 4, 97)
        loop.say("v", dataclasses.replace(commit(round_id=2), token_ids=new))
        loop.hear_until(lambda: len(loop.answers) == 2)
        assert loop.answers[1] == ("v", draft(token_ids=PROMPT + new, round_id=2))
        loop.hear_until(lambda: loop.loads[-1].counters.num_cache_hits == 1)
        assert all(batch.num_tokens <= 2 for batch in loop.runner.batches[num_batches:]), "all of it in spare time"


def test_a_loop_with_nothing_to_do_sleeps():
    with looping(num_ahead_branches=2) as loop:
        loop.say("v", open_(), commit())
        loop.hear_until(lambda: len(loop.loads) >= 4)  # one in 0.2 s
        assert not loop.engine.has_spare_work()
        assert len(loop.runner.batches) == 3 + 1 + 3


def test_a_peer_that_goes_away_is_forgotten_and_the_others_are_not():
    with looping() as loop:
        loop.say("v", open_())
        loop.say("w", open_())
        loop.state("w", is_up=True)  # no news to a drafter
        loop.state("v", is_up=False)
        loop.say("v", commit())
        loop.say("w", commit())
        loop.hear_until(lambda: len(loop.answers) == 2)
        assert dict(loop.answers) == {"v": Resync(request_id="r"), "w": draft()}


def test_loads_are_reported_while_nothing_happens():
    with looping() as loop:
        loop.say("v", open_(), open_("s"))
        loop.hear_until(lambda: loop.loads and loop.loads[-1].num_sessions == 2)
        num_before = len(loop.loads)
        loop.hear_until(lambda: len(loop.loads) >= num_before + 2)
        assert loop.loads[-1] == DrafterLoad(num_sessions=2, queue_depth=0, mean_draft_s=None)
        loop.say("v", commit(), Close(request_id="s"))
        loop.hear_until(lambda: loop.loads[-1].num_sessions == 1 and loop.loads[-1].mean_draft_s is not None)


@pytest.mark.parametrize("has_session", [False, True])
def test_the_loop_ends_quietly_when_the_pipe_closes(has_session: bool):
    loop = Loop()
    if has_session:
        loop.say("v", open_(), commit())
        loop.hear_until(lambda: loop.answers)
    loop.end()


def test_the_loop_ends_quietly_when_the_pipe_closes_while_it_drafts():
    loop = Loop()
    execute, entered, release = loop.runner.execute, threading.Event(), threading.Event()

    def slow(batch, chosen=None):
        entered.set()
        release.wait(PATIENCE_S)
        return execute(batch, chosen)

    loop.runner.execute = slow
    loop.say("v", open_(), commit())
    assert entered.wait(PATIENCE_S)
    loop.pipe.close()
    release.set()
    loop.end()


def test_new_weights_come_between_two_steps_and_loads_go_on_meanwhile(tmp_path: Path):
    entered, release = threading.Event(), threading.Event()
    changed: list[str] = []

    def change(message: UpdateWeights) -> int:
        entered.set()
        assert release.wait(PATIENCE_S)
        changed.append(str(message.folder))
        return 0

    weights = OwnWeights(SpeculativeConfig(model="a"), change)
    weights.keep_model(lambda folder: None)
    with looping(2, weights) as loop:
        loop.say("v", open_(), commit())
        loop.hear_until(lambda: loop.loads and loop.loads[-1].counters.num_ahead_tokens == 1 + 2 * 3)
        assert loop.loads[-1].weight_version == ""
        loop.pipe.send_bytes(encode(UpdateDraftWeights(call_id="u", folder=str(tmp_path), weight_version="v1")))
        assert entered.wait(PATIENCE_S)
        num_loads, num_batches = len(loop.loads), len(loop.runner.batches)
        new = continuation(list(PROMPT), 4, 97)
        loop.say("v", dataclasses.replace(commit(round_id=2), token_ids=new))
        loop.hear_until(lambda: len(loop.loads) >= num_loads + 3)
        assert (loop.results, len(loop.answers), len(loop.runner.batches)) == ([], 1, num_batches)
        release.set()
        loop.hear_until(lambda: loop.results)
        assert loop.results == [ControlResult(call_id="u", weight_version="v1")]
        assert loop.loads[-1].weight_version == "v1", "told with the answer"
        loop.hear_until(lambda: len(loop.answers) == 2)
        assert loop.answers[1] == ("v", draft(token_ids=PROMPT + new, round_id=2))
        assert loop.runner.batches[num_batches].num_tokens == len(PROMPT + new), "what the old weights computed is gone"
    assert changed == [str(tmp_path)]


def test_a_drafter_whose_weights_cannot_change_says_so():
    with looping() as loop:
        loop.pipe.send_bytes(encode(UpdateDraftWeights(call_id="u", folder="f")))
        loop.hear_until(lambda: loop.results)
        assert loop.results == [ControlResult(call_id="u", error="this drafter's weights cannot change")]


def test_a_loop_that_checks_ends_when_the_books_are_wrong():
    loop = Loop()

    def fail():
        raise AssertionError("asks and unanswered rounds differ")

    loop.engine.check_integrity = fail
    with pytest.raises((EOFError, ConnectionError)):
        loop.hear_until(lambda: False)
    loop.thread.join(PATIENCE_S)
    assert isinstance(loop.error, AssertionError)


def test_an_engine_that_fails_ends_the_loop_and_the_shell_sees_the_end_of_the_pipe():
    loop = Loop()

    def fail(batch, chosen=None):
        raise ArithmeticError("no device")

    loop.runner.execute = fail
    loop.say("v", open_(), commit())
    with pytest.raises((EOFError, ConnectionError)):
        loop.hear_until(lambda: False)
    loop.thread.join(PATIENCE_S)
    assert isinstance(loop.error, ArithmeticError)


@pytest.mark.parametrize("num_branches", [0, 2])
def test_a_head_runs_ahead_where_it_is_asked_to(tmp_path: Path, num_branches: int):
    make_checkpoint(tmp_path / "target")
    eagle_head().save(tmp_path / "head")
    model, target = (ModelConfig(path=str(tmp_path / name), device="cpu") for name in ("head", "target"))
    config = SpeculativeConfig(method=Method.EAGLE, ahead_branches=num_branches)
    engine = build_draft_engine(DrafterSpec(model=model, target=target, speculative=config))
    states = States(request_id="r", position=0, dtype="float32", width=HIDDEN_SIZE, data=bytes(4 * HIDDEN_SIZE))
    for message in (Open(request_id="r", sampling=GREEDY, token_ids=(1, 3)), states, commit(position=2)):
        engine.handle("v", message)
    while engine.has_work():
        engine.step()
    assert engine.has_spare_work() == (num_branches > 0)


@pytest.mark.parametrize(("target_vocab_size", "limit"), [(48, 48), (128, 97)])
def test_drafts_stay_inside_the_targets_vocabulary(tmp_path: Path, target_vocab_size: int, limit: int):
    make_checkpoint(tmp_path, vocab_size=target_vocab_size)
    model = ModelConfig(path=str(tmp_path), device="cpu")
    config = SpeculativeConfig(num_speculative_tokens=12)
    spec = DrafterSpec(model=model, target=model, speculative=config, sampling_seed=1)
    engine = build_draft_engine(spec, runner=FakeRunner())
    sampling = DraftSampling(temperature=50.0)  # nearly uniform over what may be drawn
    for index in range(8):
        request_id = str(index)
        engine.handle("v", Open(request_id=request_id, sampling=sampling, token_ids=(index, 3)))
        engine.handle("v", commit(request_id, position=2, length=40))
    drafts = []
    while engine.has_work():
        drafts += [message for _, message in engine.step()]
    assert [len(message.token_ids) for message in drafts] == [12] * 8, "max_draft_length holds"
    drawn = {token_id for message in drafts for token_id in message.token_ids}
    offered = {token_id for message in drafts for row in message.draft_probs for token_id in row.token_ids}
    assert max(drawn | offered) < limit
    assert limit == 48 or max(offered) >= 48, "or the limit could not show"


def test_ranks_leave_what_they_have_loaded_out_of_garbage_collections(tmp_path: Path):
    make_checkpoint(tmp_path / "target")
    source = """
        import gc, os, sys, threading
        from pathlib import Path
        from outrider.drafter_service.service.drafter_spec import DrafterSpec
        from outrider.drafter_service.service.speculative_config import SpeculativeConfig
        from outrider.verifier_service.model.config import ModelConfig
        from outrider.verifier_service.model.ranks import PipeListener, RankSpec, run_rank
        from outrider.verifier_service.engine.verifier_spec import VerifierSpec

        folder = Path(sys.argv[1])
        model = ModelConfig(path=str(folder / "target"), device="cpu", num_kv_blocks=16)
        drafter = DrafterSpec(model=None, target=model, speculative=SpeculativeConfig(method="ngram"))
        for name, spec in (("verifier", VerifierSpec(model=model)), ("drafter", drafter)):
            (folder / name).mkdir()
            rank = RankSpec(rank=0, size=1, folder=folder / name)
            with PipeListener(rank.shell_address) as listener:
                threading.Thread(target=run_rank, args=(spec, rank), daemon=True).start()
                pipe = listener.accept()
            pipe.recv_bytes()  # it is ready
            print(gc.get_freeze_count() > 100_000)
            gc.unfreeze()
        sys.stdout.flush()
        os._exit(0)  # the ranks go on
    """
    command = [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr
