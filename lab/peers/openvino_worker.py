"""OpenVINO GenAI's continuous batching over a GGUF file in fp16; with `lookup` its prompt look-up."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.lab.peers.worker import Generate

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
CACHE_GB = 1


def load(options: dict[str, Any]) -> tuple[str, Generate]:
    import numpy as np
    import openvino
    import openvino_genai

    scheduling = openvino_genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GB
    scheduling.max_num_seqs = options["max_num_seqs"]
    scheduling.enable_prefix_caching = True
    properties = {
        "INFERENCE_PRECISION_HINT": PRECISIONS[options["dtype"]],
        "INFERENCE_NUM_THREADS": options["num_threads"],
    }
    if options["lookup"]:
        properties["prompt_lookup"] = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(options["gguf"], scheduling, "CPU", properties)

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, do_sample=False)
        if options["lookup"]:
            config.num_assistant_tokens = options["num_speculative_tokens"]
            config.max_ngram_size = options["max_ngram"]
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        results = pipeline.generate(inputs, [config] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    return openvino_genai.__version__, generate


if __name__ == "__main__":
    from worker import serve  # a script's own folder comes first in its path

    serve(load)
