"""A service whose verifiers are vLLM's, in vLLM's own environment, as its users start it: tokens, drafts, failures."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fakes.hosted.adapter import write_adapter
from fakes.hosted.vllm_environment import ENVIRONMENT, needs_vllm
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service import embedded
from outrider.verifier_service.model.ranks import free_ports
from outrider.verifier_service.model.tokenizer import load_tokenizer
from services.live_service import LiveService, Streamed, wait_for

START_TIMEOUT_S, MAX_TOKENS = 400.0, 96
PROMPT = "def add(first, second):\n    "

pytestmark = [
    pytest.mark.service,
    pytest.mark.timeout(900),
    needs_vllm,
]


@dataclass(frozen=True)
class VllmService:
    """The command, running, and how to look into it."""

    process: subprocess.Popen[str]
    live: LiveService

    def engines(self) -> list[psutil.Process]:
        """Return vLLM's engine processes, by who has started them: that they get a title is not sure."""
        started = (child for one in self.processes() if "Rank.run" in _title(one) for child in _children(one))
        return [one for one in started if (title := _title(one)) and "resource_tracker" not in title]

    def processes(self) -> list[psutil.Process]:
        """Return all processes that the command has started and that still are."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.live.base_url}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _title(process: psutil.Process) -> str:
    """Return a process's title or command line; "": it is gone."""
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A LoRA adapter's folder, and what the target with it makes of the prompt."""
    target, folder = load_target(), tmp_path_factory.mktemp("adapter")
    write_adapter(folder, target)
    return folder, greedy(target)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, adapted: tuple[Path, str]) -> Iterator[VllmService]:
    http_port, grpc_port = free_ports(2)
    command = [ENVIRONMENT / "bin" / "outrider", "serve", "embedded", "--engine", "vllm", "--failover-timeout-s", "400"]
    command += ["-sc", '{"method": "suffix"}', "--dtype", "float32", "--enforce-eager", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", "200000000", "--max-num-seqs", "8", "--threads-per-rank", "1"]
    command += ["--port", str(http_port), "--grpc-port", str(grpc_port), "--drain-timeout-s", "1"]
    command += ["--engine-timeout-s", "200"]  # vLLM compiles what its first log probabilities need
    command += ["--lora-modules", json.dumps({"poet": str(adapted[0])})]
    log = (tmp_path_factory.mktemp("vllm") / "log").open("w+")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert _is_serving(process), f"{Path(log.name).read_text()[-3000:]}"
        yield VllmService(process, LiveService(ServiceConfig(port=http_port, grpc_port=grpc_port)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=90)
        log.close()


def _is_serving(process: subprocess.Popen[str]) -> bool:
    """Wait for the line that says so; False where the command ended, or took too long."""
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    assert process.stdout is not None
    try:
        return any(line.startswith("serving ") for line in process.stdout)
    finally:
        timer.cancel()


def load_target() -> PreTrainedModel:
    target = AutoModelForCausalLM.from_pretrained(embedded.target_path(), dtype=torch.float32).eval()
    target.generation_config.eos_token_id = None
    return target


def greedy(target: PreTrainedModel) -> str:
    tokenizer = load_tokenizer(ServiceConfig().verifier_spec.model)
    rows = torch.tensor([tokenizer.encode(PROMPT)])
    found = target.generate(rows, max_new_tokens=MAX_TOKENS, do_sample=False, attention_mask=torch.ones_like(rows))
    return tokenizer.decode(found[0, rows.shape[1] :].tolist())


@pytest.fixture(scope="module")
def plain() -> str:
    """What the target makes of the prompt by itself."""
    return greedy(load_target())


def stream(service: VllmService, **body: Any) -> Streamed:
    return service.live.stream(PROMPT, timeout_s=START_TIMEOUT_S, max_tokens=MAX_TOKENS, ignore_eos=True, **body)


def test_tokens_are_the_targets_and_drafts_of_the_pool_are_among_them(service: VllmService, plain: str):
    for _ in range(3):  # look-ups know a text that they have seen
        assert stream(service).text == plain
    wait_for(lambda: service.metric("vllm:spec_decode_num_accepted_tokens_total") > 0, 30.0)
    assert service.metric("outrider_draft_rtt_seconds_count") > 0, "what the plug-in counts is the verifier's, too"


def test_openais_client_is_served_streamed_and_whole(service: VllmService, plain: str):
    client = openai.OpenAI(base_url=f"{service.live.base_url}/v1", api_key="-")
    model = client.models.list().data[0].id
    extra = {"ignore_eos": True}
    whole = client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=16, extra_body=extra)
    chunks = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=16, extra_body=extra, stream=True
    )
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert plain.startswith(whole.choices[0].text)
    assert whole.choices[0].text == streamed
    assert whole.usage.completion_tokens == 16


def test_what_vllm_refuses_names_its_field_and_the_next_request_is_served(service: VllmService, plain: str):
    body = {"model": service.live.config.model.name, "prompt": PROMPT, "min_p": 0.2, "temperature": 1.0}
    answer = httpx.post(f"{service.live.base_url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "min_p" in answer.text
    assert stream(service).text == plain


def test_an_adapter_is_served_by_its_name(service: VllmService, plain: str, adapted: tuple[Path, str]):
    expected = adapted[1]
    assert expected != plain
    for _ in range(2):  # the second time with drafts
        assert stream(service, model="poet").text == expected
    assert stream(service).text == plain
    names = [model["id"] for model in httpx.get(f"{service.live.base_url}/v1/models", timeout=30).json()["data"]]
    assert names == [service.live.config.model.name, "poet"]


def test_log_probabilities_and_forms_come_from_vllm(service: VllmService):
    body = {"model": service.live.config.model.name, "prompt": PROMPT, "temperature": 0, "max_tokens": 4}
    answer = httpx.post(f"{service.live.base_url}/v1/completions", json=body | {"logprobs": 2}, timeout=200).json()
    found = answer["choices"][0]["logprobs"]
    assert len(found["token_logprobs"]) == 4
    assert all(len(likeliest) >= 2 for likeliest in found["top_logprobs"])
    formed = body | {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 8}
    answer = httpx.post(f"{service.live.base_url}/v1/completions", json=formed, timeout=60).json()
    assert answer["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize("killed", ["engine", pytest.param("its host", marks=pytest.mark.soak)])
def test_a_verifier_that_is_killed_costs_a_pause_and_no_token(service: VllmService, plain: str, killed: str):
    """It is the only one: the stream goes on once another has taken its place."""
    wait_for(lambda: len(service.engines()) == 1, START_TIMEOUT_S, seen=lambda: list(map(str, service.processes())))
    (engine,) = service.engines()

    def kill(num_chunks: int) -> None:
        if num_chunks == 2:
            (engine if killed == "engine" else engine.parent()).kill()

    assert stream(service, on_chunk=kill).text == plain
    wait_for(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 30.0)
    assert engine.pid not in {one.pid for one in service.engines()}
