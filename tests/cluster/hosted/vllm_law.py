"""The distribution of vLLM's sampled tokens with drafts from a pool, beside the target's own; prints JSON.

    PYTHONPATH=tests ~/.cache/outrider/vllm-0.32.0/bin/python tests/cluster/hosted/vllm_law.py [v2]

Runs in vLLM's environment. The next token of many unseeded answers that have followed the likeliest path so far, which
is what the pool drafts, is counted beside what the model's probabilities say; then again with a planted defect: point
masses that claim to have been drawn uniformly, which vLLM's rejection sampling then accepts too often.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-0",
}
if sys.argv[1:] == ["v2"]:
    import vllm_v2  # noqa: F401 - it has vLLM run V2 here

import torch
import vllm
from transformers import AutoModelForCausalLM

from fakes.played_pool import PlayedPool
from outrider.drafter_service import embedded

IS_V2 = sys.argv[1:] == ["v2"]
PROMPT = [5, 80, 90, 12, 7, 300, 41, 9]
DEPTHS = (2, 3, 4)  # tokens before it: a session has been opened by then
NUM_SAMPLES, MIN_EXPECTED, TEMPERATURE = 3000, 5.0, 0.7
NUM_EQUAL_REPORTS, REPORT_INTERVAL_S = 6, 0.5


class Target:
    """The model's own probabilities."""

    def __init__(self) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(embedded.target_path(), dtype=torch.float32)
        self.vocab_size: int = self._model.config.vocab_size

    @torch.no_grad()
    def next(self, token_ids: list[int]) -> torch.Tensor:
        return torch.softmax(self._model(torch.tensor([token_ids])).logits[0, -1] / TEMPERATURE, dim=0)


def counts(engine: Any, target: Target, path: list[int]) -> list[tuple[list[int], list[float]]]:
    """Return how often tokens came next on the likeliest path, and how often they should have, by depth."""
    sampling = vllm.SamplingParams(temperature=TEMPERATURE, max_tokens=len(path), ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": PROMPT}] * NUM_SAMPLES, sampling, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    found = []
    for depth in DEPTHS:
        following = Counter(answer[depth] for answer in answers if answer[:depth] == path[:depth])
        count = sum(following.values())
        law = target.next([*PROMPT, *path[:depth]]) * count
        common = [token_id for token_id in range(target.vocab_size) if law[token_id] >= MIN_EXPECTED]
        observed = [following[token_id] for token_id in common]
        expected = [float(law[token_id]) for token_id in common]
        observed.append(count - sum(observed))
        expected.append(max(count - sum(expected), 1e-9))
        found.append((observed, expected))
    return found


def reported_drafts(pool: PlayedPool) -> int:
    """Return how many drafts the plug-in has seen verified, once it reports no more of them."""
    reported = [-1]
    while len(reported) < NUM_EQUAL_REPORTS or len({*reported[-NUM_EQUAL_REPORTS:]}) > 1:
        time.sleep(REPORT_INTERVAL_S)
        (verifier,) = pool.snapshot().verifiers
        reported.append(verifier.report.load.counters.num_drafts)
    return reported[-1]


def plant_v2(engine: Any, num_speculative_tokens: int, vocab_size: int) -> None:
    """Let every draft claim to have been drawn uniformly."""
    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    runner.speculator.draft_logits = torch.zeros(runner.max_num_reqs, num_speculative_tokens, vocab_size)


def plant(num_speculative_tokens: int, vocab_size: int) -> None:
    """Let every draft claim to have been drawn uniformly."""
    from outrider.cluster.hosted.vllm_drafts import Drafts

    honest = Drafts.propose_step

    def lying(self: Drafts, runner: Any, *arguments: Any) -> Any:
        drafts = honest(self, runner, *arguments)
        shape = (len(drafts), num_speculative_tokens, vocab_size)
        runner._draft_probs = torch.full(shape, 1.0 / vocab_size)
        runner._draft_prob_req_ids = list(runner.input_batch.req_ids)
        return drafts

    Drafts.propose_step = lying  # type: ignore[method-assign]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    target = Target()
    path: list[int] = []
    for _ in range(max(DEPTHS) + 2):
        path.append(int(target.next([*PROMPT, *path]).argmax()))
    pool = PlayedPool(target.vocab_size)
    pool.add("knowing", [[*PROMPT, *path]])
    drafting = {"method": "ngram"} if IS_V2 else {"method": "custom_class", "model": "outrider.cluster.vllm.Drafts"}
    configured: dict[str, Any] = {"speculative_config": {**drafting, "num_speculative_tokens": 2}}
    if IS_V2:
        configured["worker_cls"] = "outrider.cluster.vllm.Worker"
    engine = vllm.LLM(
        str(embedded.target_path()),
        dtype="float32",
        max_num_seqs=64,
        max_model_len=64,
        enforce_eager=True,
        additional_config={"outrider": {"pool": pool.address, "speculation": "always", "max_wait_ms": 1000}},
        **configured,
    )
    honest = counts(engine, target, path)
    num_drafts = reported_drafts(pool)
    if IS_V2:
        plant_v2(engine, 2, target.vocab_size)
    else:
        plant(2, target.vocab_size)
    planted = counts(engine, target, path)
    answers.write(json.dumps({"honest": honest, "planted": planted, "num_drafts": num_drafts}))
    answers.flush()
    os._exit(0)  # vLLM leaves threads that do not end


if __name__ == "__main__":
    sys.exit(main())
