"""The learner of one pool: what it collects, when it trains, and which weights the pool's drafters serve.

    collecting ─> training ─> judged on held-out samples ─> trial in the shadow ─> publish ─> watch ─┐
        └──────────^   └─────────── refused ───────────────────────┘     rolled back, or settled ────┘

Training for the next candidate goes on during a trial and a watch.

Sans I/O but for the versions' folder: messages come in by `heartbeat`, `handle`, `reward` and `change_settings`; `step`
does the next bounded piece of work; `desired` and `status` are what to tell. One thread at a time calls it; another may
read `status` meanwhile.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from outrider.drafter_service.engine.learning_messages import VersionCounts
from outrider.drafter_service.learning.learner_status import LearnerLog, records
from outrider.drafter_service.learning.messages import (
    Action,
    Answer,
    Ask,
    DesiredState,
    DrafterVersion,
    Heartbeat,
    LearnerSettings,
    LearnerStatus,
    Phase,
    Reward,
    Texts,
)
from outrider.drafter_service.learning.online_training import OnlineTraining
from outrider.drafter_service.learning.reservoir import Reservoir
from outrider.drafter_service.learning.totals import Totals
from outrider.drafter_service.learning.verdict import MAX_TRIAL_ROUNDS, MAX_WATCH_ROUNDS, Score, Trial, Verdict
from outrider.drafter_service.learning.version_registry import VersionRegistry
from outrider.verifier_service.folders import require_below

MAX_REFUSALS = 3  # in a row; then training begins anew from what serves
MAX_TEXT_TOKENS = 500_000  # that a new drafter remembers: as many as a suffix tree has room for
FRESH_SHARE = 0.25  # of `min_samples`, new for every candidate: the same text again would be learned by heart
MAX_PASSES = 2  # over the kept samples, for one candidate: more of them learn the text by heart
RETRY_S = 1.0  # after a step that found nothing to learn from
ERROR_RETRY_S = 60.0  # after an error, as of a full disk


class Learner:
    """The cycle of one pool's learner."""

    def __init__(
        self,
        *,
        pool: str,
        registry: VersionRegistry,
        reservoir: Reservoir,
        training: OnlineTraining | None,
        settings: LearnerSettings,
        brings_texts: bool,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float],
        export_root: Path,
        weights_root: str | None = None,
    ) -> None:
        """Without `training` there are no weights to train. `brings_texts`: new drafters are brought the kept texts.

        Exports lie below `export_root`, what is published by hand below `weights_root`; None: anywhere.
        """
        self._export_root, self._weights_root = export_root, weights_root
        self._pool, self._registry, self._reservoir, self._training = pool, registry, reservoir, training
        self._settings, self._brings_texts = settings, brings_texts
        self._clock, self._cpu_clock = clock, cpu_clock
        self._log = LearnerLog(registry)
        self._totals: Totals[VersionCounts] = Totals()  # by version
        self._texts: list[Texts] = []
        self._is_paused = False
        self._has_begun = False  # the student is warm
        self._num_steps_left: int | None = None  # to the next candidate; None: collecting
        self._candidate: DrafterVersion | None = None
        self._trial: Trial | None = None  # of the candidate, or of the version that is watched
        self._num_refusals = 0  # in a row
        self._num_seen_before = 0  # samples that had come when training for the last candidate began
        self._not_before_s = 0.0
        if registry.is_watched:
            self._begin_watch()

    # --- what comes in ---

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """Take what a drafter brings."""
        for sample in heartbeat.samples:
            self._reservoir.add(sample)
        self._log.num_dropped += heartbeat.num_dropped
        for counts in heartbeat.versions:
            self._totals.take(heartbeat.drafter_id, counts.version, counts)
        if heartbeat.is_new and self._brings_texts:
            texts = self._reservoir.texts(MAX_TEXT_TOKENS)
            self._texts.append(Texts(drafter_id=heartbeat.drafter_id, samples=texts))
        self._take_errors(heartbeat)
        if heartbeat.trial is not None and self._trial is not None:
            self._trial.take(heartbeat.drafter_id, heartbeat.trial)
            self._look(self._trial)

    def reward(self, message: Reward) -> None:
        """Take a trainer's reward. Raises `ValueError` for one that is not finite."""
        self._reservoir.reward(message.request_id, message.reward)

    def change_settings(self, settings: LearnerSettings) -> None:
        self._settings = settings

    def handle(self, ask: Ask) -> Answer:
        """Do what an operator asks; may take as long as loading and copying the drafter."""
        try:
            return Answer(call_id=ask.call_id, text=self._do(ask))
        except (ValueError, OSError) as error:
            return Answer(call_id=ask.call_id, error=str(error) or repr(error))

    # --- what goes out ---

    @property
    def desired(self) -> DesiredState:
        """What drafters shall do from now on."""
        shadow = self._shadow
        return DesiredState(
            serving=self._registry.serving,
            shadow=shadow,
            shadow_share=self._settings.shadow_share if shadow is not None else 0.0,
            sample_share=self._settings.sample_share,
        )

    @property
    def status(self) -> LearnerStatus:
        """What the learner is at; no text of any request."""
        return LearnerStatus(
            pool=self._pool,
            phase=self.phase,
            serving=self._registry.serving.name,
            num_samples=len(self._reservoir),
            num_bytes=self._reservoir.num_bytes,
            num_seen=self._reservoir.num_seen,
            versions=records(self._registry, self._totals),
            **self._log.fields,
        )

    @property
    def phase(self) -> Phase:
        if self._is_paused:
            return Phase.PAUSED
        if self._trial is not None:
            return Phase.WATCH if self._registry.is_watched else Phase.TRIAL
        return Phase.COLLECTING if self._num_steps_left is None else Phase.TRAINING

    def take_texts(self) -> tuple[Texts, ...]:
        """Return the texts for drafters that were new since the last call."""
        texts, self._texts = tuple(self._texts), []
        return texts

    def check_integrity(self) -> None:
        """Raise `AssertionError` if books differ."""
        self._reservoir.check_integrity()
        assert self._candidate is None or not self._registry.is_watched, "a candidate while a version is watched"

    # --- the work ---

    def has_work(self) -> bool:
        """Return whether `step` has something to do now."""
        if self._training is None or self._is_paused or self._clock() < self._not_before_s:
            return False
        if self._trial is not None and self._num_steps_left == 0:
            return False  # the next candidate waits until this one is served or refused
        if self._num_steps_left is None:
            least = max(1, self._settings.min_samples)
            num_fresh = self._reservoir.num_seen - self._num_seen_before
            return num_fresh >= least * FRESH_SHARE and len(self._reservoir.training()) >= least
        return True

    def step(self) -> None:
        """Do the next piece of work: begin, train one step, write the candidate, or judge it."""
        if not self.has_work():
            return
        assert self._training is not None
        before_s = self._cpu_clock()
        try:
            self._advance(self._training)
        except ArithmeticError as error:
            self._begin_anew(f"training began anew: {error}")
        except (ValueError, OSError) as error:
            if self._candidate is not None and self._trial is None:
                self._refuse(self._candidate, str(error))
            self._log.last_event = f"an error, and a pause of {ERROR_RETRY_S:.0f} s: {error}"
            self._not_before_s = self._clock() + ERROR_RETRY_S
        self._log.add_train_s(self._cpu_clock() - before_s)

    def _advance(self, training: OnlineTraining) -> None:
        if not self._has_begun:
            serving = self._registry.serving.folder
            training.begin(Path(serving) if serving else None)
            self._has_begun = True
        if self._num_steps_left is None:
            kept = self._reservoir.training(self._settings.min_samples)
            self._num_steps_left = min(self._settings.num_steps, -(-MAX_PASSES * len(kept) // training.rows))
            self._num_seen_before = self._reservoir.num_seen
        elif self._num_steps_left > 0:
            self._train(training)
        elif self._candidate is None:
            self._candidate = self._registry.add(training.save)
            self._log.count("num_candidates")
        else:
            self._judge(training, self._candidate)

    def _train(self, training: OnlineTraining) -> None:
        kept = self._reservoir.training(self._settings.min_samples)
        weighted = self._settings.reward_weighted
        loss = training.step(kept, rate_scale=self._settings.rate_scale, is_weighted=weighted)
        if loss is None:
            self._not_before_s = self._clock() + RETRY_S
            self._log.last_event = "no sample has what this drafter learns from"
            return
        self._log.took_step(loss)
        assert self._num_steps_left is not None
        self._num_steps_left -= 1

    def _judge(self, training: OnlineTraining, candidate: DrafterVersion) -> None:
        serving = self._registry.serving
        folder = Path(serving.folder) if serving.folder else None
        ours, theirs = training.judge(Path(candidate.folder), folder, self._reservoir.held_out())
        if ours.num_roots and ours.is_worse_than(theirs):
            self._refuse(
                candidate,
                f"on held-out text {ours.chain_length:.2f} tokens agree against {theirs.chain_length:.2f}, "
                f"loss {ours.loss:.3g} against {theirs.loss:.3g}",
            )
            return
        self._trial = Trial(
            serving=serving.name, shadow=candidate.name, candidate=candidate.name, max_rounds=MAX_TRIAL_ROUNDS
        )
        self._num_steps_left = None  # training goes on meanwhile, for the next candidate
        self._log.last_event = f"{candidate.name} drafts in the shadow of {serving.name}"

    # --- trial and watch ---

    @property
    def _shadow(self) -> DrafterVersion | None:
        trial = self._trial
        if trial is None or (self._is_paused and not self._registry.is_watched):
            return None
        return self._registry.version(trial.shadow)

    def _look(self, trial: Trial) -> None:
        outcome, score = trial.look()
        if self._registry.is_watched:
            self._end_watch(outcome, score)
        elif not self._is_paused:
            self._end_trial(outcome, score)

    def _end_trial(self, outcome: Verdict, score: Score) -> None:
        assert self._candidate is not None
        match outcome:
            case Verdict.WINS:
                self._publish(self._candidate, f"{self._candidate.name} serves: in the shadow {score}")
            case Verdict.LOSES:
                self._refuse(self._candidate, f"in the shadow {score}")
            case Verdict.DRAW:
                self._refuse(self._candidate, f"no better than noise in the shadow, {score}")

    def _end_watch(self, outcome: Verdict, score: Score) -> None:
        match outcome:
            case Verdict.LOSES:
                self._roll_back(f"rolled back: {score}")
            case Verdict.WINS | Verdict.DRAW:
                self._settle(f"{self._registry.serving.name} stays: {score}")

    def _publish(self, candidate: DrafterVersion, event: str) -> None:
        self._registry.publish(candidate.name)
        self._candidate, self._num_refusals = None, 0
        self._totals.keep(self._registry.fates)
        self._log.count("num_published")
        self._log.last_event = event
        self._begin_watch()

    def _begin_watch(self) -> None:
        serving, predecessor = self._registry.serving, self._registry.predecessor
        assert predecessor is not None
        self._trial = Trial(
            serving=serving.name, shadow=predecessor.name, candidate=serving.name, max_rounds=MAX_WATCH_ROUNDS
        )

    def _settle(self, event: str) -> None:
        self._registry.settle()
        self._trial, self._log.last_event = None, event

    def _roll_back(self, fate: str) -> None:
        """Serve the version before, and train from it. Raises `ValueError` if there is none."""
        name = self._registry.serving.name
        self._registry.roll_back(fate)
        self._give_up("its predecessor was rolled back")
        self._trial = None
        self._log.count("num_rolled_back")
        self._begin_anew(f"{name} {fate}")

    def _refuse(self, candidate: DrafterVersion, reason: str) -> None:
        self._registry.refuse(candidate.name, f"refused: {reason}")
        if self._trial is None:  # it was just written
            self._num_steps_left = None
        self._candidate = self._trial = None
        self._log.count("num_refused")
        self._log.last_event = f"{candidate.name} was refused: {reason}"
        self._num_refusals += 1
        if self._num_refusals >= MAX_REFUSALS:
            self._begin_anew(f"{self._log.last_event}; training begins anew")

    def _give_up(self, reason: str) -> None:
        """Drop the candidate, if there is one."""
        if self._candidate is not None:
            self._registry.refuse(self._candidate.name, f"given up: {reason}")
            self._candidate = self._trial = None

    def _begin_anew(self, event: str) -> None:
        """Train from what serves from the next step on; a candidate that has its trial keeps it."""
        if self._trial is None:
            self._give_up("training began anew")
        self._has_begun, self._num_steps_left, self._num_refusals = False, None, 0
        self._log.last_event = event

    def _take_errors(self, heartbeat: Heartbeat) -> None:
        """Give up the version that a drafter could not take; an error about another version is old news."""
        serving, shadow = self._registry.serving.name, self._shadow
        if heartbeat.serving_error and (heartbeat.wanted or serving) == serving and heartbeat.serving != serving:
            if self._registry.predecessor is None:
                self._log.last_event = f"{heartbeat.drafter_id} could not take {serving}: {heartbeat.serving_error}"
            else:
                self._roll_back(f"rolled back: {heartbeat.drafter_id} could not take it: {heartbeat.serving_error}")
        elif heartbeat.shadow_error and shadow is not None and (heartbeat.shadow or shadow.name) == shadow.name:
            if self._candidate is not None:
                self._refuse(self._candidate, f"{heartbeat.drafter_id} could not load it: {heartbeat.shadow_error}")
            else:
                reason = f"{heartbeat.drafter_id} could not load {shadow.name}: {heartbeat.shadow_error}"
                self._settle(f"{serving} is watched no longer: {reason}")

    # --- operators ---

    def _do(self, ask: Ask) -> str:
        match ask.action:
            case Action.PAUSE:
                self._is_paused = True
                return "no more training, no trials; a version that is watched stays so"
            case Action.RESUME:
                self._is_paused = False
                return f"goes on: {self.phase}"
            case Action.ROLLBACK:
                name = self._registry.serving.name
                self._roll_back("rolled back: by hand")
                return f"{self._registry.serving.name} serves instead of {name}"
            case Action.PUBLISH:
                return self._publish_by_hand(Path(ask.folder))
            case Action.EXPORT:
                return self._export(Path(ask.folder))

    def _publish_by_hand(self, folder: Path) -> str:
        """Serve a folder without trial; it is watched like any other."""
        if self._training is None:
            raise ValueError("this pool's drafters look tokens up: they have no weights")
        training = self._training
        if self._weights_root is not None:
            require_below(str(folder), self._weights_root, "folder")
        version = self._registry.add(lambda fresh: training.take(folder, fresh))
        self._give_up("another version was published by hand")
        self._has_begun, self._num_steps_left = False, None  # the next candidate is trained from what serves then
        self._publish(version, f"{version.name} serves: published by hand")
        return f"{version.name} serves, and is watched"

    def _export(self, folder: Path) -> str:
        if self._training is None:
            raise ValueError("this pool's drafters look tokens up: they have no weights")
        root = self._export_root.resolve()
        to = (root / folder).resolve()
        if to == root or not to.is_relative_to(root):
            raise ValueError(f"folder: {folder} does not lie below {root}, the learner's export_root")
        if to.exists():
            raise ValueError(f"{to} exists")
        serving = self._registry.serving
        partial = to.with_name(f".{to.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was broken off
        shutil.copytree(serving.folder or self._training.first_folder(), partial)
        partial.rename(to)
        return f"{serving.name} was copied to {to}"
