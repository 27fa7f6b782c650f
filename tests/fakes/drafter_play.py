"""Drafters without a service: asks by hand, and a greedy target that verifies what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.verifier_service.messages.draft import ROOT, Draft, DraftSampling
from outrider.verifier_service.messages.draft_checks import check_draft

GREEDY = DraftSampling(temperature=0.0)
DRAWN = DraftSampling(temperature=1.0)
SEEDED = DraftSampling(temperature=1.0, seed=7, choice_index=1)
KEY = SessionKey("peer", "request")

Target = Callable[[Sequence[int]], int]  # all tokens so far -> the next one


def key(name: str) -> SessionKey:
    return SessionKey("peer", name)


def ask_of(token_ids: Sequence[int], *, length: int = 8, **fields: object) -> Ask:
    values: dict[str, object] = {"key": KEY, "ask_id": 1, "sampling": GREEDY, **fields}
    return Ask(token_ids=token_ids, length=length, **values)  # type: ignore[arg-type]


def drafts_of(drafter: Drafter, *asks: Ask, budget: int = 256, max_calls: int = 500) -> list[Draft]:
    """Ask until all is answered, checking the books after every call; return the answers in the order of the asks."""
    waiting, found = {ask.key: ask for ask in asks}, dict[SessionKey, Draft]()
    assert len(waiting) == len(asks), "one session asks twice"
    for _ in range(max_calls):
        by_id = {(ask.key.request_id, ask.ask_id): ask for ask in waiting.values()}
        for draft in drafter.draft(list(waiting.values()), max_num_tokens=budget):
            ask = by_id[draft.request_id, draft.round_id]
            found[ask.key] = draft
            del waiting[ask.key]
        drafter.check_integrity([ask.key for ask in asks])
        if not waiting:
            return [found[ask.key] for ask in asks]
    raise AssertionError("drafts do not become complete")


def draft_of(drafter: Drafter, ask: Ask, *, budget: int = 256) -> Draft:
    """Return the answer to one ask, which may be verified."""
    (draft,) = drafts_of(drafter, ask, budget=budget)
    require_valid(ask, draft, drafter.vocab_size)
    return draft


def require_valid(ask: Ask, draft: Draft, vocab_size: int) -> None:
    """Raise `AssertionError` where a verifier would drop a draft, or it is another's."""
    assert (draft.request_id, draft.round_id) == (ask.key.request_id, ask.ask_id)
    assert draft.confidences is None or len(draft.confidences) == len(draft.token_ids)
    limits = {"max_length": ask.length, "max_nodes": ask.max_nodes}
    assert check_draft(draft, draft_vocab_size=vocab_size, **limits) is None
    paths = paths_of(draft)
    assert len({tuple(path) for path in paths}) == len(paths), "two nodes of one path"


def draft_after(drafter: Drafter, token_ids: Sequence[int], **fields: object) -> Draft:
    """Return a drafter's answer to one ask, checked for its form."""
    ask = ask_of(token_ids, **fields)
    (result,) = drafter.draft([ask], max_num_tokens=1)
    check_form(ask, result)
    return result


def check_form(ask: Ask, result: Draft) -> None:
    """Assert what every draft without probabilities keeps to."""
    require_valid(ask, result, 1 << 30)
    assert result.draft_probs is None
    assert result.confidences is not None
    assert all(0.0 <= confidence <= 1.0 for confidence in result.confidences)


def paths_of(result: Draft) -> list[list[int]]:
    """Return, for each drafted token, the tokens from the root to it."""
    paths: dict[int, list[int]] = {ROOT: []}
    for index, token_id in enumerate(result.token_ids):
        parent = index - 1 if result.parents is None else result.parents[index]
        paths[index] = [*paths[parent], token_id]
    return [paths[index] for index in range(len(result.token_ids))]


@dataclass
class Played:
    token_ids: list[int]
    drafts: list[Draft] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)

    @property
    def mean_acceptance_length(self) -> float:
        return 1 + sum(self.num_accepted) / len(self.num_accepted)


def play(
    drafter: Drafter,
    target: Target,
    prompt: Sequence[int],
    num_rounds: int,
    *,
    length: int = 8,
    max_nodes: int = 0,
    num_verified: int | None = None,
    key: SessionKey = KEY,
) -> Played:
    """Verify `num_rounds` drafts, each cut to its first `num_verified` tokens, and commit what the target says."""
    played = Played(list(prompt))
    predicted_ids: tuple[int, ...] = ()
    for _ in range(num_rounds):
        tokens = played.token_ids
        draft = draft_after(drafter, tokens, length=length, max_nodes=max_nodes, predicted_ids=predicted_ids, key=key)
        drafter.check_integrity([key])
        verified = paths_of(draft)[:num_verified]
        predicted_ids = tuple(target([*tokens, *path]) for path in [[], *verified])
        committed = [target(tokens)]
        while committed in verified:
            committed.append(target([*tokens, *committed]))
        tokens += committed
        played.drafts.append(draft)
        played.num_accepted.append(len(committed) - 1)
    return played
