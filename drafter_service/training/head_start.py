"""Initialise a new head from the target: dimensions, embeddings, and weights where they fit.

A head that starts near the target saves most of the first steps. Weights with other names or shapes are left random.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from outrider.drafter_service.heads.head_layer import SHARED, DraftHead
from outrider.drafter_service.training.teacher import Teacher


def layer_like(teacher: Teacher) -> LlamaConfig:
    """Describe a decoder layer with the target's dimensions; raises `ValueError` if they are not one's."""
    target = teacher.model.config.get_text_config()
    if teacher.embedding.shape[1] != teacher.hidden_size:
        raise ValueError(f"target: its embedding is {teacher.embedding.shape[1]} wide, not {teacher.hidden_size}")
    num_heads = target.num_attention_heads
    return LlamaConfig(
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


def _rope_of(target: object) -> dict[str, object]:
    """Return the target's rotary parameters if all layers share them, else the default ones."""
    rope = getattr(target, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_type" in rope and rope.get("partial_rotary_factor", 1.0) == 1.0:
        return dict(rope)
    return {"rope_type": "default", "rope_theta": 10_000.0}


def share_embedding(head: DraftHead, teacher: Teacher) -> None:
    """Set the target's embedding, frozen; it is saved with the head only if a loader would not find it."""
    head.borrow_embedding(teacher.embedding.float())
    if not teacher.has_parameter(SHARED["embed_tokens.weight"]):
        head.borrowed = frozenset()


def share_tables(head: DraftHead, teacher: Teacher) -> None:
    """Set both of the target's embeddings, frozen."""
    share_embedding(head, teacher)
    head.lm_head.weight = nn.Parameter(teacher.head.float().detach(), requires_grad=False)
    if teacher.has_parameter(SHARED["lm_head.weight"]):
        head.borrowed |= {"lm_head.weight"}


def lent_tensor(teacher: Teacher, name: str) -> Tensor | None:
    """Return a target's tensor by its name below `model.`, if it exists."""
    found = (tensor for full, tensor in teacher.model.named_parameters() if full.removeprefix("model.") == name)
    return next(found, None)


@torch.no_grad()
def lend_layer(layer: nn.Module, teacher: Teacher, index: int) -> None:
    """Copy the fitting weights of one of the target's decoder layers."""
    for name, parameter in layer.named_parameters():
        copy_if_it_fits(parameter, lent_tensor(teacher, f"layers.{index}.{name}"))


@torch.no_grad()
def copy_if_it_fits(into: Tensor, tensor: Tensor | None) -> None:
    """Copy a tensor if it has the same shape."""
    if tensor is not None and tensor.shape == into.shape:
        into.copy_(tensor)


@torch.no_grad()
def pass_last_part_through(projection: nn.Linear) -> None:
    """Initialise a projection of concatenated parts to return the last part."""
    projection.weight.zero_()
    projection.weight[:, -projection.out_features :].fill_diagonal_(1.0)


@torch.no_grad()
def add_nothing(layer: nn.Module) -> None:
    """Initialise a decoder layer to return its input."""
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        layer.get_parameter(name).zero_()
