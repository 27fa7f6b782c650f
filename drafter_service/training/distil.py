"""One training run: load the target and the text, train, save and evaluate the drafter.

The output folder has the drafter in its public format and the figures; the checkpoint is in `<output>.training/`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from outrider.drafter_service.service.methods import TRAINED
from outrider.drafter_service.training.acceptance import AcceptanceFigures, measure_acceptance
from outrider.drafter_service.training.corpus_windows import Corpus, load_corpus
from outrider.drafter_service.training.dflash import DFlashShape, DFlashStudent
from outrider.drafter_service.training.draft_model import DraftModelStudent, DraftShape
from outrider.drafter_service.training.eagle import eagle_student
from outrider.drafter_service.training.eagle3 import Eagle3Shape, eagle3_student, eagle3_student_from
from outrider.drafter_service.training.medusa import MedusaShape, MedusaStudent
from outrider.drafter_service.training.mlp_speculator import MlpShape, MlpStudent
from outrider.drafter_service.training.mtp import mtp_student
from outrider.drafter_service.training.objectives import Objective
from outrider.drafter_service.training.parallel_draft import ParallelStudent, TidarStudent
from outrider.drafter_service.training.recipe import Phase, Recipe
from outrider.drafter_service.training.served import (
    Continuation,
    Rounds,
    continue_greedily,
    play_greedily,
    serve_greedily,
    served_drafter,
)
from outrider.drafter_service.training.student import TaughtStudent
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.trainer import Budget, StepReport, Trainer

FIGURES_NAME = "acceptance.json"
CHECKPOINT_NAME = "checkpoint.pt"
TRIAL_NAME = "trial"  # the last evaluated drafter, beside the checkpoint
EVAL_NEW_TOKENS = 64  # per held-out prompt
PATIENCE = 2  # training ends after so many falls of the served figure in a row
FINE_TUNING = 0.1  # factor on the learning rates of an existing model
VECTOR_LR_WIDTH = 256  # hidden size at which the embedded pair's rate for embeddings was tuned

OnStep = Callable[[StepReport], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilOptions:
    """The options of a training run."""

    method: str  # one of `TRAINED`
    target: Path
    text: tuple[Path, ...]
    output: Path
    budget: Budget
    objective: Objective = Objective.CE
    held_out: tuple[Path, ...] = ()  # (): the last part of the text
    device: str = "auto"
    resume: bool = False
    rows: int = 16  # windows per step
    window: int = 256
    seed: int = 0
    num_positions: int = 4  # Medusa heads, or steps of other heads; draft positions in the figures
    eval_windows: int = 64
    eval_prompts: int = 16  # held-out prompts to evaluate as served; 0: none, and the last drafter is kept
    judge_every_s: float = 600.0
    matrix_lr: float = 0.04  # of Muon; twice a new model's, since heads start near the target
    checkpoint_every_s: float = 60.0
    init_from: Path | None = None  # a draft model or EAGLE-3 head to fine-tune; tidar: None is the target itself
    rate_scale: float | None = None  # of all learning rates; None: 1 for a new drafter, else FINE_TUNING
    draft: DraftShape = field(default_factory=DraftShape)
    medusa: MedusaShape = field(default_factory=MedusaShape)
    eagle3: Eagle3Shape = field(default_factory=Eagle3Shape)
    mlp: MlpShape = field(default_factory=MlpShape)
    dflash: DFlashShape = field(default_factory=DFlashShape)

    def __post_init__(self) -> None:
        if self.method not in TRAINED:
            raise ValueError(f"method must be one of {', '.join(TRAINED)}, not {self.method}")
        if min(self.rows, self.num_positions, self.eval_windows) < 1 or self.eval_prompts < 0:
            raise ValueError("rows, num_positions and eval_windows must be positive, eval_prompts 0 or more")
        if self.window <= self.num_positions + 1:
            raise ValueError(f"window: {self.window} tokens leave no root for drafts of {self.num_positions}")
        if self.objective is Objective.STREAK and (self.method == "draft-model" or self.num_positions == 1):
            raise ValueError(
                "objective: streak weighs a draft position by the survival of those before it; "
                f"this {self.method} learns one position, which is what ce is for"
            )
        if self.rate_scale is not None and self.rate_scale <= 0:
            raise ValueError(f"rate_scale must be positive, not {self.rate_scale:g}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device must be auto, cpu or cuda, not {self.device}")

    @property
    def work(self) -> Path:
        """The folder of the checkpoint."""
        return self.output.with_name(f"{self.output.name}.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """The result of a run."""

    num_steps: int
    num_tokens: int
    elapsed_s: float
    served: Rounds | None  # on held-out prompts, greedy; None: there are none
    acceptance: AcceptanceFigures


def distil(options: DistilOptions, on_step: OnStep) -> Distilled:
    """Train, or resume training, and write the drafter and its figures.

    Raises:
        ValueError: an option, the text or the target does not fit; the text names which.
        OSError: the target is not found.
    """
    if not (options.target / "config.json").exists():
        raise ValueError(f"target: {options.target} holds no model")
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    corpus = load_corpus(tokenizer, options.text, options.held_out, window=options.window, seed=options.seed)
    teacher = Teacher.load(options.target, pick_device(options.device))
    return distil_from(options, teacher, tokenizer, corpus, on_step)


def distil_from(
    options: DistilOptions, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, corpus: Corpus, on_step: OnStep
) -> Distilled:
    """Do the same with a loaded target and text."""
    student = make_student(options, teacher, tokenizer, corpus)
    trainer = Trainer(
        student=student,
        stream=corpus.training,
        recipe=recipe_for(options, teacher),
        budget=options.budget,
        checkpoint=options.work / CHECKPOINT_NAME,
        settings=_settings(options, corpus),
        objective=options.objective,
    )
    judge = ServedJudge(options, student, teacher, corpus)
    for report in trainer.train(resume=options.resume):
        on_step(replace(report, served=judge.last))
        if judge.judge_if_due(report):
            break
    windows = corpus.held_out.windows(options.window, limit=options.eval_windows)
    distilled = Distilled(
        num_steps=trainer.progress.step,
        num_tokens=trainer.progress.num_tokens,
        elapsed_s=trainer.progress.elapsed_s,
        served=judge.finish(),
        acceptance=measure_acceptance(student, windows.split(options.rows)),
    )
    (options.output / FIGURES_NAME).write_text(json.dumps(to_json(options, distilled), indent=2) + "\n")
    for file in options.output.iterdir():
        file.chmod(0o644)  # safetensors makes its files private
    return distilled


class ServedJudge:
    """Evaluate the drafter on held-out prompts from time to time, and keep the best in the output folder.

    Windows of text overestimate a drafter: served, it drafts the target's own text.
    """

    def __init__(self, options: DistilOptions, student: TaughtStudent, teacher: Teacher, corpus: Corpus) -> None:
        self._options, self._student, self._teacher = options, student, teacher
        self._prompts = corpus.prompts[: options.eval_prompts]
        self._continuations: tuple[Continuation, ...] = ()
        self._best: Rounds | None = None
        self._num_worse = 0
        self._judged_at_s: float | None = None  # None: before the first step
        self._is_judged = False  # the figures are of the present weights
        self.last: float | None = None

    def judge_if_due(self, report: StepReport) -> bool:
        """Evaluate if it is time; return whether the figure has fallen `PATIENCE` times in a row."""
        self._is_judged = False
        if self._judged_at_s is None:
            self._judged_at_s = report.elapsed_s  # of a resumed run: from here
        if report.elapsed_s - self._judged_at_s < self._options.judge_every_s:
            return False
        self._judged_at_s = report.elapsed_s
        self._judge()
        return self._num_worse >= PATIENCE

    def finish(self) -> Rounds | None:
        """Evaluate the last weights; return the best figure, which is the output folder's."""
        if not self._is_judged:
            self._judge()
        return self._best

    def _judge(self) -> None:
        trial = self._options.work / TRIAL_NAME
        self._student.save(trial)
        rounds = self._play(trial)
        self._is_judged = True
        self.last = None if rounds is None else rounds.mean_acceptance_length
        if rounds is None or self._best is None or rounds.mean_acceptance_length >= self._best.mean_acceptance_length:
            self._best, self._num_worse = rounds, 0
            shutil.copytree(trial, self._options.output, dirs_exist_ok=True)
        else:
            self._num_worse += 1

    def _play(self, folder: Path) -> Rounds | None:
        if not self._prompts:
            return None
        if self._options.method == "tidar":  # it drafts for itself alone
            length = self._options.num_positions
            return serve_greedily(folder, self._prompts, num_new_tokens=EVAL_NEW_TOKENS, draft_length=length)
        if not self._continuations:
            self._continuations = continue_greedily(self._teacher, self._prompts, num_new_tokens=EVAL_NEW_TOKENS)
        drafter = served_drafter(self._options.method, folder, self._options.target)
        return play_greedily(self._teacher, drafter, self._continuations, draft_length=self._options.num_positions)


def pick_device(name: str) -> torch.device:
    """Return a device by name; auto: CUDA if there is a GPU. Raises `ValueError` for a missing one."""
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ValueError("device: cuda was asked for, and there is no CUDA device")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def make_student(
    options: DistilOptions, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, corpus: Corpus
) -> TaughtStudent:
    """Create the drafter of the options."""
    num_positions, seed = options.num_positions, options.seed
    match options.method:
        case "draft-model":
            return _draft_model(options, teacher, tokenizer)
        case "medusa":
            return MedusaStudent.create(
                teacher, corpus.training, shape=options.medusa, num_heads=num_positions, seed=seed
            )
        case "mlp-speculator":
            return MlpStudent.create(teacher, shape=options.mlp, num_steps=num_positions, seed=seed)
        case "eagle":
            return eagle_student(teacher, num_positions=num_positions, seed=seed)
        case "eagle3" if options.init_from is not None:
            return eagle3_student_from(options.init_from, teacher, num_positions=num_positions)
        case "eagle3":
            return eagle3_student(
                teacher, corpus.training, shape=options.eagle3, num_positions=num_positions, seed=seed
            )
        case "mtp":
            return mtp_student(teacher, num_positions=num_positions, seed=seed)
        case "parallel-draft":
            return ParallelStudent(_draft_model(options, teacher, tokenizer))
        case "dflash":
            return DFlashStudent.create(
                teacher, corpus.training, shape=options.dflash, num_guesses=num_positions, seed=seed
            )
        case "tidar":
            return TidarStudent.create(
                teacher,
                tokenizer,
                corpus.training,
                num_positions=num_positions,
                seed=seed,
                init_from=options.init_from,
            )
    raise AssertionError(f"{options.method} is in TRAINED, and nothing here makes one")


def _draft_model(
    options: DistilOptions, teacher: Teacher, tokenizer: PreTrainedTokenizerBase
) -> DraftModelStudent[Teacher]:
    num_positions = options.num_positions
    if options.init_from is not None:
        return DraftModelStudent.load(options.init_from, teacher, tokenizer, num_positions=num_positions)
    return DraftModelStudent.create(
        teacher, tokenizer, shape=options.draft, num_positions=num_positions, seed=options.seed
    )


def recipe_for(options: DistilOptions, teacher: Teacher) -> Recipe:
    """Return the embedded pair's recipe with these windows.

    Wide models have a smaller rate for embeddings, and fine-tuned models smaller rates for all. Rates fall from the
    first step on: at full rates an EAGLE-3 head did not improve for hundreds of steps.
    """
    is_new = options.init_from is None and options.method != "tidar"
    scale = options.rate_scale or (1.0 if is_new else FINE_TUNING)
    recipe = Recipe(
        minutes=options.budget.minutes,
        matrix_lr=options.matrix_lr * scale,
        cool_down=1.0,
        phases=(Phase(until=1.0, rows=options.rows, window=options.window),),
        checkpoint_every_s=options.checkpoint_every_s,
        seed=options.seed,
    )
    return replace(recipe, vector_lr=recipe.vector_lr * scale * min(1.0, VECTOR_LR_WIDTH / teacher.hidden_size))


def to_json(options: DistilOptions, distilled: Distilled) -> dict[str, object]:
    """Return the figures and the options behind them."""
    return {
        "method": options.method,
        "objective": options.objective.value,
        "num_steps": distilled.num_steps,
        "num_tokens": distilled.num_tokens,
        "elapsed_s": round(distilled.elapsed_s, 1),
        "window": options.window,
        "served": None if distilled.served is None else distilled.served.to_json(),
        "held_out": distilled.acceptance.to_json(),
    }


def _settings(options: DistilOptions, corpus: Corpus) -> dict[str, str]:
    """Return the settings that a resumed run must not change; the budget may grow."""
    shapes = {
        "draft-model": options.draft,
        "parallel-draft": options.draft,
        "medusa": options.medusa,
        "mlp-speculator": options.mlp,
        "eagle3": options.eagle3,
        "dflash": options.dflash,
    }
    return {
        "method": options.method,
        "objective": options.objective.value,
        "target": str(options.target.resolve()),
        "text": corpus.training.digest(),
        "rows": str(options.rows),
        "window": str(options.window),
        "seed": str(options.seed),
        "matrix_lr": str(options.matrix_lr),
        "rate_scale": str(options.rate_scale),
        "num_positions": str(options.num_positions),
        "shape": str(shapes.get(options.method)),
        "init_from": str(options.init_from),
    }
