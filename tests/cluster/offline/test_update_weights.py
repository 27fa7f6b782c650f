"""`LLM.update_weights`: what follows is what an LLM of the new checkpoint would say, there and back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.cluster.offline.llm import LLM
from outrider.cluster.offline.sampling_params import SamplingParams
from outrider.drafter_service.embedded import draft_path, target_path

PROMPTS = [{"prompt_token_ids": list(range(100, 130))}, {"prompt_token_ids": list(range(300, 340))}]
SAMPLINGS = [SamplingParams(temperature=0.0, max_tokens=12), SamplingParams(temperature=1.0, seed=3, max_tokens=12)]
POOL = {"kv_cache_memory_bytes": 32 << 20}  # of KV; by default it is a share of the free memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target with noise in every weight."""
    return with_noise(target_path(), tmp_path_factory.mktemp("new") / "target")


def with_noise(source: Path, folder: Path) -> Path:
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(5)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        noisy = {
            name: tensor + 0.2 * tensor.float().std() * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            for name, tensor in tensors.items()
        }
        save_file({name: tensor.contiguous() for name, tensor in noisy.items()}, path, metadata={"format": "pt"})
    return folder


def opened(model: Path) -> LLM:
    return LLM(model=str(model), draft_model=str(draft_path()), dtype="float32", speculation="always", **POOL)


def answers(llm: LLM) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, SAMPLINGS)]


def test_answers_are_those_of_the_new_weights_there_and_back(folder: Path):
    with opened(target_path()) as llm, opened(folder) as fresh:
        old, new = answers(llm), answers(fresh)
        assert all(before != after for before, after in zip(old, new, strict=True))
        llm.update_weights(str(folder), "v1")
        assert answers(llm) == new, "KV of the old weights would say otherwise"
        llm.update_weights(str(target_path()))
        assert answers(llm) == old


def test_a_draft_model_takes_weights_of_its_own(tmp_path: Path):
    other = with_noise(draft_path(), tmp_path / "other")
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

    def drafted(llm: LLM) -> tuple[list[list[int]], int]:
        outputs = llm.generate(PROMPTS, sampling)
        accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
        return [output.outputs[0].token_ids for output in outputs], accepted

    with opened(target_path()) as llm:
        tokens, num_accepted = drafted(llm)
        llm.update_draft_weights(str(other))
        noisy_tokens, num_noisy = drafted(llm)
        llm.update_draft_weights(str(draft_path()))
        assert drafted(llm) == (tokens, num_accepted)
        assert noisy_tokens == tokens
        assert num_noisy < num_accepted
        with pytest.raises(ValueError, match="no folder"):
            llm.update_draft_weights(str(tmp_path / "nowhere"))


def test_weights_do_not_change_while_prompts_run_nor_by_a_folder_that_does_not_fit(folder: Path, tmp_path: Path):
    cut = tmp_path / "cut"
    shutil.copytree(folder, cut)
    tensors = load_file(cut / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, cut / "model.safetensors", metadata={"format": "pt"})
    with opened(target_path()) as llm:
        old = answers(llm)
        running = llm.as_completed(PROMPTS, SAMPLINGS)
        next(running)
        with pytest.raises(RuntimeError, match="generating"):
            llm.update_weights(str(folder))
        running.close()
        with pytest.raises(ValueError, match=r"model\.norm\.weight"):
            llm.update_weights(str(cut))
        assert answers(llm) == old
