"""vLLM's CPU build in this process; with `lookup` its n-gram drafter, with `draft_model` that one, with `pool` ours."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.lab.peers.worker import Generate


def load(options: dict[str, Any]) -> tuple[str, Generate]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    num_threads, num_ranks = options["num_threads"], options.get("tensor_parallel_size", 1)
    cores = (f"{rank * num_threads}-{(rank + 1) * num_threads - 1}" for rank in range(num_ranks))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    import vllm

    drafting: dict[str, Any] | None = None
    if options["lookup"]:
        drafting = {"method": "ngram", "prompt_lookup_max": options["max_ngram"]}
    elif options.get("draft_model"):
        drafting = {"method": "draft_model", "model": options["draft_model"]}
    elif options.get("pool"):
        drafting = {"method": "custom_class", "model": "outrider.cluster.vllm.Drafts"}
    if drafting is not None:
        drafting["num_speculative_tokens"] = options["num_speculative_tokens"]
    engine = vllm.LLM(
        options["model"],
        dtype=options["dtype"],
        max_num_seqs=options["max_num_seqs"],
        max_model_len=options["max_model_len"],
        speculative_config=drafting,
        additional_config={"outrider": {"pool": options["pool"], **options.get("plugin", {})}}
        if options.get("pool")
        else {},
        enforce_eager=options.get("enforce_eager", False),
        tensor_parallel_size=num_ranks,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return vllm.__version__, generate


if __name__ == "__main__":
    from worker import serve  # a script's own folder comes first in its path

    serve(load)
