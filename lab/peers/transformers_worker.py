"""`generate` of the transformers library over a left-padded batch; with drafts one prompt at a time.

`lookup` has the prompt looked up, `draft_model` is an assistant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.lab.peers.worker import Generate


def load(options: dict[str, Any]) -> tuple[str, Generate]:
    import torch
    import transformers

    torch.set_num_threads(options["num_threads"])

    def load_causal(folder: str) -> Any:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options["dtype"]))
        loaded.generation_config = transformers.GenerationConfig()  # the checkpoint's own would stop early
        return loaded.eval()

    model = load_causal(options["model"])
    drafting: dict[str, Any] = {}
    if options["lookup"]:
        drafting["prompt_lookup_num_tokens"] = options["num_speculative_tokens"]
    elif options.get("draft_model"):
        drafting["assistant_model"] = load_causal(options["draft_model"])
        drafting["assistant_model"].generation_config.num_assistant_tokens = options["num_speculative_tokens"]

    def generate_batch(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            made = model.generate(
                rows, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0, **drafting
            )
        return made[:, longest:].tolist()

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        if not drafting:
            return generate_batch(prompts, max_tokens)
        return [generate_batch([prompt], max_tokens)[0] for prompt in prompts]

    return transformers.__version__, generate


if __name__ == "__main__":
    from worker import serve  # a script's own folder comes first in its path

    serve(load)
