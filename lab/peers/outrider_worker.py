"""Our own engine, without a server: speculation off, adaptive, or of a fixed length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.lab.peers.worker import Generate


def load(options: dict[str, Any]) -> tuple[str, Generate]:
    import outrider
    from outrider.cluster.offline.llm import LLM
    from outrider.cluster.offline.sampling_params import SamplingParams

    names = ("method", "methods", "num_speculative_tokens")
    drafting = {name: options[name] for name in names if name in options}
    llm = LLM(
        options["model"],
        draft_model=options.get("draft_model"),
        dtype=options["dtype"],
        threads_per_rank=options["num_threads"],
        max_num_seqs=options["max_num_seqs"],
        max_model_len=options["max_model_len"],
        speculation=options["speculation"],
        speculative_config=None if options["speculation"] == "off" else drafting,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return outrider.__version__, generate


if __name__ == "__main__":
    from worker import serve  # a script's own folder comes first in its path

    serve(load)
