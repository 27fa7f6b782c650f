"""Small random heads over hidden states, and a slow reference that drafts with them one pair at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from outrider.drafter_service.heads.eagle import EagleHead
from outrider.drafter_service.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.mtp import MtpHead

VOCAB_SIZE = 61
HIDDEN_SIZE = 16
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama_layer(**changes: object) -> PreTrainedConfig:
    return LlamaConfig(**{**SHAPE, **changes})


def qwen2_layer(**changes: object) -> PreTrainedConfig:
    return Qwen2Config(**{**SHAPE, **changes})


def qwen3_layer(**changes: object) -> PreTrainedConfig:
    return Qwen3Config(**{**SHAPE, **changes})


def randomised(head: DraftHead, seed: int) -> DraftHead:
    """Give a head weights large enough that every part of it shows in the outputs."""
    rng = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        scale = 0.3 if "norm" in name else 0.35
        offset = 1.0 if "norm" in name else 0.0
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=rng)
        parameter.requires_grad_(False)
    return head.eval()


def eagle3_head(seed: int = 0, layer: PreTrainedConfig | None = None, **flags: bool) -> Eagle3Head:
    """An EAGLE-3 head that drafts 40 of the 61 tokens."""
    layer = layer or llama_layer()
    config = Eagle3Config(layer=layer, taps=(1, 3, 4), draft_vocab_size=40, target_hidden_size=HIDDEN_SIZE, **flags)
    target_ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(99))[:40].sort().values
    head = Eagle3Head(config, target_ids=target_ids)
    randomised(head, seed)
    return head


def eagle_head(seed: int = 0) -> EagleHead:
    head = EagleHead(llama_layer())
    randomised(head, seed)
    return head


def mtp_head(seed: int = 0, layer: PreTrainedConfig | None = None) -> MtpHead:
    head = MtpHead(layer or qwen3_layer())
    randomised(head, seed)
    return head


def states_of(tokens: Sequence[int], head: DraftHead, first: int = 0) -> torch.Tensor:
    """Return made-up states of all tokens but the last: a function of each token's prefix, [n - 1, state_size].

    Those before `first` are missing.
    """
    rows = []
    seed = 0
    for token_id in tokens[:-1]:
        seed = (seed * 1_000_003 + token_id + 1) % (1 << 31)
        rows.append(torch.randn(head.state_size, generator=torch.Generator().manual_seed(seed)))
    states = torch.stack(rows) if rows else torch.zeros(0, head.state_size)
    states[:first] = float("nan")
    return states


class SlowDrafting:
    """Pairs one at a time over plain lists of keys and values: the reference for everything paged and batched."""

    def __init__(self, heads: Sequence[DraftHead], tokens: Sequence[int], states: torch.Tensor) -> None:
        self._heads = heads
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.logits = self.feedback = torch.empty(0)
        combined = heads[0].combine(states)
        for position, token_id in enumerate(tokens[1:]):
            hidden = combined[position] if position < len(states) else self.feedback
            if not hidden.isnan().any():
                self.step(token_id, hidden, position)

    def copy(self) -> SlowDrafting:
        other = object.__new__(SlowDrafting)
        other._heads, other._keys, other._values = self._heads, [*self._keys], [*self._values]
        other.logits, other.feedback = self.logits, self.feedback
        return other

    @torch.no_grad()
    def step(self, token_id: int, hidden: torch.Tensor, position: int, draft_position: int = 0) -> None:
        """Compute one more pair; `logits` [vocab_size] and `feedback` [hidden_size] are then those after it."""
        head = self._heads[min(draft_position, len(self._heads) - 1)]
        output, feedback = head(
            torch.tensor([[token_id]]), hidden[None, None], torch.tensor([[position]]), self._attend
        )
        self.logits, self.feedback = head.in_target_ids(head.logits(output))[0, 0], feedback[0, 0]

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self._keys.append(key)
        self._values.append(value)
        repeats = query.shape[1] // key.shape[1]
        keys = torch.cat(self._keys, dim=2).repeat_interleave(repeats, dim=1)
        values = torch.cat(self._values, dim=2).repeat_interleave(repeats, dim=1)
        weights = (query @ keys.transpose(2, 3) * query.shape[-1] ** -0.5).softmax(dim=-1)
        return (weights @ values).transpose(1, 2)


def greedy_chain(heads: Sequence[DraftHead], tokens: Sequence[int], states: torch.Tensor, length: int) -> list[int]:
    """Draft greedily with the reference."""
    drafting = SlowDrafting(heads, tokens, states)
    drafted = [int(drafting.logits.argmax())]
    while len(drafted) < length:
        position = len(tokens) - 2 + len(drafted)
        drafting.step(drafted[-1], drafting.feedback, position, len(drafted))
        drafted.append(int(drafting.logits.argmax()))
    return drafted
