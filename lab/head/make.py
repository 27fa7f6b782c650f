"""Make an EAGLE-3 head for a target on one machine: a corpus of its own answers, training, and what it is served at.

    corpus/          shards of the target's answers, of many streams at once
    head/            the head; head.training/ beside it has the checkpoint to go on from
    figures.json     what each phase did, took and found
    figures.md       the same as tables

Training's own judge plays prompts one after another; here the engine judges, with all of them at once.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from outrider.cluster.common.terminal import show_work
from outrider.cluster.config.known_models import drafter_paths, path_of
from outrider.cluster.offline.llm import LLM
from outrider.drafter_service.service.speculative_config import Method
from outrider.drafter_service.training.corpus_windows import load_corpus
from outrider.drafter_service.training.distil import CHECKPOINT_NAME, DistilOptions, distil_from, pick_device
from outrider.drafter_service.training.eagle3 import Eagle3Shape
from outrider.drafter_service.training.teacher import Teacher
from outrider.drafter_service.training.trainer import Budget, trained_s
from outrider.lab.corpus.generate import CorpusOptions, generate_corpus
from outrider.lab.head.acceptance import ALL, Served, figure, measure
from outrider.lab.head.phases import Phase, Record, run_phases
from outrider.lab.head.report import to_page
from outrider.verifier_service.model.architectures import resolve_folder
from outrider.verifier_service.model.config import ModelConfig

CORPUS_SHARE, TRAINING_SHARE, JUDGING_SHARE = 0.40, 0.42, 0.045  # of the time; judging: of each arm
CLOSING_SHARE = 0.05  # of training's time: the head is saved and held against windows of text
CORPUS_SEED = 1  # other prompts than those of the committed corpora, which have 0
CHECKPOINT_EVERY_S = 20.0
CUDA_KV_BYTES = 8 << 30  # of each engine: room for 256 streams, and for what comes after it
NUM_POSITIONS = 4
ARMS: Mapping[str, Mapping[str, int]] = {"chain": {}, "tree": {"num_tree_nodes": 16}}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSizes:
    """How much of everything."""

    streams: int = 256  # answers that are made at once
    prompts_per_shard: int = 1024  # time is looked at between two shards
    num_tokens: int = 1 << 40  # of the corpus; by default the time ends it
    answer_tokens: int = 256
    rows: int = 64  # windows of a training step
    window: int = 256
    num_steps: int | None = None  # None: the time ends it
    eval_windows: int = 64
    judged_prompts: int = 64
    judged_tokens: int = 96
    judged_streams: int = 64
    kv_bytes: int | None = None  # of every engine; None: CUDA_KV_BYTES on a GPU, on a CPU the engine's own choice


TINY = HeadSizes(
    streams=4,
    prompts_per_shard=8,
    num_tokens=1,  # one shard
    answer_tokens=32,
    rows=2,
    window=128,  # a prompt and some of its answer
    num_steps=3,
    eval_windows=4,
    judged_prompts=3,
    judged_tokens=8,
    judged_streams=2,
    kv_bytes=128 << 20,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """What to make and where. Raises `ValueError` for a device that is not there."""

    model: str  # a folder, a GGUF file, a hub id or a short name
    output: Path
    minutes: float
    sizes: HeadSizes = HeadSizes()
    text: tuple[Path, ...] = ()  # to learn from beside the corpus that is made
    device: str = "auto"
    taps: tuple[int, ...] = ()
    draft_vocab_size: int = Eagle3Shape().draft_vocab_size
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.minutes <= 0:
            raise ValueError(f"minutes must be positive, not {self.minutes:g}")
        pick_device(self.device)

    @property
    def head(self) -> Path:
        return self.output / "head"

    @property
    def corpus(self) -> Path:
        return self.output / "corpus"

    @property
    def engine(self) -> dict[str, Any]:
        """The options of every `LLM`. On a GPU one takes no more memory than it needs: others come after it."""
        usual = CUDA_KV_BYTES if pick_device(self.device).type == "cuda" else None
        return {
            "device": self.device,
            "max_model_len": self.max_model_len,
            "kv_cache_memory_bytes": self.sizes.kv_bytes or usual,
        }

    @property
    def settings(self) -> dict[str, str]:
        """What a start that goes on must have in common with the one before."""
        return {
            "model": self.model,
            "sizes": str(self.sizes),
            "text": ", ".join(map(str, self.text)),
            "taps": str(self.taps),
            "draft_vocab_size": str(self.draft_vocab_size),
        }


def make_head(options: HeadOptions, say: Say, clock: Callable[[], float] = time.monotonic) -> bool:
    """Do all phases that are not done, as far as the time goes; return whether all are done now.

    Raises `ValueError` where the folder has a head of other settings, or an option does not fit the target.
    """
    options.output.mkdir(parents=True, exist_ok=True)
    record = Record.open(options.output / "figures.json", options.settings)

    def after_each() -> None:
        (options.output / "figures.md").write_text(to_page(options.model, record.done))
        _free_memory()

    phases = phases_of(options, clock)
    return run_phases(phases, record, minutes=options.minutes, say=say, clock=clock, after_each=after_each)


def phases_of(options: HeadOptions, clock: Callable[[], float]) -> list[Phase]:
    """Return all phases in their order: the new head is judged before the one that is shipped for the model, if any."""
    sizes = options.sizes
    corpus = f"{sizes.streams} streams answer prompts, up to {sizes.answer_tokens} tokens each"
    training = f"an EAGLE-3 head learns from {sizes.rows} windows of {sizes.window} tokens a step"
    phases = [
        Phase(name="corpus", does=corpus, share=CORPUS_SHARE, work=lambda s: _make_corpus(options, s, clock)),
        Phase(name="training", does=training, share=TRAINING_SHARE, work=lambda s: _train(options, s, clock)),
    ]
    heads = {"new": options.head}
    if (shipped := drafter_paths(options.model).get(Method.EAGLE3)) is not None:
        heads["shipped"] = shipped
    for whose, folder in heads.items():
        phases += [_judging(options, whose, folder, shape) for shape in ARMS]
    return phases


def _make_corpus(options: HeadOptions, limit_s: float, clock: Callable[[], float]) -> dict[str, Any]:
    begin_s, sizes = clock(), options.sizes
    corpus = CorpusOptions(
        output=options.corpus,
        num_tokens=sizes.num_tokens,
        prompts_per_shard=sizes.prompts_per_shard,
        max_tokens=sizes.answer_tokens,
        seed=CORPUS_SEED,
    )
    known = len(list(options.corpus.glob("*.npz")))
    llm = LLM(options.model, speculation="off", max_num_seqs=sizes.streams, **options.engine)
    with llm, show_work("corpus", limit_s) as on_work:
        loaded_s = clock() - begin_s
        num_tokens = generate_corpus(
            llm,
            corpus,
            lambda done: on_work(clock() - begin_s, f"{done:,} tokens"),
            is_over=lambda: clock() - begin_s >= limit_s,
        )
    num_shards = len(list(options.corpus.glob("*.npz")))
    return {
        "result": f"{num_tokens:,} tokens in {num_shards} shards, {known} of them there before",
        "num_tokens": num_tokens,
        "num_shards": num_shards,
        "num_shards_before": known,
        "loaded_s": round(loaded_s, 1),
    }


def _train(options: HeadOptions, limit_s: float, clock: Callable[[], float]) -> dict[str, Any]:
    begin_s, sizes = clock(), options.sizes
    target = resolve_folder(ModelConfig(path=path_of(options.model)))
    tokenizer = AutoTokenizer.from_pretrained(target)
    distil_options = DistilOptions(
        method="eagle3",
        target=target,
        text=(options.corpus, *options.text),
        output=options.head,
        budget=Budget(num_steps=sizes.num_steps, minutes=limit_s / 60),
        device=options.device,
        resume=True,
        rows=sizes.rows,
        window=sizes.window,
        num_positions=NUM_POSITIONS,
        eval_windows=sizes.eval_windows,
        eval_prompts=0,
        checkpoint_every_s=CHECKPOINT_EVERY_S,
        eagle3=Eagle3Shape(draft_vocab_size=options.draft_vocab_size, taps=options.taps),
    )
    corpus = load_corpus(tokenizer, distil_options.text, (), window=sizes.window)
    teacher = Teacher.load(target, pick_device(options.device))
    left_s = max(1.0, limit_s * (1 - CLOSING_SHARE) - (clock() - begin_s))
    minutes = (trained_s(distil_options.work / CHECKPOINT_NAME) + left_s) / 60
    distil_options = replace(distil_options, budget=Budget(num_steps=sizes.num_steps, minutes=minutes))
    with show_work("training", 1.0) as on_work:
        distilled = distil_from(
            distil_options,
            teacher,
            tokenizer,
            corpus,
            lambda report: on_work(report.share_used, f"step {report.step:,}, loss {report.loss:.3f}"),
        )
    first = distilled.acceptance.positions[0].greedy
    epochs = distilled.num_tokens / len(corpus.training)
    return {
        "result": f"{distilled.num_steps:,} steps, {distilled.num_tokens:,} tokens ({epochs:.1f} times the text), "
        f"a first guess right in {first:.0%} of places",
        "num_steps": distilled.num_steps,
        "num_tokens": distilled.num_tokens,
        "num_text_tokens": len(corpus.training),
        "trained_s": round(distilled.elapsed_s, 1),
        "held_out": distilled.acceptance.to_json(),
    }


def _judging(options: HeadOptions, whose: str, head: Path, shape: str) -> Phase:
    sizes, name = options.sizes, f"{whose} head, {shape}"

    def judge(_: float) -> dict[str, Any]:
        config = {"method": Method.EAGLE3.value, "model": str(head), **ARMS[shape]}
        found = measure(
            options.model,
            name,
            config,
            num_prompts=sizes.judged_prompts,
            max_tokens=sizes.judged_tokens,
            concurrency=sizes.judged_streams,
            enforce_eager=True,  # capturing steps takes longer than so few of them
            **options.engine,
        )
        rates = ", ".join(f"{figure(each, ALL)} {each.sampling}" for each in found)
        return {"result": f"tokens per verification: {rates}", "served": [_to_json(each) for each in found]}

    does = f"{sizes.judged_prompts} held-out prompts of {sizes.judged_tokens} tokens are served with it"
    return Phase(name=name, does=does, share=JUDGING_SHARE, work=judge)


def _to_json(served: Served) -> dict[str, Any]:
    rates = {kind: served.tokens_per_verification(kind) for kind in (ALL, *served.by_kind)}
    return asdict(served) | {"tokens_per_verification": rates}


def _free_memory() -> None:
    """Give a closed engine's memory back: what was loaded is kept out of collections until it is said otherwise."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
