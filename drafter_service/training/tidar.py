"""Teach a target to guess over blocks of masks, beside its own next tokens: TiDAR (Liu et al. 2025, arXiv 2511.08923).

One forward computes the text, causally, and a block of masks behind some of its tokens; a block sees the text before it
and all of itself. Roots and depths are those of `parallel_draft`, with the block of root s where the served one stands
after token s + 1 (`verifier_service/scheduling/masks.py`):

    text     0  1 .. s+1                      causal; every row stays what the untaught target's was
    masks    of root s: at s+2 .. s+1+K       the first has the place of the token that is drawn after s+1
    row      of s+1: token s+2                the drawn one
             of mask d: token s+2+d           the draft

What comes out is a model of its own: its next tokens have the untaught target's law as nearly as it could learn, and
what it serves is its own law. The mask is a token that the text never has, so that the vocabulary stays as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from outrider.drafter_service.models.parallel_drafter import MASK_KEYS
from outrider.drafter_service.service.colocated import open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.speculative_config import Location, Method, SpeculativeConfig
from outrider.drafter_service.target.tidar_drafter import BLOCK_KEY
from outrider.drafter_service.training.corpus_windows import TokenStream
from outrider.drafter_service.training.export import export
from outrider.drafter_service.training.parallel_draft import canvas_of
from outrider.drafter_service.training.pupil import num_roots, span_loss
from outrider.drafter_service.training.served import Rounds
from outrider.drafter_service.training.teacher import Lesson, Teacher
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup

MASK_KEY = MASK_KEYS[0]


class TidarPupil:
    """A copy of the target that learns to guess `num_positions` tokens behind its own next one."""

    vocab_ids: Tensor | None = None

    def __init__(
        self, model: Any, teacher: Teacher, tokenizer: PreTrainedTokenizerBase, stream: TokenStream, num_positions: int
    ) -> None:
        """`model` gets a mask token unless its config has one: the one that the text has least."""
        model.set_attn_implementation("sdpa")  # it supports arbitrary attention masks
        if getattr(model.config, MASK_KEY, None) is None:
            setattr(model.config, MASK_KEY, int(stream.counts(teacher.vocab_size).argmin()))
        setattr(model.config, BLOCK_KEY, num_positions)
        self._mask_token_id: int = getattr(model.config, MASK_KEY)
        self._tokenizer: Any = tokenizer
        self.module, self.teacher, self.num_positions = model, teacher, num_positions

    @classmethod
    def create(
        cls,
        teacher: Teacher,
        tokenizer: PreTrainedTokenizerBase,
        stream: TokenStream,
        *,
        num_positions: int,
        init_from: Path | None = None,
    ) -> TidarPupil:
        """Begin with the target, or with one that was taught before."""
        model: Any = copy.deepcopy(teacher.model).float().requires_grad_()
        if init_from is not None:
            model = AutoModelForCausalLM.from_pretrained(init_from, dtype=torch.float32).to(teacher.device)
        return cls(model, teacher, tokenizer, stream, num_positions)

    def loss(self, lesson: Lesson) -> Tensor:
        """Return the divergence from the target's law, of the next token and of those guessed."""
        return span_loss(self._guess, lesson, self.num_positions + 1)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Return the masks' rows; the draft after token s + 1 was guessed when s was the last one that was known."""
        return self._guess(lesson, range(-1, num_roots(lesson, self.num_positions) - 1))[1:]

    def _guess(self, lesson: Lesson, span: range) -> list[Tensor]:
        """Predict from consecutive roots: [rows, num_roots, vocab_size] of the next token and of each mask."""
        text = lesson.token_ids[:, : span.stop + 1]
        masks = text.new_full((len(text), self.num_positions * len(span)), self._mask_token_id)
        roots, depths = canvas_of(span, self.num_positions + 1, text.device)
        logits = self.module(
            input_ids=torch.cat([text, masks], dim=1),
            position_ids=(roots + depths + 1)[None],
            attention_mask=visible_blocks(roots, depths)[None, None].expand(len(text), -1, -1, -1),
            use_cache=False,
        ).logits[:, span.start + 1 :]
        return list(logits.split(len(span), dim=1))

    def save(self, folder: Path) -> None:
        export(self.module, self._tokenizer, folder)


def visible_blocks(roots: Tensor, depths: Tensor) -> Tensor:
    """Return the attention mask, bool [num_tokens, num_tokens]: text up to the root, and all of the root's masks."""
    is_text = (depths == 0)[None] & (roots[None] <= roots[:, None])
    is_own = (roots[None] == roots[:, None]) & (depths[None] > 0) & (depths[:, None] > 0)
    return is_text | is_own


def serve_greedily(folder: Path, prompts: Sequence[Sequence[int]], *, num_new_tokens: int, draft_length: int) -> Rounds:
    """Serve prompts with a taught model, past end-of-text tokens: a round is one forward."""
    model = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=256)
    speculative = SpeculativeConfig(
        method=Method.TIDAR, location=Location.VERIFIER, num_speculative_tokens=draft_length
    )
    runner = ParallelRunner(ModelRunner(model, TensorParallelGroup.single()))
    client, show = open_local_drafter(DrafterSpec(model=None, target=model, speculative=speculative), runner, None)
    engine = build_engine(runner, VerifierSpec(model=model), client, has_grammars=False)
    show(engine)
    num_rounds = num_committed = 0
    for index, prompt in enumerate(prompts):  # one at a time: their contexts may fill the cache
        request = GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True),
            plan=SpeculationPlan(drafter_id=LOCAL_DRAFTER_ID, draft_length=draft_length),
        )
        failure = engine.add(request)
        assert failure is None, failure
        while engine.has_work():
            outputs = engine.step() or []
            num_rounds += len(outputs)
            num_committed += sum(len(output.token_ids) for output in outputs)
    return Rounds(num_rounds=num_rounds, num_committed=num_committed)
