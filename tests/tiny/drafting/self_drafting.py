"""A tiny target that drafts for itself, and what is left of it without its last layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedModel

from outrider.cluster.offline.engine import NoDrafters
from outrider.drafter_service.target.scratch_blocks import scratch_blocks_per_draft
from outrider.drafter_service.target.target_view import TargetView
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import make_checkpoint, random_sequences

BLOCK_SIZE, NUM_BLOCKS = 4, 48
EXIT_LAYER = 3
NUM_NODES = 9
NUM_DRAFTS = 2  # that there are scratch blocks for at once
NUM_REQUESTS = 5
GREEDY_PARAMS = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)

AnyDrafter = TypeVar("AnyDrafter")


@dataclass
class TinyTarget:
    """Four layers whose last one changes little, so that leaving before it is often right and often wrong."""

    config: ModelConfig
    model: PreTrainedModel
    runner: ParallelRunner

    @classmethod
    def of(cls, folder: Path) -> TinyTarget:
        model = make_checkpoint(folder, num_hidden_layers=4)
        last = model.model.layers[-1]
        last.self_attn.o_proj.weight *= 0.3
        last.mlp.down_proj.weight *= 0.3
        model.save_pretrained(folder)
        config = ModelConfig(
            path=str(folder),
            num_kv_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            device="cpu",
            num_scratch_blocks=NUM_DRAFTS * scratch_blocks_per_draft(NUM_NODES, BLOCK_SIZE),
        )
        return cls(config, model, ParallelRunner(ModelRunner(config, TensorParallelGroup.single())))

    @cached_property
    def shortened(self) -> PreTrainedModel:
        """The library's model without the last layer."""
        model = copy.deepcopy(self.model)
        model.model.layers = model.model.layers[:EXIT_LAYER]
        return model

    def started(self, make: Callable[[TargetView], AnyDrafter]) -> tuple[VerifierEngine, AnyDrafter]:
        """An engine whose requests "0", "1", ... have their first token, and a drafter that nobody asked yet."""
        view = TargetView(self.runner)
        engine = build_engine(self.runner, VerifierSpec(model=self.config), NoDrafters())
        view.attach(engine)
        for index, prompt in enumerate(random_sequences((9,) * NUM_REQUESTS)):
            request = GenerationRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=GREEDY_PARAMS)
            assert engine.add(request) is None
        engine.step()
        return engine, make(view)

    @cached_property
    def prompts(self) -> list[list[int]]:
        engine, _ = self.started(lambda view: view)
        return [list(request.token_ids) for request in engine.requests.values()]
