"""Every family of docs/models.md that runs: its tiny checkpoint gives the library's logits and tokens."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from exactness.small_engines import Hints, Limits, generate, make_engine
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.attention import LayerShape
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.formats.runners import make_runner, require_equal
from tiny.formats.schemes import MXFP4_EXPERTS, SCHEMES, quantize
from tiny.hub.families import FAMILIES, LATENT, make_family_checkpoint
from tiny.models import full_logits, random_sequences, relative_difference, scattered_batches

NUM_BLOCKS, BLOCK_SIZE = 64, 4
NUM_NEW_TOKENS = 12
PROMPTS = random_sequences((5, 21, 14))
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Served:
    name: str
    model: PreTrainedModel
    runner: ModelRunner


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_family_checkpoint(folder, request.param)
    config = ModelConfig(
        path=str(folder), device="cpu", num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_model_len=160
    )
    return Served(request.param, model, ModelRunner(config, TensorParallelGroup.single()))


def test_its_logits_are_the_librarys(served: Served) -> None:
    sequences = random_sequences((41, 9, 26))
    expected = [full_logits(served.model, sequence) for sequence in sequences]
    got, wanted = [], []
    for batch, rows in scattered_batches(sequences, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        got.append(served.runner.execute(batch))
        wanted += [expected[index][position] for index, position in rows]
    assert relative_difference(torch.stack(wanted), torch.cat(got)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["deepseek-v3.2", "gpt-oss", "kimi-k2.5"])
def test_its_logits_are_the_librarys_on_a_device(tmp_path: Path, name: str) -> None:
    model = make_family_checkpoint(tmp_path, name)
    runner = make_runner(tmp_path, device="cuda", max_model_len=160)
    sequences = random_sequences((41, 9, 26))
    expected = [full_logits(model, sequence) for sequence in sequences]
    for batch, rows in scattered_batches(sequences, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE):
        wanted = torch.stack([expected[index][position] for index, position in rows])
        assert relative_difference(wanted, runner.execute(batch).cpu()) < 1e-4


def test_its_tokens_are_the_librarys_with_drafts_a_prefix_cache_and_preemption(served: Served) -> None:
    expected = {tuple(prompt): library_tokens(served.model, prompt) for prompt in PROMPTS}
    drafts = Hints(expected)
    requests = [
        GenerationRequest(
            request_id=f"{turn}{index}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True),
            plan=SpeculationPlan(draft_length=4),
        )
        for turn in "ab"
        for index, prompt in enumerate(PROMPTS)
    ]
    engine = make_engine(served.runner, drafts, Limits(max_num_batched_tokens=24, num_blocks=14))
    generated = generate(engine, drafts, requests)
    for request in requests:
        assert generated.token_ids[request.request_id] == expected[request.prompt_token_ids]
    assert 0 < generated.num_accepted_tokens < generated.num_draft_tokens
    assert generated.num_cached_tokens > 0
    assert generated.num_preempted_waits > 0


def test_llama_4s_temperature_does_not_follow_a_tokens_place_in_the_batch(tmp_path: Path) -> None:
    model = make_family_checkpoint(tmp_path, "llama-4", floor_scale=42)
    runner = make_runner(tmp_path, max_model_len=41, num_kv_blocks=256, block_size=BLOCK_SIZE)
    sequences, longest = random_sequences((41,) * 12), 0
    expected = [full_logits(model, sequence) for sequence in sequences]
    for batch, rows in scattered_batches(sequences, num_blocks=256, block_size=BLOCK_SIZE):
        wanted = torch.stack([expected[index][position] for index, position in rows])
        assert relative_difference(wanted, runner.execute(batch)) < 1e-5
        longest = max(longest, batch.num_tokens)
    assert longest > 42, "where the library's would be another"


def test_the_kv_pool_keeps_latents_and_no_heads(served: Served) -> None:
    if LATENT.items() <= FAMILIES[served.name].text.items():
        wanted = LayerShape(num_kv_heads=1, head_dim=16 + 8, value_dim=16)  # the latent and the rotated part
        shapes = served.runner.model.kv_shapes.values()
        assert wanted in shapes
        assert all(shape.num_kv_heads == 1 for shape in shapes)  # dots3 has latents of other sizes in windows


def library_tokens(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Decode greedily, the whole sequence anew for each token."""
    token_ids = list(prompt)
    for _ in range(NUM_NEW_TOKENS):
        token_ids.append(int(full_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def rows_of_the_page() -> list[list[str]]:
    """Return the cells of the table of docs/models.md."""
    lines = (ROOT / "docs/models.md").read_text().partition("\n## ")[0].splitlines()
    table = [line for line in lines if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_page_has_all_recipes_with_speculation_and_only_families_that_run() -> None:
    rows = rows_of_the_page()
    counts = {cells[1]: len(cells[0].split(",")) for cells in rows if cells[1].startswith("`")}
    assert sum(len(cells[0].split(",")) for cells in rows) == 58
    assert {name.strip("`") for name in counts} <= FAMILIES.keys()
    assert all(cells[4].startswith("runs" if cells[1].startswith("`") else "refused") for cells in rows)
    beside = set(re.findall(r"\(`([\w.-]+)`\)", (ROOT / "docs/models.md").read_text()))
    assert {name.strip("`") for name in counts} | beside >= FAMILIES.keys()


def test_what_chooses_experts_stays_float32(tmp_path: Path) -> None:
    model = make_family_checkpoint(tmp_path, "glm-4.5")
    runner = make_runner(tmp_path, dtype="bfloat16")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(dict(runner.model.model.named_buffers())[name], dict(model.named_buffers())[name])
    assert runner.model.dtype == torch.bfloat16


# what recipes name first besides bfloat16
FORMATS = {
    "deepseek-v3": "fp8-blocks",
    "deepseek-v3.2": "fp8-blocks",
    "dots3-note": "fp8-blocks",
    "gemma-4-dense": "compressed-fp8-channels",
    "gemma-4-small": "compressed-int4",
    "gemma-4-unified": "compressed-int4",
    "glm-4.5": "fp8-blocks",
    "glm-5": "fp8-blocks",
    "gpt-oss": "mxfp4-experts",
    "hy3": "fp8-blocks",
    "kimi-k2.5": "compressed-int4",
    "laguna": "fp8-blocks",
    "llama-3.1": "awq",
    "minimax-m2": "fp8-blocks",
    "mistral-medium-3.5": "fp8-static",
    "mistral-small-4": "fp8-static",
    "muse-glimmer": "compressed-fp8-blocks",
    "step-3.7": "fp8-blocks",
}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_its_checkpoints_are_read_in_the_format_that_people_use(tmp_path: Path, name: str) -> None:
    model = make_family_checkpoint(tmp_path, name)
    shutil.copytree(tmp_path, tmp_path / "plain")
    scheme = MXFP4_EXPERTS if name == "gpt-oss" else SCHEMES[FORMATS[name]]
    save_file(quantize(tmp_path, scheme), tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    plain = type(model).from_pretrained(tmp_path / "plain", attn_implementation="eager", dtype=torch.float32).eval()
    require_equal(make_runner(tmp_path, max_model_len=160), plain)
