"""Which engines are compared, in which modes, and where each one's environment is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.lab.peers.process import Peer

BASELINE = "Outrider off"
PLACEBO = "Outrider off, again"  # its ratio to the baseline is the noise of all the others
LOOKUP_TOKENS, MAX_NGRAM = 4, 3


def all_peers(
    environments: Path,
    *,
    model: Path,
    draft_model: Path | None,
    head: Path | None,
    half_gguf: Path | None,
    dtype: str,
    max_num_seqs: int,
    max_model_len: int,
    pool: str | None = None,  # of drafters for vLLM
) -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that can run here, and why each of the others cannot."""
    common: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "num_speculative_tokens": LOOKUP_TOKENS,
        "max_ngram": MAX_NGRAM,
    }
    found: list[Peer] = []
    missing: dict[str, str] = {}

    def add(name: str, script: str, environment: str | None = None, **options: Any) -> None:
        interpreter = None if environment is None else environments / environment / "bin" / "python"
        if environment is not None and interpreter is not None and not interpreter.is_file():
            missing[name] = f"{interpreter} is not there: make peers"
        elif options.get("gguf", "") is None:
            missing[name] = "it reads MODEL as a GGUF file alone"
        elif options.get("pool", "") is None:
            missing[name] = "it needs --pool"
        elif options.get("draft_model", "") is None:
            missing[name] = "it needs --draft-model"
        else:
            found.append(Peer(name=name, script=script, interpreter=interpreter, options={**common, **options}))

    modes = {BASELINE: "off", PLACEBO: "off", "Outrider adaptive": "auto", "Outrider fixed": "always"}
    for name, speculation in modes.items():
        add(name, "outrider_worker.py", speculation=speculation, method="ngram")
    if head is not None:  # the one that is shipped for the model
        eagle = {"speculation": "auto", "draft_model": str(head)}
        add("Outrider EAGLE-3", "outrider_worker.py", method="eagle3", **eagle)
        add("Outrider look-up or EAGLE-3", "outrider_worker.py", method="hybrid", methods=["ngram", "eagle3"], **eagle)
    half = None if half_gguf is None else str(half_gguf)
    draft = None if draft_model is None else str(draft_model)
    for lookup, suffix in ((False, ""), (True, " look-up")):
        add(f"transformers{suffix}", "transformers_worker.py", lookup=lookup)
        add(f"vLLM{suffix}", "vllm_worker.py", "vllm", lookup=lookup)
        add(f"OpenVINO{suffix}", "openvino_worker.py", "openvino", lookup=lookup, gguf=half)
    add("Outrider draft model", "outrider_worker.py", speculation="auto", method="draft_model", draft_model=draft)
    add("transformers assisted", "transformers_worker.py", lookup=False, draft_model=draft)
    add("vLLM draft model", "vllm_worker.py", "vllm", lookup=False, draft_model=draft)
    add("vLLM from our pool", "vllm_worker.py", "vllm", lookup=False, pool=pool)
    add("llama.cpp", "llamacpp_worker.py", "llamacpp", gguf=half)
    return found, missing
