"""`make study NAME=poison`: broken weights are published by hand under load; how soon does the service take them back?

A service of the embedded pair whose EAGLE-3 head has a learner that makes no candidates of its own. Clients ask all the
while, each prompt as often as there are poisons, greedily and seeded. Whatever drafts, the answers must be the same.
What a learner itself makes is judged on held-out text first: tests/drafter_service/learning plants the same defects
there.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx
import torch
from safetensors.torch import load_file, save_file

from benchmarks.weights.served_model import Told, in_float32, serving, told
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.cluster.config.known_models import EMBEDDED, drafter_paths
from outrider.drafter_service.embedded import held_out_prompts
from outrider.drafter_service.service.speculative_config import Method
from outrider.lab.bench.pairs import describe_machine
from outrider.lab.same_tokens import Tally, compare, require_same

PLAIN_WIDTH = 140
NUM_CLIENTS, NUM_PROMPTS, MAX_TOKENS = 4, 16, 96
WAIT_S = 120.0
LEARNER = {"min_samples": 1_000_000, "shadow_share": 1.0}
Tensors = dict[str, torch.Tensor]


def _scaled(head: Tensors) -> None:
    for tensor in head.values():
        if tensor.is_floating_point():
            tensor *= 3.0


def _shuffled(head: Tensors) -> None:
    order = torch.randperm(len(head["lm_head.weight"]), generator=torch.Generator().manual_seed(0))
    head["lm_head.weight"] = head["lm_head.weight"][order].contiguous()


def _of_another_layer(head: Tensors) -> None:
    """Read each tap's states where another's are expected."""
    head["fc.weight"] = torch.cat(head["fc.weight"].chunk(3, dim=1)[::-1], dim=1).contiguous()


POISONS: dict[str, Callable[[Tensors], None]] = {
    "weights three times as large": _scaled,
    "vocabulary shuffled": _shuffled,
    "states of another layer": _of_another_layer,
}


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--markdown", "markdown_file", type=click.Path(dir_okay=False, writable=True, path_type=Path))
def poison(markdown_file: Path | None) -> None:
    """Publish broken weights and wait until they are rolled back; fails where a token changes."""
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps({"method": "eagle3"})
        options = ["-sc", config, "--speculation", "always", "--dtype", "float32"]
        with serving("embedded", options, Path(folder) / "plain.log") as http:
            expected = [_answer(http, number) for number in range(NUM_PROMPTS)]
        learner = json.dumps(LEARNER | {"folder": f"{folder}/learner"})
        with serving("embedded", [*options, "--learner", learner], Path(folder) / "learning.log") as http:
            found = list(_rows(http, Path(folder), expected))
    headings = ("published by hand", "rolled back after (s)", "what the learner says", "answers", "changed")
    rows = [[*cells, str(tally.num_answers), str(len(tally.differences))] for cells, tally in found]
    page = "\n".join([f"{describe_machine()}; embedded, eagle3", "", *markdown_table(headings, rows, num_left=1)])
    console_of(PLAIN_WIDTH).print(page, highlight=False)
    if markdown_file is not None:
        markdown_file.write_text(f"{page}\n")
    require_same(*(tally for _, tally in found))


def _rows(http: httpx.Client, folder: Path, expected: list[Told]) -> Iterator[tuple[list[str], Tally]]:
    """Yield each poison with the answers while it was there, beside those of a service that does not learn."""
    _until(lambda: bool(_learner(http)))
    head = Path(str(drafter_paths(EMBEDDED)[Method.EAGLE3]))
    for number, (name, spoil) in enumerate(POISONS.items(), start=1):
        broken = Path(shutil.copytree(head, folder / f"poison{number}"))
        tensors = load_file(broken / "model.safetensors")
        spoil(tensors)
        save_file(tensors, broken / "model.safetensors")
        with _load(http) as answers:
            begin_s = time.monotonic()
            http.post("/v1/learner/publish", json={"folder": str(broken)}).raise_for_status()
            _until(lambda number=number: _learner(http).get("num_rolled_back") == number)
            seconds = time.monotonic() - begin_s
        pairs = [
            answer.beside(expected[prompt], f"{name}, prompt {prompt}", _law(prompt)) for prompt, answer in answers
        ]
        said = re.sub(r"^v\d+ ", "", _learner(http)["last_event"])
        yield [name, f"{seconds:.1f}", said], compare(pairs, in_float32(EMBEDDED))


@contextmanager
def _load(http: httpx.Client) -> Iterator[list[tuple[int, Told]]]:
    """Ask all the while; yields the answers so far, by prompt."""
    answers: list[tuple[int, Told]] = []
    is_over = threading.Event()

    def ask(number: int) -> None:
        while not is_over.is_set():
            answers.append((number % NUM_PROMPTS, _answer(http, number % NUM_PROMPTS)))
            number += NUM_CLIENTS

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        clients = [pool.submit(ask, number) for number in range(NUM_CLIENTS)]
        try:
            yield answers
        finally:
            is_over.set()
        for client in clients:
            client.result()


def _law(number: int) -> dict[str, Any]:
    return {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "seed": number}


def _answer(http: httpx.Client, number: int) -> Told:
    prompts = held_out_prompts()
    body = {"prompt": prompts[number % len(prompts)], "max_tokens": MAX_TOKENS, "ignore_eos": True}
    body |= {"return_token_ids": True, **_law(number)}
    answer = http.post("/v1/completions", json=body)
    answer.raise_for_status()
    return told(answer.json())


def _learner(http: httpx.Client) -> dict[str, Any]:
    found: list[dict[str, Any]] = http.get("/v1/learner").json()["data"]
    return found[0] if found else {}


def _until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise click.ClickException(f"nothing happened within {WAIT_S:g} s")
        time.sleep(0.1)
