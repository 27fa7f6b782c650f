"""The MLP speculator (Wertheimer et al. 2024, arXiv 2404.19124): a short recurrence over state and token embedding.

It starts from the target's last hidden state. Step i adds the embedding of the previous token to the projected state,
normalises, and predicts the next token; its state is the next step's input:

    state = gelu(ln_i(proj_i(state) + (emb_weight / state_weight) * emb_i(token)));  logits = head_i(state)

Each step keeps `state_weight`^2 of the state's variance: after all steps, half of the target's is left.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.drafter_service.heads.head_files import HeadFiles, opened, write_head

PREFIX = "speculator."
NORM_EPSILON = 1e-6


class ScaledNorm(nn.Module):
    """Divide by the root mean square; a learned norm also scales and shifts."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, size: int, *, is_learned: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size)) if is_learned else None
        self.bias = nn.Parameter(torch.zeros(size)) if is_learned else None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape."""
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + NORM_EPSILON)
        return values if self.weight is None or self.bias is None else self.weight * values + self.bias


class MlpSpeculator(nn.Module):
    """`n_predict` steps; parameters are named as in the public checkpoints, without `speculator.`."""

    def __init__(
        self,
        *,
        emb_dim: int,
        vocab_size: int,
        n_predict: int,
        inner_dim: int = 0,
        tie_weights: bool = False,
        scale_input: bool = False,
    ) -> None:
        """Create a speculator with random weights over states of width `emb_dim`; `inner_dim` 0: the same width.

        `tie_weights`: steps share embedding, norm, output embedding and, from the second on, projection.
        """
        super().__init__()
        if min(emb_dim, vocab_size, n_predict) < 1 or inner_dim < 0:
            raise ValueError("emb_dim, vocab_size and n_predict must be positive, inner_dim not negative")
        if tie_weights and n_predict < 2:
            raise ValueError("tie_weights: n_predict must be at least 2, a single step has nothing to share")
        self.emb_dim, self.vocab_size, self.n_predict = emb_dim, vocab_size, n_predict
        self.inner_dim = inner = inner_dim or emb_dim
        self.tie_weights, self.scale_input = tie_weights, scale_input
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(n_predict))
        self.proj = nn.ModuleList(nn.Linear(inner if i else emb_dim, inner, bias=False) for i in range(n_predict))
        self.head = nn.ModuleList(nn.Linear(inner, vocab_size, bias=False) for _ in range(n_predict))
        self.ln = nn.ModuleList(ScaledNorm(inner) for _ in range(n_predict))
        self.ln0 = ScaledNorm(emb_dim, is_learned=False)
        state_weight = 0.5 ** (0.5 / n_predict)
        # embeddings are initialised with a variance of 2 / inner_dim
        emb_weight = math.sqrt((1.0 - state_weight**2) * (inner / 2))
        self.emb_to_state = emb_weight / state_weight
        if tie_weights:
            self._tie()

    @classmethod
    def from_folder(cls, path: Path | str, *, dtype: torch.dtype = torch.float32) -> MlpSpeculator:
        """Read a checkpoint of IBM's format. Raises `ValueError` naming the tensor or the config key."""
        with opened(path) as files:
            return _read(files, dtype).eval()

    def save(self, folder: Path | str, *, dtype: torch.dtype | None = None) -> None:
        """Write `config.json` and `model.safetensors` in the public format, tied tensors once per step."""
        tensors = {PREFIX + name: tensor for name, tensor in self.state_dict().items()}
        write_head(folder, self._config(), tensors, dtype=dtype)

    def start(self, state: torch.Tensor) -> torch.Tensor:
        """Return the first step's state from the target's hidden state: both [..., emb_dim]."""
        assert state.shape[-1] == self.emb_dim, (state.shape, self.emb_dim)
        return self.ln0(state) / math.sqrt(2.0) if self.scale_input else state

    def step(self, index: int, state: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run step `index`.

        state [..., emb_dim] from `start`, later [..., inner_dim]; token_ids int64 [...], the previous tokens -> logits
        [..., vocab_size] and the next step's state [..., inner_dim].
        """
        joined = self.proj[index](state) + self.emb_to_state * self.emb[index](token_ids)
        state = nn.functional.gelu(self.ln[index](joined))
        return self.head[index](state), state

    def _tie(self) -> None:
        for index in range(1, self.n_predict):
            self.emb[index], self.head[index], self.ln[index] = self.emb[0], self.head[0], self.ln[0]
        for index in range(2, self.n_predict):  # the first projection reads the target's state, which may be wider
            self.proj[index] = self.proj[1]

    def _config(self) -> dict[str, Any]:
        return {
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "model_type": "mlp_speculator",
            "vocab_size": self.vocab_size,
            "emb_dim": self.emb_dim,
            "inner_dim": self.inner_dim,
            "n_predict": self.n_predict,
            "tie_weights": self.tie_weights,
            "scale_input": self.scale_input,
            "top_k_tokens_per_head": list(range(self.n_predict + 2, 2, -1)),
            "n_candidates": 5,
        }


# --- reading ---


def _read(files: HeadFiles, dtype: torch.dtype) -> MlpSpeculator:
    model_type = files.config.get("model_type", "mlp_speculator")
    if model_type != "mlp_speculator":
        raise files.error(f"config.json: model_type must be mlp_speculator, not {model_type!r}")
    with torch.device("meta"):
        speculator = MlpSpeculator(
            emb_dim=files.integer("emb_dim"),
            vocab_size=files.integer("vocab_size"),
            n_predict=files.integer("n_predict"),
            inner_dim=files.integer("inner_dim", default=0, at_least=0),
            tie_weights=files.boolean("tie_weights", False),
            scale_input=files.boolean("scale_input", False),
        )
    held = {id(weight): name for name, weight in speculator.named_parameters()}  # tied ones: the first name
    tensors = {name: files.take(PREFIX + name, speculator.get_parameter(name).shape, dtype) for name in held.values()}
    for name, weight in speculator.state_dict(keep_vars=True).items():
        first = held[id(weight)]
        is_repeated = name != first and PREFIX + name in files
        if is_repeated and not torch.equal(files.take(PREFIX + name, weight.shape, dtype), tensors[first]):
            raise files.error(f"tie_weights: tensor {PREFIX + name!r} differs from {PREFIX + first!r}")
        tensors[name] = tensors[first]
    files.require_all_taken()
    speculator.load_state_dict(tensors, assign=True)
    return speculator
