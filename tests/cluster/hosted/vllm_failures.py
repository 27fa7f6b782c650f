"""What happens to vLLM's streams when its drafters fail: every failure many times, in vLLM's own environment.

    PYTHONPATH=tests ~/.cache/outrider/vllm-0.32.0/bin/python tests/cluster/hosted/vllm_failures.py

The embedded target in fp32, four streams, drafters that know what comes next until they fail in mid-stream.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from fakes.played_pool import KnowingDrafter, Mood, PlayedPool
from fakes.tcp_proxy import TcpProxy
from outrider.cluster.common.terminal import markdown_table
from outrider.drafter_service import embedded
from outrider.lab.report import describe_machine

VOCAB_SIZE, PROMPT_LENGTH, MAX_TOKENS, NUM_STREAMS = 2048, 24, 96, 4
FAIL_AT_STEP = 8
HUNG_S = 30.0
SETTLE_S = 0.6  # until drafts flow again after what the last run did


@dataclass(slots=True)
class Streams:
    """One run of all prompts at once."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    longest_pause_s: float = 0.0
    num_steps: int = 0
    is_hung: bool = False


def run(engine: Any, prompts: list[list[int]], on_step: Callable[[int], None] = lambda step: None) -> Streams:
    """Have vLLM answer the prompts, step by step; `on_step` is told the number of each step that has ended."""
    import vllm

    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    streams = Streams()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{index}-{time.monotonic_ns()}", {"prompt_token_ids": prompt}, sampling)
    begin_s = last_s = time.monotonic()
    while engine.has_unfinished_requests():
        for output in engine.step():
            streams.token_ids[output.request_id.partition("-")[0]] = list(output.outputs[0].token_ids)
        now_s = time.monotonic()
        streams.longest_pause_s, last_s = max(streams.longest_pause_s, now_s - last_s), now_s
        streams.num_steps += 1
        on_step(streams.num_steps)
        if now_s - begin_s > HUNG_S:
            streams.is_hung = True
            break
    return streams


class Failures:
    """A pool of two drafters behind proxies, and what can become of them."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._texts = texts
        self.pool = PlayedPool(VOCAB_SIZE)
        self._proxies: dict[str, TcpProxy] = {}
        for name in ("a", "b"):
            self._add(name)

    def _add(self, name: str) -> None:
        self.pool.add(name, self._texts, via=self._proxy)

    def _proxy(self, endpoint: str) -> str:
        proxy = TcpProxy(endpoint)
        self._proxies[endpoint] = proxy
        return proxy.address

    @property
    def _drafters(self) -> list[KnowingDrafter]:
        return list(self.pool.drafters.values())

    def mood(self, mood: Mood) -> None:
        for drafter in self._drafters:
            drafter.mood = mood

    def each_proxy(self, act: Callable[[TcpProxy], None]) -> None:
        for proxy in self._proxies.values():
            act(proxy)

    def kill(self) -> None:
        for name in list(self.pool.drafters):
            self.pool.kill(name)

    def scale(self, step: int) -> None:
        """Scale from two by way of three and none to one, while the streams go on."""
        match step:
            case 8:
                self._add("c")
            case 16:
                self.kill()
            case 24:
                self._add("d")

    def restore(self) -> None:
        self.each_proxy(TcpProxy.heal)
        self.mood(Mood.GOOD)
        for name in {"c", "d"} & self.pool.drafters.keys():
            self.pool.kill(name)
        for name in {"a", "b"} - self.pool.drafters.keys():
            self._add(name)


def failures(play: Failures) -> dict[str, Callable[[int], None]]:
    """Return what happens after each step, by the failure's name."""

    def once(act: Callable[[], None]) -> Callable[[int], None]:
        return lambda step: act() if step == FAIL_AT_STEP else None

    moods = {
        f"drafters {mood.value}": once(lambda mood=mood: play.mood(mood))
        for mood in (Mood.SLOW, Mood.SILENT, Mood.WRONG, Mood.GARBAGE, Mood.TOO_LONG, Mood.FORGETFUL)
    }
    return {
        "nothing": lambda step: None,
        "drafters killed": once(play.kill),
        "drafters frozen": once(lambda: play.each_proxy(TcpProxy.lose_packets)),
        **moods,
        "links cut": once(lambda: play.each_proxy(TcpProxy.cut)),
        "pool scaled 2, 3, 0, 1": play.scale,
    }


@click.command()
@click.option("--repeats", type=int, default=20, show_default=True)
@click.option("--markdown", "page", type=click.Path(dir_okay=False, path_type=Path))
def main(repeats: int, page: Path | None) -> None:
    """Print a table of failures: what they cost vLLM's streams."""
    import vllm

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0-0"
    options: dict[str, Any] = {
        "model": str(embedded.target_path()),
        "dtype": "float32",
        "max_num_seqs": 8,
        "max_model_len": 256,
        "enforce_eager": True,
    }
    rng = random.Random(5)
    prompts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(PROMPT_LENGTH)] for _ in range(NUM_STREAMS)]
    plain = run(vllm.LLM(**options).llm_engine, prompts)
    texts = [prompt + plain.token_ids[str(index)] for index, prompt in enumerate(prompts)]
    play = Failures(texts)
    engine = vllm.LLM(
        **options,
        speculative_config={
            "method": "custom_class",
            "model": "outrider.cluster.vllm.Drafts",
            "num_speculative_tokens": 6,
        },
        additional_config={"outrider": {"pool": play.pool.address, "speculation": "always"}},
    ).llm_engine
    for _ in range(4):  # links come up, and deadlines are known
        run(engine, prompts)
    rows = []
    for name, on_step in failures(play).items():
        runs = []
        for _ in range(repeats):
            runs.append(run(engine, prompts, on_step))
            play.restore()
            time.sleep(SETTLE_S)
            run(engine, prompts[:1])
        changed = sum(one.token_ids != plain.token_ids for one in runs if not one.is_hung)
        lost = sum(any(len(text) < MAX_TOKENS for text in one.token_ids.values()) for one in runs if not one.is_hung)
        pauses = [one.longest_pause_s for one in runs]
        steps = sorted(one.num_steps for one in runs)[len(runs) // 2]
        hung = sum(one.is_hung for one in runs)
        rows.append([name, str(len(runs)), *map(str, (hung, lost, changed)), f"{max(pauses):.2f} s", str(steps)])
        click.echo(rows[-1])
    headings = ["failure", "runs", "hung", "lost", "changed", "longest pause", "steps, median"]
    text = "\n".join([str(describe_machine()), "", *markdown_table(headings, rows, num_left=1)])
    click.echo(text)
    if page is not None:
        page.write_text(text + "\n")
    play.pool.close()
    os._exit(0)  # vLLM leaves threads that do not end


if __name__ == "__main__":
    main()
