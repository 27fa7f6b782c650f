"""`make study NAME=updates`: are answers after new weights those of a server that started with them?

A service of MODEL is asked over SGLang's endpoint, half of the prompts greedily, half seeded. It gets other weights
while it serves: from a folder, back again, and from a trainer's torch.distributed group (gloo). The answers after each
update are compared with those of a service that started with the weights, which must be the same token for token. The
other weights are the model's with seeded noise: most answers change, which the page counts.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.weights.served_model import Told, in_float32, serving
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.cluster.config.known_models import path_of
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.peers.measure import PROMPTS
from outrider.lab.same_tokens import Pair, Tally, compare, num_identical, require_same
from outrider.verifier_service.model.gguf import local_path
from tiny.refits import Trainer, perturb, trainer

PLAIN_WIDTH = 120
NUM_BUCKETS = 4  # of a trainer's update
Answers = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """New weights, and what was answered with them."""

    name: str
    seconds: float  # that it took
    tally: Tally  # beside a service that started with them
    num_unlike: int  # answers that are other ones than those of the other weights

    @property
    def cells(self) -> list[str]:
        counts = (self.tally.num_answers, self.tally.num_identical, self.num_unlike)
        return [self.name, *map(str, counts), f"{self.seconds:.2f}"]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.argument("model", default="smollm2")
@click.option("--noise", default=0.02, show_default=True, help="Of a matrix's own spread, added to every weight.")
@click.option("--num-answers", type=click.IntRange(2), default=384, show_default=True)
@click.option("--max-tokens", type=click.IntRange(1), default=16, show_default=True)
@click.option("--concurrency", type=click.IntRange(1), default=64, show_default=True)
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def updates(
    model: str, noise: float, num_answers: int, max_tokens: int, concurrency: int, markdown_file: Path | None
) -> None:
    """Change a running service's weights and compare its answers; fails where they differ."""
    with tempfile.TemporaryDirectory() as folder:
        old, new = _write_two(path_of(model), Path(folder), noise)
        asks = _asks(num_answers, max_tokens)
        found = list(changes(old, new, asks, concurrency))
    headings = ("weights", "answers", "equal a fresh service's", "unlike the other weights'", "taken in (s)")
    text = "\n".join(markdown_table(headings, [one.cells for one in found], num_left=1))
    page = f"{describe_machine()}; {model}, float32, {max_tokens} tokens an answer, noise {noise:g}\n\n{text}"
    console_of(PLAIN_WIDTH).print(page, highlight=False)
    if markdown_file is not None:
        markdown_file.write_text(f"{page}\n")
    require_same(*(one.tally for one in found))


def changes(old: Path, new: Path, asks: Sequence[dict[str, Any]], concurrency: int) -> Iterator[Update]:
    """Change the weights of a service to and fro; yield each update, held against a service that started with it."""
    with _serving(new) as http:
        of_new = _answers(http, asks, concurrency)
    with _serving(old) as http:
        of_old = _answers(http, asks, concurrency)

        def update(name: str, seconds: float, folder: Path) -> Update:
            own = _answers(http, asks, concurrency)
            fresh, other = (of_new, of_old) if folder == new else (of_old, of_new)
            tally = compare(_pairs(name, asks, own, fresh, folder), in_float32(str(folder)))
            return Update(name=name, seconds=seconds, tally=tally, num_unlike=len(own) - num_identical(own, other))

        yield update("a folder's", _from_folder(http, new), new)
        yield update("back: a folder's", _from_folder(http, old), old)
        with trainer() as training:
            yield update("a trainer's group, gloo", _from_group(http, training, new), new)
        yield update("back: a folder's", _from_folder(http, old), old)


def _pairs(name: str, asks: Sequence[dict[str, Any]], own: Answers, fresh: Answers, folder: Path) -> list[Pair]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    pairs = []
    for ask, given, expected in zip(asks, own, fresh, strict=True):
        prompt, sampling = tokenizer(ask["text"])["input_ids"], ask["sampling_params"]
        law = {"seed": sampling["sampling_seed"], "temperature": sampling["temperature"]}
        one, other = (Told(prompt=prompt, token_ids=token_ids) for token_ids in (given, expected))
        pairs.append(one.beside(other, f"{name}: {ask['text']}", law))
    return pairs


def _write_two(path: str, folder: Path, noise: float) -> tuple[Path, Path]:
    """Write the model and its copy with noise."""
    source = local_path(path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name in ("old", "new"):
        if name == "new":
            perturb(model, noise=noise)
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder / name)
    return folder / "old", folder / "new"


def _asks(num_answers: int, max_tokens: int) -> list[dict[str, Any]]:
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    laws: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0})
    return [
        {
            "text": f"{index // 2}. {prompts[index // 2 % len(prompts)]}",
            "sampling_params": {**laws[index % 2], "sampling_seed": index, "max_new_tokens": max_tokens},
        }
        for index in range(num_answers)
    ]


@contextlib.contextmanager
def _serving(model: Path) -> Iterator[httpx.Client]:
    """Serve a model, with look-ups; yields a client."""
    with serving(str(model), ["--rollouts", "--dtype", "float32"], model / "serve.log") as http:
        yield http


def _answers(http: httpx.Client, asks: Sequence[dict[str, Any]], concurrency: int) -> Answers:
    def ask(body: dict[str, Any]) -> list[int]:
        return _post(http, "/generate", body)["output_ids"]

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, asks))


def _from_folder(http: httpx.Client, folder: Path) -> float:
    begin_s = time.monotonic()
    _post(http, "/update_weights_from_disk", {"model_path": str(folder)})
    return time.monotonic() - begin_s


def _from_group(http: httpx.Client, training: Trainer, folder: Path) -> float:
    """Do as slime does: pause, flush, buckets, go on."""
    joining = training.joins()
    fields = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
    _post(http, "/init_weights_update_group", {name: getattr(joining, name) for name in fields})
    begin_s = time.monotonic()
    _post(http, "/pause_generation", {})
    http.get("/flush_cache").raise_for_status()
    for names in training.buckets(str(folder), NUM_BUCKETS):
        message = training.sends(str(folder), names)
        body = {"names": message.names, "dtypes": message.dtypes, "shapes": message.shapes}
        _post(http, "/update_weights_from_distributed", {**body, "group_name": joining.group_name})
    _post(http, "/continue_generation", {})
    seconds = time.monotonic() - begin_s
    _post(http, "/destroy_weights_update_group", {"group_name": joining.group_name})
    return seconds


def _post(http: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = http.post(path, json=body)
    if answer.is_error:
        raise click.ClickException(f"{path}: {answer.status_code} {answer.text}")
    return answer.json()
