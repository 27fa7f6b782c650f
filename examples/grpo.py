"""GRPO in miniature: a policy learns with torch and transformers, and Outrider samples it, with or without drafts.

    python examples/grpo.py                                # the embedded target, sampled in this process
    python examples/grpo.py --model smollm2 --lr 1e-4
    python examples/grpo.py --url http://127.0.0.1:8000    # a server beside it: outrider serve embedded --rollouts

Every step samples groups of answers, rewards them, takes gradient steps on the clipped objective of GRPO (Shao et al.
2024) with the log probabilities that the tokens were drawn with, and gives the new weights to the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from outrider.cluster import RolloutEngine, SamplingParams
from outrider.cluster.config.known_models import path_of
from outrider.verifier_service.formats.gguf import local_path

PROMPTS = ["def read_lines(path):\n", "class Stack:\n", "import os\n", "def test_add():\n"]
QUESTIONS = ["Tell me about rain.", "Describe a cat.", "What is bread?", "Name some trees."]
CLIP = 0.2  # of the ratio of new to old probability
KV_BYTES = 1 << 30  # the rest of the memory is the trainer's
LOOK_UPS = {"method": "suffix", "location": "verifier"}


@dataclass(frozen=True)
class Sample:
    """One answer to a prompt, as the policy drew it."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]  # of the law that each token was drawn from
    text: str
    num_accepted: int  # of the tokens: drafted, and found right


class Rollouts(Protocol):
    """What a trainer needs of an engine."""

    def sample(self, prompts: Sequence[list[int]], n: int, sampling: dict[str, Any]) -> list[Sample]:
        """Return `n` answers to each prompt, in order. `sampling`: temperature, max_tokens, seed."""
        ...

    def update(self, policy: PreTrainedModel, version: str) -> None:
        """Take the policy's weights."""
        ...


class InProcess:
    """Outrider's engine on a thread of this process."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def sample(self, prompts: Sequence[list[int]], n: int, sampling: dict[str, Any]) -> list[Sample]:
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        return [
            Sample(
                prompt_ids=list(each.prompt_token_ids),
                token_ids=list(each.token_ids),
                logprobs=list(each.logprobs),
                text=each.text,
                num_accepted=each.metrics.num_accepted_tokens,
            )
            for each in self._engine.generate_all(asked, n, SamplingParams(**sampling))
        ]

    def update(self, policy: PreTrainedModel, version: str) -> None:
        asyncio.run(self._engine.update_weights(policy.named_parameters(), version))


class SglangClient:
    """A server, by SGLang's native endpoints; it reads weights from a folder that both can reach."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self._url, self._api_key = url.rstrip("/"), api_key

    def sample(self, prompts: Sequence[list[int]], n: int, sampling: dict[str, Any]) -> list[Sample]:
        params = {
            "temperature": sampling["temperature"],
            "max_new_tokens": sampling["max_tokens"],
            "sampling_seed": sampling["seed"],
            "n": n,
        }
        body = {"input_ids": list(prompts), "sampling_params": params, "return_logprob": True}
        return [
            Sample(
                prompt_ids=prompts[place // n],
                token_ids=answer["output_ids"],
                logprobs=[logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]],
                text=answer["text"],
                num_accepted=answer["meta_info"].get("spec_accept_token_num", 0),
            )
            for place, answer in enumerate(self._post("/generate", body))
        ]

    def update(self, policy: PreTrainedModel, version: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            policy.save_pretrained(folder)
            self._post("/pause_generation", {"mode": "in_place"})
            try:
                self._post("/update_weights_from_disk", {"model_path": folder, "weight_version": version})
            finally:
                self._post("/continue_generation", {})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)


def reward(text: str) -> float:
    """Return the share of lower-case letters: anyone can check it, and a policy soon learns it."""
    return sum(letter.islower() for letter in text) / max(1, len(text))


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return each reward's distance from its group's mean in standard deviations: [num_groups, n]."""
    return (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-4)


def token_logprobs(policy: PreTrainedModel, sample: Sample, temperature: float) -> torch.Tensor:
    """Return the policy's own log probabilities of a sample's tokens: [num_tokens]."""
    ids = torch.tensor([sample.prompt_ids + sample.token_ids])
    logits = policy(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1].float()
    laws = torch.log_softmax(logits / temperature, dim=-1)  # [num_tokens, vocab_size]
    return laws.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]


def learn(
    policy: PreTrainedModel, optimizer: torch.optim.Optimizer, samples: list[Sample], gains: list[float], t: float
) -> float:
    """Take one step on the clipped objective; return the largest difference of log probabilities before it."""
    optimizer.zero_grad()
    largest = 0.0
    for sample, gain in zip(samples, gains, strict=True):
        drawn, own = torch.tensor(sample.logprobs), token_logprobs(policy, sample, t)
        largest = max(largest, (own - drawn).abs().max().item())
        ratio = torch.exp(own - drawn)
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        loss = -torch.minimum(ratio * gain, clipped * gain).mean() / len(samples)
        loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return largest


def train(policy: PreTrainedModel, prompts: list[list[int]], rollouts: Rollouts, options: argparse.Namespace) -> None:
    """Train the policy; print a line for each step."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.lr, weight_decay=0.0)
    print("step  rollout s  reward  tokens per verification  logprob difference  update s")
    for step in range(options.steps):
        sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens, "seed": options.seed + step}
        began_s = time.perf_counter()
        samples = rollouts.sample(prompts, options.n, sampling)
        rollout_s = time.perf_counter() - began_s
        rewards = torch.tensor([reward(sample.text) for sample in samples]).view(-1, options.n)
        gains = advantages(rewards).flatten().tolist()
        # the first epoch begins with the weights that the engine has: the difference is rounding
        difference, *_ = [learn(policy, optimizer, samples, gains, options.temperature) for _ in range(options.epochs)]
        began_s = time.perf_counter()
        rollouts.update(policy, f"step {step + 1}")
        update_s = time.perf_counter() - began_s
        num_tokens = sum(len(sample.token_ids) for sample in samples)
        num_steps = num_tokens - sum(sample.num_accepted for sample in samples)
        print(
            f"{step + 1:4}  {rollout_s:9.2f}  {rewards.mean():6.3f}  {num_tokens / num_steps:23.2f}  "
            f"{difference:18.1e}  {update_s:8.2f}",
            flush=True,
        )


def tokenised(tokenizer: Any) -> list[list[int]]:
    """Return the prompts' tokens: questions for a model that chats."""
    if tokenizer.chat_template is None:
        return [tokenizer.encode(text) for text in PROMPTS]
    chats = [[{"role": "user", "content": text}] for text in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO with samples from Outrider")
    parser.add_argument("--model", default="embedded", help="a folder, a GGUF file, embedded or smollm2")
    parser.add_argument("--url", help="of a server of the same model; without: the engine runs in this process")
    parser.add_argument("--api-key")
    parser.add_argument(
        "--speculation",
        choices=("off", "suffix", "always"),
        default="suffix",
        help="look-ups of the engine here: where they pay (suffix), or always; a server has options of its own",
    )
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2, help="gradient steps on the samples of a step")
    parser.add_argument("--n", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--lr", type=float, default=3e-3, help="for the embedded target; 1e-4 for smollm2")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    checkpoint = local_path(path_of(options.model))  # a GGUF file as a folder
    policy = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompts = tokenised(AutoTokenizer.from_pretrained(checkpoint))
    if options.url is not None:
        train(policy, prompts, SglangClient(options.url, options.api_key), options)
        return
    mode = "auto" if options.speculation == "suffix" else options.speculation
    sizes = {"kv_cache_memory_bytes": KV_BYTES, "dtype": "float32"}
    with RolloutEngine(checkpoint, speculative_config=LOOK_UPS, speculation=mode, **sizes) as engine:
        train(policy, prompts, InProcess(engine), options)


if __name__ == "__main__":
    main()
