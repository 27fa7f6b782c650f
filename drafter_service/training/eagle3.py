"""Distil an EAGLE-3 head with training-time test (Li et al. 2025, arXiv 2503.01840).

A served head reads the target's states only up to where its draft begins; from there on it reads what it fed back
itself. So it is trained on its own states: the first step sees the target's, each further step the step before.

root s, step j        input state                 position   attends to
0                     the target's, of token s    s          step 0 of roots 0..s
1                     step 0's own, of root s     s + 1      step 0 of roots 0..s, itself
2                     step 1's own, of root s     s + 2      step 0 of roots 0..s, step 1 of root s, itself

All roots of a window are unrolled at once: in each step beyond the first, every root has one entry of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from outrider.drafter_service.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafter_service.heads.head_layer import SHARED
from outrider.drafter_service.training.corpus_windows import TokenStream, frequent_ids
from outrider.drafter_service.training.pupil import TargetLaw, decayed_loss, num_roots
from outrider.drafter_service.training.teacher import Lesson, Teacher, default_taps

POSITION_DECAY = 0.8
SAVED_DTYPE = torch.float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Shape:
    """What can be chosen of a new head; its layer has the target's dimensions."""

    draft_vocab_size: int = 32_000  # the most frequent tokens; at most the target's vocabulary
    taps: tuple[int, ...] = ()  # layers of the target whose input is read; (): default_taps

    def config_for(self, teacher: Teacher) -> Eagle3Config:
        """Return the configuration of a head for a target."""
        target = teacher.model.config.get_text_config()
        if teacher.embedding.shape[1] != teacher.hidden_size:
            raise ValueError(f"target: its embedding is {teacher.embedding.shape[1]} wide, not {teacher.hidden_size}")
        num_heads = target.num_attention_heads
        layer = LlamaConfig(
            vocab_size=teacher.vocab_size,
            hidden_size=teacher.hidden_size,
            intermediate_size=getattr(target, "intermediate_size", None) or 4 * teacher.hidden_size,
            num_hidden_layers=1,
            num_attention_heads=num_heads,
            num_key_value_heads=getattr(target, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(target, "head_dim", None) or teacher.hidden_size // num_heads,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=getattr(target, "rms_norm_eps", 1e-6),
            rope_parameters=_rope_of(target),
            bos_token_id=target.bos_token_id,
            eos_token_id=target.eos_token_id,
            tie_word_embeddings=False,
        )
        return Eagle3Config(
            layer=layer,
            taps=self.taps or default_taps(teacher.num_layers),
            draft_vocab_size=min(self.draft_vocab_size, teacher.vocab_size),
            target_hidden_size=teacher.hidden_size,
        )


def _rope_of(target: object) -> dict[str, object]:
    """Return the target's rotary positions where they are one set for all layers, else the plain ones."""
    rope = getattr(target, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope and rope.get("partial_rotary_factor", 1.0) == 1.0:
        return dict(rope)
    return {"rope_type": "default", "rope_theta": 10_000.0}


class Eagle3Pupil:
    """An EAGLE-3 head that is unrolled `num_positions` steps in training."""

    def __init__(self, head: Eagle3Head, teacher: Teacher, *, num_positions: int = 4) -> None:
        self.module = head
        self.teacher = teacher.tapping(head.taps)
        self.num_positions = num_positions
        self.vocab_ids = head.target_ids

    @classmethod
    def create(
        cls, teacher: Teacher, stream: TokenStream, *, shape: Eagle3Shape, num_positions: int, seed: int
    ) -> Eagle3Pupil:
        """Begin a new head over the stream's most frequent tokens, as near to the target as its weights can be."""
        config = shape.config_for(teacher)
        torch.manual_seed(seed)
        ids = frequent_ids(stream, teacher.vocab_size, config.draft_vocab_size)
        head = Eagle3Head(config, target_ids=ids).to(teacher.device)
        head.borrow_embedding(teacher.embedding.float())
        if not teacher.has_parameter(SHARED["embed_tokens.weight"]):  # a loader would not find it there
            head.borrowed = frozenset()
        start_from_target(head, teacher)
        return cls(head, teacher, num_positions=num_positions)

    def loss(self, lesson: Lesson) -> Tensor:
        law = TargetLaw.of(lesson.logits, self.vocab_ids)
        return decayed_loss(self.position_logits(lesson), law, decay=POSITION_DECAY)

    def position_logits(self, lesson: Lesson) -> list[Tensor]:
        """Unroll the head from every root: [rows, num_roots, draft_vocab_size] per step."""
        count = num_roots(lesson, self.num_positions)
        positions = torch.arange(count, device=lesson.token_ids.device)[None]  # [1, num_roots]
        hidden = self.module.combine(lesson.states[:, :count])  # [rows, num_roots, hidden_size]
        attend = UnrolledAttention()
        logits: list[Tensor] = []
        for step in range(self.num_positions):
            token_ids = lesson.token_ids[:, 1 + step : 1 + step + count]  # [rows, num_roots]
            output, hidden = self.module(token_ids, hidden, positions + step, attend)
            logits.append(self.module.logits(output))
        return logits

    def save(self, folder: Path) -> None:
        copy.deepcopy(self.module).to(SAVED_DTYPE).save(folder)


@dataclass(slots=True)
class UnrolledAttention:
    """Attention of all roots' unrolled steps: causal over the first step's entries, then each root's own later ones."""

    keys: list[Tensor] = field(default_factory=list)  # one per step: [rows, num_heads, num_roots, head_dim]
    values: list[Tensor] = field(default_factory=list)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add a step's entries and attend: query [rows, num_heads, num_roots, head_dim] -> heads second to last."""
        groups = query.shape[1] // key.shape[1]
        self.keys.append(key.repeat_interleave(groups, dim=1))
        self.values.append(value.repeat_interleave(groups, dim=1))
        query = query * query.shape[-1] ** -0.5
        count = query.shape[2]
        past = torch.ones(count, count, dtype=torch.bool, device=query.device).tril()
        shared = (query @ self.keys[0].transpose(-1, -2)).masked_fill(~past, float("-inf"))  # [..., num_roots] of roots
        own = [(query * key).sum(-1, keepdim=True) for key in self.keys[1:]]  # [..., 1] of each later step
        weights = torch.cat([shared, *own], dim=-1).float().softmax(-1).to(value.dtype)
        output = weights[..., :count] @ self.values[0]
        for step, values in enumerate(self.values[1:]):
            output = output + weights[..., count + step, None] * values
        return output.transpose(1, 2)


@torch.no_grad()
def start_from_target(head: Eagle3Head, teacher: Teacher) -> None:
    """Give a new head the target's weights where they fit, which saves most of the first steps.

    The last tapped state passes through `fc` and then, as in the target, through its last layer, final norm and output
    embedding. Attention reads the state as the last layer does and the embedding as the first one does. Targets whose
    layers have other names or shapes lend what they have.
    """
    head.fc.weight.zero_()
    head.fc.weight[:, -teacher.hidden_size :].fill_diagonal_(1.0)
    rows = teacher.head if head.target_ids is None else teacher.head[head.target_ids]
    head.lm_head.weight.copy_(rows)
    lent = {name.removeprefix("model."): tensor for name, tensor in teacher.model.named_parameters()}
    _copy_if_it_fits(head.norm.weight, lent.get("norm.weight"))
    first, last = "layers.0.", f"layers.{teacher.num_layers - 1}."
    layer = head.midlayer
    _copy_if_it_fits(layer.input_layernorm.weight, lent.get(f"{first}input_layernorm.weight"))
    _copy_if_it_fits(layer.hidden_norm.weight, lent.get(f"{last}input_layernorm.weight"))
    for name in ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        _copy_if_it_fits(layer.get_parameter(f"{name}.weight"), lent.get(f"{last}{name}.weight"))
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        of_embedding, of_state = layer.get_parameter(f"{name}.weight").chunk(2, dim=1)  # [heads, hidden_size] each
        _copy_if_it_fits(of_embedding, lent.get(f"{first}{name}.weight"))
        _copy_if_it_fits(of_state, lent.get(f"{last}{name}.weight"))


def _copy_if_it_fits(into: Tensor, tensor: Tensor | None) -> None:
    if tensor is not None and tensor.shape == into.shape:
        into.copy_(tensor)
