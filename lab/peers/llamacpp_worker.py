"""llama.cpp over a GGUF file in fp16: the prompts of a batch as sequences of one context, greedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outrider.lab.peers.worker import Generate

BATCH_TOKENS = 512


def load(options: dict[str, Any]) -> tuple[str, Generate]:
    import llama_cpp
    import numpy as np

    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(options["gguf"].encode(), llama_cpp.llama_model_default_params())
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = options["max_num_seqs"] * options["max_model_len"]
    settings.n_seq_max = options["max_num_seqs"]
    settings.n_batch = settings.n_ubatch = BATCH_TOKENS
    settings.n_threads = settings.n_threads_batch = options["num_threads"]
    context = llama_cpp.llama_init_from_model(model, settings)
    vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Run (token id, position, sequence, is wanted) each; return the likeliest next token of the wanted ones."""
        chosen: dict[int, int] = {}
        for start in range(0, len(tokens), BATCH_TOKENS):
            part = tokens[start : start + BATCH_TOKENS]
            batch.n_tokens = len(part)
            for index, (token_id, position, sequence, is_wanted) in enumerate(part):
                batch.token[index], batch.pos[index] = token_id, position
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
                batch.logits[index] = is_wanted
            if llama_cpp.llama_decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for index, (_, _, sequence, is_wanted) in enumerate(part):
                if is_wanted:
                    logits = llama_cpp.llama_get_logits_ith(context, index)
                    chosen[sequence] = int(np.ctypeslib.as_array(logits, shape=(vocab_size,)).argmax())
        return chosen

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        pending = [
            (token_id, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token_id in enumerate(prompt)
        ]
        for step in range(max_tokens):
            chosen = decode(pending)
            for sequence, token_id in chosen.items():
                outputs[sequence].append(token_id)
            pending = [(chosen[i], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)]
        return outputs

    return llama_cpp.__version__, generate


if __name__ == "__main__":
    from worker import serve  # a script's own folder comes first in its path

    serve(load)
