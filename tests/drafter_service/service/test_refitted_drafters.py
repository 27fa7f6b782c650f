"""The embedded pair: a target whose weights change and a drafter that does not follow, and then does.

The new weights are those of another numbering of the vocabulary, for target and drafters alike. So the new target says
the same under other ids, a drafter that was not refitted is mostly wrong, and a refitted one is as good as before.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.drafter_service import embedded
from outrider.drafter_service.service.speculative_config import Method
from outrider.verifier_service.engine.loop import engine_load
from outrider.verifier_service.engine.step_stats import RecentRates
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan

VOCAB_SIZE = 2048
ORDER = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))  # new id of each old one
NUM_NEW_TOKENS = 32
DRAFT_LENGTH = 2
METHODS = (Method.DRAFT_MODEL, Method.MEDUSA)  # a model and a head; test_own_weights has every method
HEAD_FILES = {Method.MEDUSA: "medusa_lm_head.safetensors"}  # others: model.safetensors

POOL = {"kv_cache_memory_bytes": 32 << 20}  # of KV; by default it is a share of the free memory


def renumbered_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return an embedding's rows under the new ids."""
    return torch.empty_like(tensor).index_copy_(0, ORDER, tensor)


def renumbered(method: Method | None, source: Path, to: Path) -> Path:
    """Write a checkpoint of the embedded pair (None: of the target) for the new ids."""
    shutil.copytree(source, to)
    file = to / HEAD_FILES.get(method, "model.safetensors") if method else to / "model.safetensors"
    tensors = load_file(file)
    if method in (None, Method.DRAFT_MODEL):
        name = "model.embed_tokens.weight"  # both tie the output embedding to it
        tensors[name] = renumbered_rows(tensors[name])
    else:
        tensors["token_map"] = ORDER[tensors["token_map"].long()]
    save_file(tensors, file, {"format": "pt"})
    return to


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("refitted")
    renumbered(None, embedded.target_path(), path / "target")
    for method in METHODS:
        renumbered(method, embedded.drafter_paths()[method], path / method.value)
    yield path
    torch.set_num_threads(threads)


def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(embedded.target_path())
    return [tokenizer.encode(text)[:48] for text in embedded.held_out_prompts()[:6]]


@contextmanager
def served(target: Path, **speculative: Any) -> Iterator[OfflineEngine]:
    config = {"speculative_config": {"location": "verifier", "num_speculative_tokens": DRAFT_LENGTH, **speculative}}
    options = config if speculative else {"num_drafters": 0}
    config = ServiceConfig(model=str(target), seed=0, max_model_len=256, device="cpu", **POOL, **options)
    with OfflineEngine(config) as engine:
        yield engine


class Run:
    """What an engine says to the prompts, and how its drafts fare."""

    def __init__(self, engine: OfflineEngine, token_ids: Sequence[Sequence[int]]) -> None:
        requests = [
            GenerationRequest(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True),
                plan=SpeculationPlan(drafter_id=LOCAL_DRAFTER_ID, draft_length=DRAFT_LENGTH),
            )
            for index, prompt in enumerate(token_ids)
        ]
        self.tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        self.num_draft_tokens = self.num_accepted_tokens = 0
        for output in engine.generate(requests):
            self.tokens[output.request_id] += output.token_ids
            self.num_draft_tokens += output.num_draft_tokens
            self.num_accepted_tokens += output.num_accepted_tokens

    @property
    def acceptance(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens


def num_behind(engine: OfflineEngine) -> int | None:
    load = engine_load(engine.engine, RecentRates(), 0.0)
    return {each.drafter_id: each.num_updates_behind for each in load.drafters}[LOCAL_DRAFTER_ID]


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_drafter_that_is_not_refitted_costs_acceptance_and_no_token(
    root: Path, method: Method, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    old_ids = prompts()
    new_ids = [ORDER[torch.tensor(prompt)].tolist() for prompt in old_ids]
    with served(root / "target") as plain:
        wanted = plain_tokens(plain, new_ids)
    with served(embedded.target_path(), method=method.value, model=str(embedded.drafter_paths()[method])) as engine:
        before = Run(engine, old_ids)
        engine.update_weights(str(root / "target"), "renumbered")
        stale = Run(engine, new_ids)
        assert num_behind(engine) == 1
        (warning,) = [record.message for record in caplog.records if "behind" in record.message]
        assert warning.startswith("drafter local has weights of its own that are 1 updates of the target behind")
        assert f"{before.acceptance:.2f} before" in warning
        with pytest.raises(ValueError, match=r"no folder"):
            engine.update_draft_weights(str(root / "nowhere"), None)
        engine.update_draft_weights(str(root / method.value), "renumbered")
        refitted = Run(engine, new_ids)
        assert num_behind(engine) == 0
        counts = {
            each.weight_version: each for each in engine_load(engine.engine, RecentRates(), 0.0).counters.by_version
        }
    assert stale.tokens == refitted.tokens == wanted
    assert before.acceptance > 0.05
    assert stale.acceptance < before.acceptance / 3
    assert refitted.acceptance == pytest.approx(before.acceptance, abs=0.02), "ties of rounding aside, the same drafts"
    assert len([record for record in caplog.records if "behind" in record.message]) == 1
    assert counts["default"].num_draft_tokens == before.num_draft_tokens
    assert counts["renumbered"].num_accepted_tokens == stale.num_accepted_tokens + refitted.num_accepted_tokens
    fresh = acceptance_of_a_fresh_start(root, method, new_ids)
    assert refitted.acceptance == fresh


def plain_tokens(engine: OfflineEngine, token_ids: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    return Run(engine, token_ids).tokens


def acceptance_of_a_fresh_start(root: Path, method: Method, token_ids: Sequence[Sequence[int]]) -> float:
    with served(root / "target", method=method.value, model=str(root / method.value)) as engine:
        return Run(engine, token_ids).acceptance


@pytest.mark.parametrize("method", [Method.EARLY_EXIT, Method.NGRAM], ids=str)
def test_drafters_without_weights_of_their_own_are_never_warned_of(
    root: Path, method: Method, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    new_ids = [ORDER[torch.tensor(prompt)].tolist() for prompt in prompts()]
    with served(embedded.target_path(), method=method.value) as engine:
        Run(engine, prompts())
        engine.update_weights(str(root / "target"), None)
        after = Run(engine, new_ids)
        assert num_behind(engine) is None
        with pytest.raises(ValueError, match=method.value):
            engine.update_draft_weights(str(root / "target"), None)
    with served(root / "target", method=method.value) as fresh:
        wanted = Run(fresh, new_ids)
    assert (after.tokens, after.num_accepted_tokens) == (wanted.tokens, wanted.num_accepted_tokens)
    assert after.num_accepted_tokens > 0
    assert not [record for record in caplog.records if "behind" in record.message]


def test_a_drafter_in_a_process_of_its_own_tells_the_version_of_its_weights(root: Path) -> None:
    method, new_ids = Method.MEDUSA, [ORDER[torch.tensor(prompt)].tolist() for prompt in prompts()[:2]]
    model = str(embedded.drafter_paths()[method])
    speculative = {"method": method.value, "model": model, "num_speculative_tokens": DRAFT_LENGTH}
    config = ServiceConfig(
        **POOL,
        model=str(embedded.target_path()),
        seed=0,
        max_model_len=256,
        device="cpu",
        speculative_config=speculative,
    )
    with OfflineEngine(config, drafter_process=True) as engine:
        Run(engine, prompts()[:2])
        engine.update_weights(str(root / "target"), "renumbered")
        assert engine.engine.drafting.updates.num_behind("process") == 1
        with pytest.raises(ValueError, match="no folder"):
            engine.update_draft_weights(str(root / "nowhere"), None)
        engine.update_draft_weights(str(root / method.value), "renumbered")
        assert Run(engine, new_ids).num_draft_tokens > 0
        assert engine.engine.drafting.updates.num_behind("process") == 0
