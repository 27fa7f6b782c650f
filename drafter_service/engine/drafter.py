"""What a drafter is: the asks that it gets, the drafts that it answers, the limits that it is run within."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from outrider.drafter_service.engine.learning_messages import ServedSample
from outrider.verifier_service.messages.columns import Chains
from outrider.verifier_service.messages.draft import Draft, DraftNeeds, DraftSampling, History, Seed, SparseRow
from outrider.verifier_service.messages.history import PastResponse
from outrider.verifier_service.sampling.unread import UnreadChains

GREEDY = DraftSampling(temperature=0.0)


class SessionKey(NamedTuple):
    """One request of one peer: a peer is one connection of one incarnation of a verifier."""

    peer: str
    request_id: str


@dataclass(slots=True, kw_only=True)  # this and the answer are made for each request and round: not frozen
class Ask:
    """Draft `length` tokens after `token_ids`; a new `ask_id` for a session replaces its older ask."""

    key: SessionKey
    ask_id: int  # the engine's own number of the round: verifiers number theirs as they like
    token_ids: Sequence[int]  # committed; the session's own list, to be read only
    sampling: DraftSampling
    length: int  # at least 1; of a tree: its depth
    max_nodes: int = 0  # a tree of so many tokens; 0: a chain
    max_computed: int | None = None  # as in `Commit`
    cache_salt: str = ""  # sessions of different salts share nothing
    history: History | None = None  # in rollouts: what its session shares, instead of the salt
    states: torch.Tensor | None = None  # [num_states, width] of the first tokens; of the last one alone if so needed
    predicted_ids: Sequence[int] = ()  # as in `Commit`
    forced_ids: Sequence[int] = ()  # as in `Commit`

    def answer(
        self,
        token_ids: tuple[int, ...] = (),
        *,
        draft_probs: tuple[SparseRow, ...] | None = None,
        parents: tuple[int, ...] | None = None,
        confidences: tuple[float, ...] | None = None,
    ) -> Draft:
        """Return the complete answer, whose fields are those of `Draft`; its round is `ask_id`.

        A draft has fewer tokens than `length` only where they are point masses, or none at all.
        """
        return Draft(
            request_id=self.key.request_id,
            round_id=self.ask_id,
            position=len(self.token_ids),
            token_ids=token_ids,
            draft_probs=draft_probs,
            parents=parents,
            confidences=confidences,
        )


class Drafter(Protocol):
    """Anything that drafts: one signature for models, heads, n-grams."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def needs(self) -> DraftNeeds: ...

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        """Advance the asks by one batched step of at most `max_num_tokens` tokens.

        They come in turns of their verifiers, each one's oldest first and the oldest of all before any other. Returns
        the answers (`Ask.answer`) that became complete. The other asks are passed again, so that new asks join a
        running batch. Every call makes progress on at least one ask.
        """

    def release(self, key: SessionKey) -> None:
        """Forget whatever is kept for a session; unknown keys are no error."""

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        """Raise `AssertionError` if its own state is inconsistent, or holds anything for a session not in `keys`."""


class ChainAnswers(NamedTuple):
    """Chains of one kind, and which of a step's asks they answer."""

    rows: list[int]
    chains: Chains


@dataclass(frozen=True, slots=True)
class ChainsLaunched:
    """The chains of a step's asks, in their order, that are being drafted."""

    unread: Callable[[], UnreadChains]
    read: Callable[[], list[ChainAnswers]]  # waits until they are drafted; to be called once


@runtime_checkable
class DraftsChains(Protocol):
    """A drafter that can draft the chains of a step as arrays."""

    def draft_chains(self, asks: Sequence[Ask], *, max_num_tokens: int) -> ChainsLaunched | None:
        """Launch the answers to all asks of a step, which `Drafter.draft` would give in some calls.

        Until they are read, nothing else may be asked of the drafter. None: `draft` has to be called instead.
        """


@runtime_checkable
class Remembers(Protocol):
    """A drafter that remembers the responses of rollouts; its `needs.history` says so."""

    def remember(self, history: History, response: Sequence[int]) -> None:
        """Keep a response that has ended, for later ones of its key."""

    def seed(self, history: History, responses: Sequence[PastResponse]) -> None:
        """Keep responses that ended elsewhere, oldest first; raises `ValueError` for ids outside the vocabulary."""


def remember(drafter: Drafter, history: History | None, token_ids: Sequence[int]) -> None:
    """Let a drafter that can keep the response of a rollout that has ended with these tokens, prompt included."""
    if history is not None and history.key and isinstance(drafter, Remembers):
        drafter.remember(history, token_ids[history.num_prompt_tokens :])


def seed(drafter: Drafter, message: Seed) -> bool:
    """Let a drafter that can keep responses that ended elsewhere; return False for ids outside the vocabulary."""
    if message.history.key and isinstance(drafter, Remembers):
        try:
            drafter.seed(message.history, message.responses)
        except ValueError:
            return False
    return True


@runtime_checkable
class TakesTexts(Protocol):
    """A drafter that remembers texts of past requests."""

    def take_texts(self, samples: Sequence[ServedSample]) -> None:
        """Remember texts, oldest first, as of requests that ended here; raises `ValueError` for unknown ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftEngineConfig:
    """Limits of one drafter."""

    max_sessions: int = 256
    session_ttl_s: float = 300.0
    max_num_batched_tokens: int = 512
    max_draft_length: int = 16
    max_tree_nodes: int = 64
    max_state_bytes: int = 4 << 30  # of the target's hidden states, all sessions together
    drafts_greedily: bool = False  # whatever the request's sampling, as point masses

    def __post_init__(self) -> None:
        if min(self.max_sessions, self.max_num_batched_tokens, self.max_draft_length) < 1 or self.session_ttl_s <= 0:
            raise ValueError("max_sessions, session_ttl_s, max_num_batched_tokens, max_draft_length must be positive")
        if min(self.max_tree_nodes, self.max_state_bytes) < 0:
            raise ValueError("max_tree_nodes and max_state_bytes must be 0 or positive")


def first_bad_token(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """Return the first id outside [0, vocab_size), or None."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return None
    return next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)


def known_prefix(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return the ids before the first one outside [0, vocab_size)."""
    return tuple(itertools.takewhile(lambda token_id: 0 <= token_id < vocab_size, token_ids))


def known_or_none(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return ids of which each belongs to its place, or none where one is outside [0, vocab_size)."""
    return tuple(token_ids) if first_bad_token(token_ids, vocab_size) is None else ()
