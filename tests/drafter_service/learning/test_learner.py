"""The cycle with a scripted clock and a made-up trainer."""

import dataclasses
import json

import pytest

from outrider.drafter_service.engine.learning_messages import TrialCounts, VersionCounts
from outrider.drafter_service.learning.judging import HeldOut
from outrider.drafter_service.learning.learner import Learner
from outrider.drafter_service.learning.messages import (
    FIRST_VERSION,
    Action,
    Answer,
    Ask,
    Heartbeat,
    LearnerSettings,
    Phase,
    Reward,
    Texts,
)
from outrider.drafter_service.learning.reservoir import Reservoir
from outrider.drafter_service.learning.version_registry import VersionRegistry
from outrider.verifier_service.messages.wire import decode, encode
from tiny.served import sample

SETTINGS = LearnerSettings(num_steps=3, min_samples=4)
SECRET = "Sam's secret"


class FakeStudy:
    """A trainer whose weights are a file of text; it says what it was asked."""

    rows = 1

    def __init__(self, folder):
        self._first = folder
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("first")
        self.losses = []  # to come; then 1.0
        self.judged = (HeldOut(100, 2.0, 1.0), HeldOut(100, 1.0, 2.0))
        self.begun = []
        self.weighted = []
        self.num_held_out = None
        self.refuses = False

    def begin(self, folder):
        self.begun.append(None if folder is None else folder.name)

    def step(self, kept, *, rate_scale, is_weighted):
        assert kept
        assert not any(each.is_held_out for each in kept)
        self.weighted.append((is_weighted, rate_scale, [each.reward for each in kept]))
        loss = self.losses.pop(0) if self.losses else 1.0
        if isinstance(loss, Exception):
            raise loss
        return loss

    def save(self, folder):
        folder.mkdir()
        (folder / "weights").write_text("trained")

    def judge(self, folder, serving, kept):
        assert (folder / "weights").exists()
        assert all(each.is_held_out for each in kept)
        self.num_held_out = len(kept)
        return self.judged

    def take(self, folder, to):
        if not (folder / "weights").exists():
            raise ValueError(f"there is no folder {folder}")
        to.mkdir()
        (to / "weights").write_text((folder / "weights").read_text())
        if self.refuses:
            raise ValueError("it does not fit")

    def first_folder(self):
        return self._first


class Pool:
    """A learner, its clock and its drafters."""

    def __init__(self, folder, settings=SETTINGS, brings_texts=False, has_study=True, weights_root=None):
        self.folder, self.now_s, self.cpu_s = folder, 0.0, 0.0
        self.training = FakeStudy(folder / "first")
        self.reservoir = Reservoir(1 << 20)
        self.learner = Learner(
            pool="main", registry=VersionRegistry(folder / "registry"), reservoir=self.reservoir,
            training=self.training if has_study else None, settings=settings, brings_texts=brings_texts,
            clock=lambda: self.now_s, cpu_clock=self.tick, export_root=folder / "exports", weights_root=weights_root,
        )  # fmt: skip
        self.num_samples = 0
        self.rounds = {}

    def tick(self):
        self.cpu_s += 0.5
        return self.cpu_s

    def heartbeat(self, drafter_id="d", **fields):
        self.learner.heartbeat(Heartbeat(**({"drafter_id": drafter_id, "serving": self.serving} | fields)))
        self.learner.check_integrity()

    def bring(self, count=8):
        fresh = [sample(f"{SECRET} {self.num_samples + n}", cache_salt=SECRET) for n in range(count)]
        self.num_samples += count
        self.heartbeat(samples=tuple(fresh))

    def work(self, limit=50):
        """Step until there is nothing to do; return how many steps that took."""
        for number in range(limit):
            if not self.learner.has_work():
                return number
            self.learner.step()
            self.learner.check_integrity()
        raise AssertionError("it works on and on")

    def play(self, serving_score, shadow_score, num_rounds, drafter_id="d", wobble=0.5):
        """Let one drafter report rounds with these scores until something changes; return after how many."""
        desired = self.learner.desired
        pair = (desired.serving.name, desired.shadow.name)
        for number in range(1, num_rounds + 1):
            total = TrialCounts(
                serving=pair[0], shadow=pair[1], num_rounds=number, serving_score=serving_score * number,
                shadow_score=shadow_score * number,
                squared_difference=number * ((shadow_score - serving_score) ** 2 + wobble**2),
            )  # fmt: skip
            self.heartbeat(drafter_id, trial=total)
            if self.learner.desired != desired:
                return number
        return None

    def to_trial(self):
        self.bring()
        self.work()
        assert self.learner.phase is Phase.TRIAL

    def publish(self):
        self.to_trial()
        self.play(1.0, 2.0, 64)
        assert self.learner.phase is Phase.WATCH

    def ask(self, action, folder=""):
        return self.learner.handle(Ask(call_id="c", action=action, folder=str(folder)))

    @property
    def serving(self):
        return self.learner.desired.serving.name

    @property
    def status(self):
        return self.learner.status

    def fate(self, name):
        return next(record.fate for record in self.status.versions if record.name == name)


@pytest.fixture
def pool(tmp_path):
    return Pool(tmp_path)


def test_a_candidate_is_trained_judged_tried_published_watched_and_settled(pool):
    assert (pool.learner.phase, pool.learner.has_work()) == (Phase.COLLECTING, False)
    pool.bring(3)
    assert not pool.learner.has_work()
    pool.bring(6)
    assert pool.learner.has_work()
    pool.learner.step()
    assert pool.learner.phase is Phase.TRAINING
    assert pool.learner.desired.shadow is None
    pool.work()
    assert (pool.training.begun, pool.training.num_held_out) == ([None], 1)
    desired = pool.learner.desired
    assert (desired.serving, desired.shadow.name, desired.shadow_share) == (FIRST_VERSION, "v1", 0.25)
    assert (pool.status.num_steps, pool.status.loss, pool.status.train_s) == (3, 1.0, 3.0)
    assert pool.play(1.0, 2.0, 200) == 64
    desired = pool.learner.desired
    assert (desired.serving.name, desired.shadow, pool.learner.phase) == ("v1", FIRST_VERSION, Phase.WATCH)
    assert (pool.folder / "registry" / "versions" / "v1" / "weights").read_text() == "trained"
    assert pool.play(2.0, 2.0, 2000) == 1024
    assert (pool.serving, pool.learner.desired.shadow, pool.learner.phase) == ("v1", None, Phase.COLLECTING)
    assert pool.status.num_published == pool.status.num_candidates == 1
    pool.bring()
    pool.work()
    assert pool.learner.desired.shadow.name == "v2"
    assert pool.training.begun == [None], "training goes on from where it was"


def test_training_waits_for_new_text_between_candidates(pool):
    pool.bring()
    pool.training.judged = tuple(reversed(pool.training.judged))
    pool.work()
    assert pool.status.num_refused == 1
    assert not pool.learner.has_work()
    pool.bring(1)
    assert pool.learner.has_work()


def test_few_samples_are_passed_over_twice_at_most(pool):
    pool.training.rows = 8
    pool.bring(5)
    pool.work()
    assert (pool.status.num_steps, pool.learner.phase) == (2, Phase.TRIAL)


def test_what_held_out_text_refuses_never_drafts(pool):
    pool.training.judged = tuple(reversed(pool.training.judged))
    for number in range(1, 4):
        pool.bring()
        pool.work()
        assert (pool.learner.desired.shadow, pool.status.num_refused) == (None, number)
    assert pool.fate("v1") == "refused: on held-out text 1.00 tokens agree against 2.00, loss 2 against 1"
    assert pool.training.begun == [None]
    pool.bring()
    pool.work()
    assert pool.training.begun == [None, None], "after three refusals it begins anew"
    assert not list((pool.folder / "registry" / "versions").iterdir())


def test_without_held_out_text_the_trial_alone_decides(pool):
    pool.training.judged = (HeldOut(0, 0.0, 0.0), HeldOut(0, 0.0, 0.0))
    pool.to_trial()


def test_a_shadow_that_is_worse_is_refused_within_sixteen_rounds(pool):
    pool.to_trial()
    assert pool.play(2.0, 0.0, 100) == 16
    assert pool.fate("v1") == "refused: in the shadow 0.00 against 2.00 a round, over 16 rounds"
    assert (pool.learner.phase, pool.serving) == (Phase.COLLECTING, "v0")


def test_a_shadow_that_is_as_good_is_given_up(pool):
    pool.to_trial()
    assert pool.play(2.0, 2.0, 5000) == 4096
    assert "no better than noise" in pool.fate("v1")


def test_a_version_that_is_worse_is_rolled_back_by_itself(pool):
    pool.publish()
    assert pool.play(0.0, 2.0, 100) == 16
    assert (pool.serving, pool.status.num_rolled_back) == ("v0", 1)
    assert pool.fate("v1") == "rolled back: 0.00 against 2.00 a round, over 16 rounds"
    pool.bring()
    pool.work()
    assert pool.training.begun == [None, None]
    assert pool.learner.desired.shadow.name == "v2"


def test_a_version_that_loses_a_third_of_a_token_is_rolled_back_within_256_rounds(pool):
    pool.publish()
    assert pool.play(1.7, 2.0, 300, wobble=1.2) <= 256
    assert pool.serving == "v0"


def test_counts_of_several_drafters_are_one_trial(pool):
    pool.to_trial()
    pool.play(1.0, 2.0, 31, "a")
    pool.play(1.0, 2.0, 32, "b")
    assert pool.learner.phase is Phase.TRIAL
    pool.play(1.0, 2.0, 64, "c")
    assert pool.learner.phase is Phase.WATCH


# --- errors ---


def test_a_shadow_that_a_drafter_cannot_load_is_given_up(pool):
    pool.to_trial()
    pool.heartbeat(shadow_error="no tensor", shadow="v0")
    assert pool.learner.phase is Phase.TRIAL, "old news"
    pool.heartbeat(shadow_error="no tensor", shadow="v1")
    assert pool.fate("v1") == "refused: d could not load it: no tensor"
    assert "no tensor" in pool.status.last_event
    pool.heartbeat(shadow_error="no tensor")
    assert pool.status.num_refused == 1


def test_a_version_that_a_drafter_cannot_take_is_rolled_back(pool):
    pool.publish()
    pool.heartbeat(serving="v0", serving_error="no tensor", wanted="v1")
    assert (pool.serving, pool.fate("v1")) == ("v0", "rolled back: d could not take it: no tensor")
    for _ in range(3):
        pool.heartbeat("other", serving="v0", serving_error="no tensor", wanted="v1")
    assert pool.status.num_rolled_back == 1
    pool.heartbeat(serving="", serving_error="no disk", wanted="v0")
    assert pool.status.last_event == "d could not take v0: no disk"


def test_a_predecessor_that_cannot_be_loaded_ends_the_watch(pool):
    pool.publish()
    pool.heartbeat(shadow_error="no memory", shadow="v0")
    assert (pool.serving, pool.learner.phase) == ("v1", Phase.COLLECTING)
    assert "watched no longer" in pool.status.last_event


def test_a_loss_that_is_no_number_drops_what_was_trained(pool):
    pool.training.losses = [1.0, ArithmeticError("after 1 steps the loss is nan")]
    pool.bring()
    pool.learner.step()
    pool.learner.step()
    pool.learner.step()
    assert pool.status.last_event == "training began anew: after 1 steps the loss is nan"
    assert pool.learner.phase is Phase.COLLECTING
    pool.bring()
    pool.work()
    assert pool.training.begun == [None, None]
    assert pool.learner.desired.shadow.name == "v1"


def test_weights_that_are_no_numbers_leave_no_candidate(pool):
    save, pool.training.save = (
        pool.training.save,
        lambda folder: (_ for _ in ()).throw(ArithmeticError("a weight is nan")),
    )
    pool.bring()
    pool.work()
    assert pool.status.num_candidates == 0
    assert not list((pool.folder / "registry" / "versions").iterdir())
    pool.training.save = save
    pool.to_trial()
    assert pool.learner.desired.shadow.name == "v2"


def test_an_error_as_of_a_full_disk_is_said_and_tried_again_later(pool):
    pool.training.losses = [OSError("the disk is full")]
    pool.bring()
    pool.learner.step()
    pool.learner.step()
    assert pool.status.last_event == "an error, and a pause of 60 s: the disk is full"
    assert not pool.learner.has_work()
    pool.now_s += 60.0
    pool.work()
    assert pool.learner.phase is Phase.TRIAL


def test_a_candidate_that_cannot_be_judged_is_refused(pool):
    pool.training.judged = None
    judge = pool.training.judge
    pool.training.judge = lambda *_: (_ for _ in ()).throw(ValueError("a tensor is missing"))
    pool.bring()
    pool.work()
    assert pool.fate("v1") == "refused: a tensor is missing"
    pool.training.judge, pool.training.judged = judge, (HeldOut(0, 0.0, 0.0), HeldOut(0, 0.0, 0.0))
    pool.now_s += 60.0
    pool.to_trial()


def test_samples_of_no_use_are_said_and_tried_again_later(pool):
    pool.training.losses = [None, 1.0]
    pool.bring()
    pool.learner.step()
    pool.learner.step()
    assert pool.status.last_event == "no sample has what this drafter learns from"
    assert not pool.learner.has_work()
    pool.now_s += 1.0
    pool.work()
    assert pool.learner.phase is Phase.TRIAL


# --- operators ---


def test_pause_and_resume(pool):
    pool.bring()
    pool.learner.step()
    assert pool.ask(Action.PAUSE).error is None
    assert (pool.learner.has_work(), pool.learner.phase) == (False, Phase.PAUSED)
    assert pool.learner.desired.sample_share == 1.0
    assert pool.ask(Action.RESUME).text == "goes on: training"
    pool.work()
    pool.ask(Action.PAUSE)
    assert pool.learner.desired.shadow is None, "no trials"
    pool.ask(Action.RESUME)
    assert pool.play(1.0, 2.0, 64) == 64


def test_a_pause_leaves_the_watch_on(pool):
    pool.publish()
    pool.ask(Action.PAUSE)
    assert pool.play(0.0, 2.0, 100) == 16
    assert pool.serving == "v0"


def test_rollback_by_hand(pool):
    answer = pool.ask(Action.ROLLBACK)
    assert answer == Answer(call_id="c", error="v0 is the first version: there is none before it")
    pool.publish()
    assert pool.ask(Action.ROLLBACK).text == "v0 serves instead of v1"
    assert (pool.serving, pool.fate("v1")) == ("v0", "rolled back: by hand")
    assert pool.learner.phase is Phase.COLLECTING


def test_a_rollback_gives_the_candidate_up_that_was_trained_from_what_served(pool):
    pool.publish()
    pool.play(2.0, 2.0, 1024)
    pool.to_trial()
    pool.ask(Action.ROLLBACK)
    assert (pool.serving, pool.learner.desired.shadow) == ("v0", None)
    assert pool.fate("v2") == "given up: its predecessor was rolled back"


def test_poison_that_is_let_through_by_hand_is_rolled_back(pool, tmp_path):
    poison = tmp_path / "poison"
    poison.mkdir()
    (poison / "weights").write_text("poison")
    pool.to_trial()
    assert pool.ask(Action.PUBLISH, poison).text == "v2 serves, and is watched"
    desired = pool.learner.desired
    assert (desired.serving.name, desired.shadow) == ("v2", FIRST_VERSION)
    assert (pool.folder / "registry" / "versions" / "v2" / "weights").read_text() == "poison"
    assert pool.fate("v1") == "given up: another version was published by hand"
    assert pool.play(0.0, 2.0, 100) == 16
    assert pool.serving == "v0"


def test_a_folder_that_does_not_fit_is_refused_and_a_candidate_goes_on(pool, tmp_path):
    pool.to_trial()
    answer = pool.ask(Action.PUBLISH, tmp_path / "nowhere")
    assert answer.error == f"there is no folder {tmp_path / 'nowhere'}"
    pool.training.refuses = True
    assert pool.ask(Action.PUBLISH, pool.training.first_folder()).error == "it does not fit"
    assert (pool.serving, pool.learner.desired.shadow.name, pool.fate("v1")) == ("v0", "v1", "candidate")
    assert [path.name for path in (tmp_path / "registry" / "versions").iterdir()] == ["v1"], "no copy is left"


def test_what_is_published_by_hand_lies_below_the_root(tmp_path):
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root / "good", other):
        folder.mkdir(parents=True)
        (folder / "weights").write_text("w")
    (root / "link").symlink_to(other)
    pool = Pool(tmp_path, weights_root=str(root))
    for folder in (other, root / "link", root / ".." / "other"):
        assert pool.ask(Action.PUBLISH, folder).error == f"folder: {folder} does not lie below {root}"
    assert pool.ask(Action.PUBLISH, root / "good").error is None


def test_export(pool, tmp_path):
    exports = tmp_path / "exports"
    assert pool.ask(Action.EXPORT, "out").error is None
    assert (exports / "out" / "weights").read_text() == "first"
    assert pool.ask(Action.EXPORT, "out").error == f"{exports / 'out'} exists"
    pool.publish()
    assert pool.ask(Action.EXPORT, exports / "a" / "new").text == f"v1 was copied to {exports / 'a' / 'new'}"
    assert (exports / "a" / "new" / "weights").read_text() == "trained"


def test_an_export_stays_below_its_root(pool, tmp_path):
    exports, inside = tmp_path / "exports", tmp_path / "inside"
    exports.mkdir()
    inside.mkdir()
    (exports / "link").symlink_to(inside)
    for folder in (tmp_path / "out", "../out", "a/../../out", exports, ".", "link/out", "/"):
        assert "does not lie below" in pool.ask(Action.EXPORT, folder).error
    assert not (tmp_path / "out").exists()
    assert not list(inside.iterdir())


def test_an_export_that_was_broken_off_is_made_anew(pool, tmp_path):
    partial = tmp_path / "exports" / ".out.partial"
    partial.mkdir(parents=True)
    (partial / "half").touch()
    assert pool.ask(Action.EXPORT, "out").error is None
    assert [path.name for path in (tmp_path / "exports").iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "exports" / "out").iterdir()] == ["weights"]


def test_settings_change_live(pool):
    pool.learner.change_settings(LearnerSettings(num_steps=1, min_samples=1, shadow_share=0.5, sample_share=0.1,
                                                 rate_scale=2.0, reward_weighted=True))  # fmt: skip
    pool.learner.reward(Reward(request_id=f"{SECRET} 0", reward=2.0))
    pool.bring(2)
    assert pool.work() == 4
    assert pool.training.weighted == [(True, 2.0, [2.0, None])]
    assert (pool.learner.desired.shadow_share, pool.learner.desired.sample_share) == (0.5, 0.1)


# --- lookups, restarts, privacy ---


def test_a_new_drafter_that_looks_tokens_up_is_brought_texts(tmp_path):
    pool = Pool(tmp_path, brings_texts=True, has_study=False)
    pool.heartbeat("first", is_new=True)
    pool.bring(2)
    pool.heartbeat("second", is_new=True)
    pool.heartbeat("second")
    texts = [sample(f"{SECRET} {n}", cache_salt=SECRET) for n in range(2)]
    brought = (Texts(drafter_id="first", samples=()), Texts(drafter_id="second", samples=tuple(texts)))
    assert pool.learner.take_texts() == brought
    assert pool.learner.take_texts() == ()
    assert not pool.learner.has_work()
    assert "look tokens up" in str(pool.ask(Action.PUBLISH, tmp_path).error)
    assert "look tokens up" in str(pool.ask(Action.EXPORT, tmp_path / "out").error)


def test_a_pool_with_weights_is_brought_no_texts(pool):
    pool.heartbeat(is_new=True)
    assert pool.learner.take_texts() == ()


def test_a_learner_that_starts_anew_goes_on_watching(pool):
    pool.publish()
    counters = pool.status
    again = Pool(pool.folder)
    assert (again.learner.phase, again.serving, again.learner.desired.shadow) == (Phase.WATCH, "v1", FIRST_VERSION)
    assert (again.status.num_published, again.status.num_steps) == (counters.num_published, 3)
    assert again.play(0.0, 2.0, 100) == 16
    assert again.serving == "v0"


def test_acceptance_per_version(pool):
    pool.publish()
    counts = VersionCounts(version="v1", num_rounds=10, num_draft_tokens=40, num_named_tokens=20)
    pool.heartbeat("a", versions=(counts,))
    pool.heartbeat("b", versions=(counts,))
    pool.heartbeat("a", versions=(dataclasses.replace(counts, num_rounds=2, num_draft_tokens=8, num_named_tokens=4),))
    record = pool.status.versions[-1]
    assert (record.name, record.is_serving, record.fate) == ("v1", True, "serves")
    assert (record.num_rounds, record.num_draft_tokens, record.num_named_tokens) == (22, 88, 44)


def test_no_text_of_a_request_is_on_disk_or_in_the_status(pool):
    pool.publish()
    pool.play(2.0, 2.0, 1024)
    pool.bring()
    pool.work()
    files = [path for path in (pool.folder / "registry").rglob("*") if path.is_file()]
    assert len(files) == 3
    assert not any(SECRET in path.read_text() for path in files)
    state = json.loads((pool.folder / "registry" / "state.json").read_text())
    assert state.keys() == {"line", "is_watched", "next_number", "fates", "dates", "counters", "origin"}
    assert SECRET not in repr(pool.status)
    assert decode(encode(pool.status), (type(pool.status),)) == pool.status


def test_training_goes_on_during_a_trial_and_the_next_candidate_waits_for_its_end(tmp_path):
    pool = Pool(tmp_path)
    pool.to_trial()
    num_steps = pool.learner.status.num_steps
    pool.bring()
    pool.work()
    assert pool.learner.phase is Phase.TRIAL
    assert pool.learner.status.num_steps == num_steps + SETTINGS.num_steps
    assert pool.learner.status.num_candidates == 1
    pool.play(1.0, 2.0, 200)  # the first is published, and settled
    assert pool.learner.phase is Phase.WATCH
    pool.work()
    assert pool.learner.status.num_candidates == 1
    pool.play(2.0, 1.0, 2000)
    pool.work()
    assert pool.learner.status.num_candidates == 2
    assert pool.training.begun == [None]  # both from one run


@pytest.mark.parametrize("error", [ValueError("a disk is full"), ArithmeticError("the loss is nan")])
def test_an_error_in_training_leaves_the_candidate_its_trial(tmp_path, error):
    pool = Pool(tmp_path)
    pool.to_trial()
    candidate = pool.learner.desired.shadow
    pool.training.losses = [error]
    pool.bring()
    pool.work()
    assert pool.learner.desired.shadow == candidate
    pool.now_s += 100.0
    pool.play(1.0, 2.0, 200)
    assert pool.learner.desired.serving == candidate
