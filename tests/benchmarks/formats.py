"""A model in each quantised format: memory, time per token on one core, and agreement with its bfloat16 tokens.

PYTHONPATH=tests python -m benchmarks.formats FOLDER SCRATCH     a table, as Markdown; docs/results/formats.md
    further words: of formats with one of them in their name
PYTHONPATH=tests python -m benchmarks.formats --layer SCRATCH    an 8 B model in FP8, from one layer of its shape

Times are of CPU, so that other work on the machine changes them little. A format has a process of its own.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from outrider.verifier_service.formats.quantized import open_checkpoint
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.formats.schemes import SCHEMES, Scheme, compressed, fp8, pack_quantized, quantize

BLOCK_SIZE, NUM_TOKENS = 16, 48
ASKED = (
    *("What is a heat pump?", "Why is the sky blue?", "Name three rivers in Europe.", "What is 17 times 6?"),
    *("Write a haiku about rain.", "Explain photosynthesis to a child.", "What does a compiler do?"),
    *("List the planets of the solar system.", "How do I boil an egg?", "What is the capital of Peru?"),
    *(
        "Translate 'good morning' into French.",
        "Write a Python function that adds two numbers.",
        "Who was Ada Lovelace?",
    ),
    *("What is inflation?", "Give me a recipe for pancakes.", "How does a bicycle stay upright?"),
    *("What is the difference between a virus and a bacterium?", "Tell me a story about a fox.", "What is DNA?"),
    *("How can I learn to play the guitar?", "Who was Ada Lovelace?"),
)
FP8_BLOCKS = Scheme(
    write=lambda weight: fp8(weight, 128, 128, ".weight_scale_inv"),
    config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
)
INT4 = Scheme(
    write=lambda weight: pack_quantized(weight, group=64),
    config=compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64),
)
# scheme of the checkpoint, and how its linear layers and its KV are held
FORMATS: dict[str, tuple[Scheme | None, dict[str, str]]] = {
    "bfloat16": (None, {}),
    "bfloat16, `--kv-cache-dtype fp8`": (None, {"kv_cache_dtype": "fp8"}),
    "bfloat16, `--quantization int8`": (None, {"quantization": "int8"}),
    "FP8, blocks of 128 x 128": (FP8_BLOCKS, {}),
    "FP8, `--quantization int8`": (FP8_BLOCKS, {"quantization": "int8"}),
    "INT4, groups of 64": (INT4, {}),
    "INT4, `--quantization int8`": (INT4, {"quantization": "int8"}),
    "INT4, a scale for each row": (SCHEMES["compressed-int4-rows"], {}),
    "INT8, a scale for each row": (SCHEMES["compressed-int8"], {}),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What one format did."""

    tokens: list[list[int]]  # greedy, of each prompt
    next_tokens: list[list[int]]  # the likeliest after each of the bfloat16 model's own tokens
    load_s: float  # of CPU
    token_s: float  # of CPU
    model_bytes: int
    rss_bytes: int  # of the process once it is loaded


def batch(token_ids: list[int], start: int, num_rows: int) -> ScheduledBatch:
    """The tokens of one sequence from position `start` on, the last `num_rows` with logits."""
    count = len(token_ids)
    return ScheduledBatch(
        token_ids=token_ids,
        positions=list(range(start, start + count)),
        slot_mapping=list(range(start, start + count)),
        query_lengths=[count],
        context_lengths=[start + count],
        block_tables=[list(range(-(-(start + count) // BLOCK_SIZE)))],
        logits_indices=list(range(count - num_rows, count)),
    )


def answer(runner: ModelRunner, prompt: list[int]) -> tuple[list[int], float]:
    """Return greedy tokens and the CPU time of all but the first."""
    tokens = [int(runner.execute(batch(prompt, 0, 1)).argmax())]
    begun = time.process_time()
    while len(tokens) < NUM_TOKENS:
        place = len(prompt) + len(tokens) - 1
        tokens.append(int(runner.execute(batch(tokens[-1:], place, 1)).argmax()))
    return tokens, time.process_time() - begun


def measure(folder: Path, held: dict[str, str], answers: list[list[int]]) -> Found:
    """`answers`: of the bfloat16 model; none: it is this one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [[{"role": "user", "content": text}] for text in ASKED]
    prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in asked]
    config = ModelConfig(
        path=str(folder),
        dtype="bfloat16",
        device="cpu",
        num_kv_blocks=32,
        block_size=BLOCK_SIZE,
        num_threads=1,
        check_logits=False,
        **held,  # type: ignore[arg-type]
    )
    begun = time.process_time()
    runner = ModelRunner(config, TensorParallelGroup.single())
    load_s, rss = time.process_time() - begun, resident_bytes()
    answered = [answer(runner, prompt) for prompt in prompts]
    tokens = [own for own, _ in answered]
    following = [
        runner.execute(batch([*prompt, *own[:-1]], 0, NUM_TOKENS)).argmax(1).tolist()
        for prompt, own in zip(prompts, answers or tokens, strict=True)
    ]
    return Found(
        tokens=tokens,
        next_tokens=following,
        load_s=load_s,
        token_s=sum(cpu_s for _, cpu_s in answered) / len(prompts) / (NUM_TOKENS - 1),
        model_bytes=held_bytes(runner.model),
        rss_bytes=rss,
    )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def held_bytes(model: object) -> int:
    """The bytes of all tensors that a model's modules hold, each once."""
    assert isinstance(model, torch.nn.Module)
    values = [value for module in model.modules() for value in (*vars(module).values(), *module._parameters.values())]
    tensors = {value.data_ptr(): value for value in values if isinstance(value, torch.Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


def share(first: list[list[int]], second: list[list[int]]) -> float:
    pairs = [pair for one, other in zip(first, second, strict=True) for pair in zip(one, other, strict=True)]
    return sum(one == other for one, other in pairs) / len(pairs)


def in_a_process(folder: Path, held: dict[str, str], answers: Path) -> Found:
    command = [sys.executable, "-m", "benchmarks.formats", "--one", str(folder), json.dumps(held), str(answers)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Found(**json.loads(done.stdout.splitlines()[-1]))


def table(folder: Path, scratch: Path, wanted: list[str], write: Callable[[str], object]) -> None:
    write("| checkpoint | weights held | process | load, CPU | tokens/s of CPU | same next | same text |")
    write("|---|---:|---:|---:|---:|---:|---:|")
    answers, first = scratch / "answers.json", None
    answers.write_text("[]")
    for name, (scheme, held) in FORMATS.items():
        if wanted and first and not any(part in name for part in wanted):
            continue
        place = scratch / "model"
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        if scheme is not None:
            quantize(place, scheme)
        found = in_a_process(place, held, answers)
        first = first or found
        answers.write_text(json.dumps(first.tokens))
        sizes = " | ".join(f"{size / 1e6:.0f} MB" for size in (found.model_bytes, found.rss_bytes))
        shares = f"{share(first.next_tokens, found.next_tokens):.1%} | {share(first.tokens, found.tokens):.1%}"
        write(f"| {name} | {sizes} | {found.load_s:.1f} s | {1 / found.token_s:.1f} | {shares} |")


def one_layer(scratch: Path) -> str:
    """Dequantise a layer of Llama 3.1 8B's shape, drawn in FP8 blocks, and say what the whole model would take."""
    hidden, inner, kv, vocab, layers = 4096, 14336, 1024, 128256, 32
    shapes = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    shapes += [(inner, hidden), (inner, hidden), (hidden, inner)]
    tensors = {}
    for index, (rows, columns) in enumerate(shapes):
        tensors[f"{index}.weight"] = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
        tensors[f"{index}.weight_scale_inv"] = torch.ones(rows // 128, columns // 128)
    save_file(tensors, scratch / "model.safetensors")
    (scratch / "config.json").write_text(json.dumps({"quantization_config": dict(FP8_BLOCKS.config)}))
    begun = time.process_time()
    with open_checkpoint(scratch, dtype=torch.bfloat16) as source:
        held = sum(source.read(name).nbytes for name in source.names)
    layer_s, stored, ends = time.process_time() - begun, held / 2, 2 * 2 * vocab * hidden
    return (
        f"8 B: {(layers * stored + ends) / 1e9:.1f} GB in files, {(layers * held + ends) / 1e9:.1f} GB of bfloat16, "
        f"{layer_s:.2f} s of CPU for a layer, {layers * layer_s:.0f} s for all\n"
    )


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        known = json.loads(Path(sys.argv[4]).read_text())
        sys.stdout.write(json.dumps(asdict(measure(Path(sys.argv[2]), json.loads(sys.argv[3]), known))) + "\n")
    elif sys.argv[1] == "--layer":
        sys.stdout.write(one_layer(Path(sys.argv[2])))
    else:
        table(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], lambda line: print(line, flush=True))  # noqa: T201
