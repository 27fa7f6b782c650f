"""A drafting engine that runs ahead, over a model or a head, and a verifier that says things to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fakes.runner import TimedRunner, continuation
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, Open, States
from tiny.drafters import eagle_drafter, model_drafter
from tiny.heads import VOCAB_SIZE, SlowDrafting, eagle3_head, eagle_head, mtp_head, states_of

GREEDY = DraftSampling(temperature=0.0)
PROMPT = [5, 6, 0, 1, 2, 3, 4]
LENGTH = 3
FEW = 7  # tokens of a vocabulary whose outcomes can all be prepared for
HEADS: Mapping[str, Callable[[], list[DraftHead]]] = {
    "model": list,
    "eagle": lambda: [eagle_head()],
    "eagle3": lambda: [eagle3_head()],
    "mtp": lambda: [mtp_head()],
    "switched": lambda: [eagle3_head(seed) for seed in (1, 2, 3)],
}


class CountingRunner(HeadRunner):
    """A head's runner that notes how many pairs each forward computes."""

    now_s = 0.0

    def __init__(self, heads: Sequence[DraftHead], **sizes: Any) -> None:
        super().__init__(SwitchedHeads(heads), **sizes)
        self.num_computed: list[int] = []

    def execute(self, batch: ScheduledBatch, *args: Any, **options: Any) -> Any:
        self.num_computed.append(batch.num_tokens)
        return super().execute(batch, *args, **options)


class CountingModel(TimedRunner):
    """Likewise, of a model."""

    def __init__(self, step_s: float, **sizes: int) -> None:
        super().__init__(lambda count: step_s, **sizes)
        self.num_computed: list[int] = []

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        self.num_computed.append(batch.num_tokens)
        self.now_s += self.curve(batch.num_tokens)
        return super(TimedRunner, self).execute(batch, chosen)


class Ahead:
    """The engine, and what a verifier has told it; time passes by a model's steps alone."""

    def __init__(
        self,
        kind: str = "model",
        *,
        num_branches: int = 6,
        budget: int = 64,
        vocab_size: int = VOCAB_SIZE,
        step_s: float = 0.0,
        **sizes: int,
    ) -> None:
        self.heads, self.vocab_size = HEADS[kind](), vocab_size
        sizes = {"num_blocks": 256, "block_size": 4, "max_model_len": 64, **sizes}
        options = {"num_ahead_branches": num_branches, "vocab_size": vocab_size}
        rng = torch.Generator().manual_seed(0)
        self.runner: Any
        if self.heads:
            self.runner = CountingRunner(self.heads, **sizes)
            self.drafter = eagle_drafter(self.runner, rng, **options)
        else:
            self.runner = CountingModel(step_s, vocab_size=vocab_size, **sizes)
            self.drafter = model_drafter(self.runner, rng, **options)
        config = DraftEngineConfig(max_num_batched_tokens=budget, max_draft_length=8, max_tree_nodes=6)
        self.engine = DraftEngine(self.drafter, clock=lambda: self.runner.now_s, config=config, ahead=self.drafter)
        self.tokens: dict[str, list[int]] = {}
        self.num_states: dict[str, int] = {}  # that were told
        self._round_ids = itertools.count(1)

    @classmethod
    def prepared(cls, kind: str = "model", **options: Any) -> Ahead:
        """One whose session was asked for once."""
        ahead = cls(kind, **options)
        ahead.open()
        assert ahead.ask().token_ids == ahead.expected()
        return ahead

    # --- what a verifier says ---

    def open(self, tokens: Sequence[int] = PROMPT, name: str = "r", sampling: DraftSampling = GREEDY) -> None:
        self.tokens[name], self.num_states[name] = list(tokens), 0
        self.engine.handle("v", Open(request_id=name, sampling=sampling, token_ids=tuple(tokens)))

    def close(self, name: str = "r") -> None:
        self.engine.handle("v", Close(request_id=name))
        self.engine.check_integrity()

    def commit(
        self, *new: int, name: str = "r", length: int = LENGTH, num_late: int = 0, first: int = 0, **fields: Any
    ) -> list[Draft]:
        """Say what was committed, with all states but the last `num_late`; return what is answered without a step."""
        position = len(self.tokens[name])
        self.tokens[name] += new
        self._tell_states(name, num_late, first)
        ids = {"request_id": name, "round_id": next(self._round_ids), "position": position}
        self.engine.handle("v", Commit(token_ids=new, max_length=length, **ids, **fields))
        self.engine.check_integrity()
        return drafts_in(self.engine.flush())

    def _tell_states(self, name: str, num_late: int, first: int) -> None:
        if not self.heads:
            return
        states = states_of(self.tokens[name], self.heads[0], first)
        told = states[self.num_states[name] : len(states) - num_late]
        if len(told):
            at = {"position": self.num_states[name], "dtype": "float32", "width": states.shape[1]}
            self.engine.handle("v", States(request_id=name, data=told.numpy().tobytes(), **at))
            self.num_states[name] += len(told)

    def ask(self, *new: int, name: str = "r", **fields: Any) -> Draft:
        at_once = self.commit(*new, name=name, **fields)
        (draft,) = at_once or [self.run()[name]]
        return draft

    # --- what the engine does ---

    def run(self) -> dict[str, Draft]:
        """Draft what is asked for."""
        found: dict[str, Draft] = {}
        for _ in range(500):
            if not self.engine.has_work():
                return found
            found |= {draft.request_id: draft for draft in drafts_in(self.engine.step())}
            self.engine.check_integrity()
        raise AssertionError("drafts do not become complete")

    def idle(self, num_steps: int = 1000) -> list[int]:
        """Let the engine have its spare time; return how many tokens each forward computed."""
        num_before = len(self.runner.num_computed)
        for _ in range(num_steps):
            if not self.engine.has_spare_work():
                break
            self.engine.run_ahead()
            self.engine.check_integrity()
        return self.runner.num_computed[num_before:]

    def outcomes(self, name: str = "r") -> list[tuple[int, ...]]:
        """Return what a session's next commit may be that is prepared for, likeliest first."""
        (trunk,) = [trunk for key, trunk in self.drafter._cache._trunks.items() if key.request_id == name]
        return list(trunk.branches)

    def surprise(self) -> int:
        """Return a token that, were it to come next in the one session, nobody has thought of."""
        return next(token_id for token_id in range(self.vocab_size) if (token_id,) not in self.outcomes())

    @property
    def hits_and_misses(self) -> tuple[int, int]:
        return self.engine.counters.num_cache_hits, self.engine.counters.num_cache_misses

    # --- what is right ---

    def expected(self, length: int = LENGTH, name: str = "r", *, outcome: Sequence[int] = ()) -> tuple[int, ...]:
        """Return what is drafted from the states that were told, or after an outcome whose states are not known."""
        tokens = self.tokens[name]
        if not self.heads:
            return continuation([*tokens, *outcome], length, self.vocab_size)
        drafting = SlowDrafting(self.heads, tokens, states_of(tokens, self.heads[0])[: self.num_states[name]])
        if outcome:
            drafting = self.drafting_of(tokens, outcome)
        return self.chain_of(drafting, len(tokens) + len(outcome), length)

    def drafting_of(self, tokens: Sequence[int], outcome: Sequence[int]) -> SlowDrafting:
        """Return a head's reference after an outcome whose states are not known."""
        drafting = SlowDrafting(self.heads, tokens, states_of(tokens, self.heads[0]))
        for depth, token_id in enumerate(outcome[:-1]):
            drafting.step(token_id, drafting.feedback, len(tokens) - 1 + depth, depth + 1)
        drafting.step(outcome[-1], drafting.feedback, len(tokens) + len(outcome) - 2)
        return drafting

    def chain_of(self, drafting: SlowDrafting, num_tokens: int, length: int = LENGTH) -> tuple[int, ...]:
        """Draft greedily after `num_tokens` tokens."""
        drafted = [int(drafting.logits[: self.vocab_size].argmax())]
        while len(drafted) < length:
            drafting.step(drafted[-1], drafting.feedback, num_tokens - 2 + len(drafted), len(drafted))
            drafted.append(int(drafting.logits[: self.vocab_size].argmax()))
        return tuple(drafted)


def drafts_in(answers: Sequence[tuple[str, object]]) -> list[Draft]:
    found = [message for _, message in answers]
    assert all(isinstance(message, Draft) for message in found)
    return found  # type: ignore[return-value]
