"""The learner's process: over a real pipe, at idle priority, gone when its shell is."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from outrider.cluster.offline.engine import RankProcesses
from outrider.drafter_service.engine.learning_messages import TrialCounts
from outrider.drafter_service.learning.folder_lock import own_folder
from outrider.drafter_service.learning.learner import Learner
from outrider.drafter_service.learning.learner_spec import LearnerSpec
from outrider.drafter_service.learning.messages import (
    FIRST_VERSION,
    FROM_LEARNER,
    Action,
    Ask,
    Heartbeat,
    LearnerReady,
    LearnerSettings,
    LearnerSettingsChange,
    LearnerUpdate,
    Phase,
    Reward,
    Texts,
)
from outrider.drafter_service.learning.rank_main import UPDATE_INTERVAL_S, LearnerLoop, build_learner
from outrider.drafter_service.service.speculative_config import (
    Location,
    Method,
    SpeculativeConfig,
    learning_refusal,
)
from outrider.verifier_service.messages.wire import decode, encode
from outrider.verifier_service.model.ranks import PipeListener, run_rank
from tiny.forking import FORKING
from tiny.loop_thread import LoopThread
from tiny.served import sample, samples_for, spec_of, write_first
from tiny.training import write_target

PATIENCE_S = 240.0  # an idle process gets little of a busy machine


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learners")
    write_target(folder / "target")
    return folder


def learner_spec(root, folder, method=Method.MEDUSA, **fields):
    first = None if method is Method.SUFFIX else write_first(root, root / "target", method)
    drafter, exports = spec_of(root / "target", first, method), str(folder / "exports")
    return LearnerSpec(drafter=drafter, pool="main", folder=str(folder), export_root=exports, **fields)


class Shell:
    """The shell's end of the pipe to a learner's process."""

    def __init__(self, spec):
        self.ranks = RankProcesses(run_rank, spec, 1, first_rank=0, context=FORKING)
        with PipeListener(self.ranks.rank(0, 1).shell_address) as listener:
            self.ranks.start()
            self.pipe = listener.accept(self.ranks.are_alive)
        self.ready = self.hear()
        self.updates = []

    def say(self, message):
        self.pipe.send_bytes(encode(message))

    def hear(self):
        assert self.pipe.poll(PATIENCE_S), "the learner says nothing"
        return decode(self.pipe.recv_bytes(), FROM_LEARNER)

    def until(self, condition):
        """Hear updates until one is as wanted; return it."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            self.updates.append(self.hear())
            if condition(self.updates[-1]):
                return self.updates[-1]
        raise AssertionError(f"it does not come; last: {self.updates[-1]}")


@contextlib.contextmanager
def learning(spec):
    shell = Shell(spec)
    try:
        yield shell
    finally:
        shell.pipe.close()
        shell.ranks.close()


def test_from_samples_to_a_version_that_serves_and_back(root, tmp_path):
    settings = LearnerSettings(num_steps=3, min_samples=8)
    spec = learner_spec(root, tmp_path / "registry", settings=settings)
    with learning(spec) as shell:
        assert shell.ready == LearnerReady(serving=FIRST_VERSION)
        samples = tuple(samples_for(spec.drafter, count=20))
        shell.say(Reward(request_id=samples[0].request_id, reward=float("nan")))  # is left out
        shell.say(Heartbeat(drafter_id="d", serving="v0", is_new=True, samples=samples, num_dropped=2))
        trial = shell.until(lambda update: update.status.phase is Phase.TRIAL)
        status = trial.status
        assert (status.pool, status.num_samples, status.num_seen, status.num_dropped) == ("main", 20, 20, 2)
        assert (status.num_steps, status.num_candidates) == (3, 1)
        assert (status.train_s > 0, status.loss is not None) == (True, True)
        assert (trial.desired.serving, trial.desired.shadow.name) == (FIRST_VERSION, "v1")
        assert Path(trial.desired.shadow.folder, "config.json").exists()
        counts = TrialCounts(
            serving="v0", shadow="v1", num_rounds=64, serving_score=64.0, shadow_score=128.0, squared_difference=80.0
        )
        shell.say(Heartbeat(drafter_id="d", serving="v0", trial=counts))
        watch = shell.until(lambda update: update.desired.serving.name == "v1")
        assert (watch.desired.shadow, watch.status.phase) == (FIRST_VERSION, Phase.WATCH)
        worse = TrialCounts(
            serving="v1", shadow="v0", num_rounds=16, serving_score=0.0, shadow_score=32.0, squared_difference=64.0
        )
        shell.say(Heartbeat(drafter_id="d", serving="v1", trial=worse))
        back = shell.until(lambda update: update.desired.serving == FIRST_VERSION)
        assert back.status.num_rolled_back == 1
        assert not any(update.texts for update in shell.updates), "heads are brought no texts"
    assert shell.ranks.processes[0].exitcode == 0


def test_operators_are_answered_and_settings_change(root, tmp_path):
    spec = learner_spec(root, tmp_path / "registry")
    with learning(spec) as shell:
        shell.say(LearnerSettingsChange(settings=LearnerSettings(sample_share=0.5)))
        shell.until(lambda update: update.desired.sample_share == 0.5)
        shell.say(Ask(call_id="p", action=Action.PUBLISH, folder=spec.drafter.model.path))
        update = shell.until(lambda update: update.answers)
        assert [(answer.call_id, answer.text) for answer in update.answers] == [("p", "v1 serves, and is watched")]
        assert update.desired.serving.name == "v1"
        shell.say(Ask(call_id="e", action=Action.EXPORT, folder="out"))
        assert shell.until(lambda update: update.answers).answers[0].error is None
        assert (tmp_path / "registry" / "exports" / "out" / "config.json").exists()
        with pytest.raises(ValueError, match="is another learner's"), own_folder(tmp_path / "registry", patience_s=0.0):
            raise AssertionError("a second learner has it")
        shell.say(Ask(call_id="r", action=Action.ROLLBACK))
        assert shell.until(lambda update: update.answers).desired.serving == FIRST_VERSION
    with learning(spec) as shell:  # the registry is what a new process begins with
        assert shell.ready.serving == FIRST_VERSION
        record = shell.until(lambda update: update.status.versions).status.versions[-1]
        assert (record.name, record.fate) == ("v1", "rolled back: by hand")


def test_a_pool_that_looks_tokens_up_brings_texts(root, tmp_path):
    spec = learner_spec(root, tmp_path / "registry", Method.SUFFIX)
    with learning(spec) as shell:
        shell.say(Heartbeat(drafter_id="d", serving="v0", samples=(sample("a"),)))
        shell.say(Heartbeat(drafter_id="e", serving="v0", is_new=True))
        assert shell.until(lambda update: update.texts).texts == (Texts(drafter_id="e", samples=(sample("a"),)),)


def test_it_ends_with_a_shell_that_was_killed(root, tmp_path):
    write_first(root, root / "target", Method.MEDUSA)
    source = """
        import os, signal, subprocess, sys
        from multiprocessing import get_context
        from pathlib import Path
        sys.path.insert(0, sys.argv[3])
        from outrider.drafter_service.learning.learner_spec import LearnerSpec
        from outrider.verifier_service.model.ranks import PipeListener, RankSpec, run_rank
        from outrider.drafter_service.service.speculative_config import Method
        from tiny.served import spec_of

        if __name__ == "__main__":
            root, folder = Path(sys.argv[1]), Path(sys.argv[2])
            drafter = spec_of(root / "target", root / "first medusa", Method.MEDUSA)
            spec = LearnerSpec(drafter=drafter, pool="main", folder=str(folder / "registry"), export_root="")
            rank = RankSpec(rank=0, size=1, folder=folder)
            with PipeListener(rank.shell_address) as listener:
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    run_rank(spec, rank)
                    os._exit(0)
                pipe = listener.accept()
            pipe.recv_bytes()
            print(pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", textwrap.dedent(source), str(root), str(tmp_path), tests]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    pid = int(done.stdout)
    deadline_s = time.monotonic() + PATIENCE_S
    while is_running(pid):
        assert time.monotonic() < deadline_s, "it lives on"
        time.sleep(0.05)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- the loop alone ---


class SlowLearner:
    """A learner whose steps take long."""

    def __init__(self, made: Learner):
        self._made = made
        self.num_steps = 0

    def __getattr__(self, name):
        return getattr(self._made, name)

    def has_work(self):
        return self.num_steps < 1

    def step(self):
        time.sleep(0.7)
        self.num_steps += 1


class Loop(LoopThread):
    def __init__(self, learner, **options):
        super().__init__()
        self.updates: list[LearnerUpdate] = []
        self.start(lambda pipe: LearnerLoop(learner, pipe, clock=time.monotonic, **options).run())

    def take(self, frame):
        self.updates.append(decode(frame, FROM_LEARNER))


def test_it_stays_talkative_while_a_step_takes_long(root, tmp_path):
    learner = SlowLearner(build_learner(learner_spec(root, tmp_path, Method.SUFFIX), None))
    loop = Loop(learner)
    loop.hear_until(lambda: learner.num_steps)
    assert len(loop.updates) >= 3
    loop.end()


class SlowToAnswer(SlowLearner):
    """A learner that says what it is at several times before an operator has an answer."""

    def has_work(self):
        return False

    def handle(self, ask):
        time.sleep(3 * UPDATE_INTERVAL_S)
        return self._made.handle(ask)


def test_an_answer_that_takes_long_is_not_lost(root, tmp_path):
    loop = Loop(SlowToAnswer(build_learner(learner_spec(root, tmp_path, Method.SUFFIX), None)))
    loop.hear_until(lambda: loop.updates)
    loop.pipe.send_bytes(encode(Ask(call_id="1", action=Action.PAUSE)))
    loop.hear_until(lambda: any(update.answers for update in loop.updates))
    loop.end()


class StarvedLearner(SlowLearner):
    """A learner whose step never ends while it is in the idle class."""

    def step(self):
        assert os.sched_getscheduler(0) == os.SCHED_IDLE
        deadline_s = time.monotonic() + PATIENCE_S
        while os.sched_getscheduler(0) == os.SCHED_IDLE and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self.policy = os.sched_getscheduler(0)
        self.num_steps += 1


def test_an_operator_does_not_wait_for_spare_time(root, tmp_path):
    """The step that the call finds is hurried; no other thread changes its class."""
    learner = StarvedLearner(build_learner(learner_spec(root, tmp_path, Method.SUFFIX), None))
    loop = Loop(learner, yields=True)
    loop.hear_until(lambda: len(loop.updates) > 2)
    loop.pipe.send_bytes(encode(Reward(request_id="a", reward=1.0)))
    num_updates = len(loop.updates)
    loop.hear_until(lambda: len(loop.updates) > num_updates + 2)
    assert learner.num_steps == 0, "what is no operator's call waits"
    loop.pipe.send_bytes(encode(Ask(call_id="1", action=Action.PAUSE)))
    loop.hear_until(lambda: any(update.answers for update in loop.updates))
    assert (learner.num_steps, learner.policy) == (1, os.SCHED_OTHER)
    assert learner.phase is Phase.PAUSED
    loop.end()


# --- what cannot learn ---


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "eagle3", "model": "a"}, None),
        ({"method": "draft_model", "model": "a"}, None),
        ({"method": "suffix"}, None),
        ({"method": "ngram"}, None),
        ({"method": "hybrid", "methods": ("suffix", "medusa"), "model": "a"}, None),
        ({"method": "hybrid", "methods": ("suffix", "ngram")}, None),
        ({"method": "dflash", "model": "a"}, "dflash is not trained on what was served"),
        ({"method": "parallel_draft", "model": "a"}, "parallel_draft is not trained"),
        ({"method": "mtp"}, "mtp is not trained"),
        ({"method": "eagle3", "model": "a", "models": ("a", "b")}, "models: parameter sets"),
        ({"method": "draft_model", "model": "a", "vocabulary": "text"}, "vocabulary: a draft model of another"),
        ({"method": "hybrid", "methods": ("mtp", "draft_model"), "model": "a"}, "both have weights"),
        ({"method": "plugin", "plugin": "p"}, "the plug-in 'p' has its own ways"),
        ({"method": "early_exit", "location": Location.VERIFIER}, "early_exit runs in the verifier"),
        ({"method": "suffix", "location": Location.VERIFIER}, "suffix runs in the verifier"),
    ],
)
def test_what_cannot_learn_says_why(options, said):
    refusal = learning_refusal(SpeculativeConfig(**options))
    assert (refusal is None) == (said is None), refusal
    assert said is None or said in str(refusal)


def test_a_learner_of_what_cannot_learn_is_refused(tmp_path):
    drafter = spec_of(tmp_path, tmp_path, Method.DFLASH)
    with pytest.raises(ValueError, match="learning: dflash is not trained"):
        LearnerSpec(drafter=drafter, pool="main", folder="f", export_root="e")


def test_the_specs_module_needs_no_torch():
    source = "import sys; import outrider.drafter_service.learning.learner_spec; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
