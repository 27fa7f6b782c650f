"""What rollouts leave behind: the responses of each prompt's earlier samples (DAS, 2025; HistoRL, 2025).

A trainer samples the same prompts epoch after epoch, from weights that change. So each key, a prompt, has a suffix tree
of its own, of the last weight versions alone. All keys together are bounded; what was not used for longest goes first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.drafter_service.lookup.suffix_tree import SuffixTree
from outrider.verifier_service.messages.history import PastResponse
from outrider.verifier_service.messages.wire import decode, encode


class Response(NamedTuple):
    """A response that has ended: the number of the newest version known then, and its last tokens."""

    version: int
    token_ids: list[int]


@dataclass(slots=True)
class PromptHistory:
    """The responses of one key."""

    tree: SuffixTree
    responses: deque[Response] = field(default_factory=deque)  # oldest first, versions ascending
    num_tokens: int = 0

    def add(self, version: int, token_ids: Sequence[int]) -> None:
        """Add a response that has ended."""
        for token_id in token_ids:
            self.tree.append(token_id)
        self.responses.append(Response(version, self.tree.close()))
        self.num_tokens += len(token_ids)

    def remove_oldest(self) -> None:
        """Remove the response that ended first."""
        oldest = self.responses.popleft()
        self.tree.remove(oldest.token_ids)
        self.num_tokens -= len(oldest.token_ids)

    def check_integrity(self) -> None:
        """Raise `AssertionError` if tree, tokens and versions contradict each other."""
        self.tree.check_integrity()
        assert self.num_tokens == sum(len(one.token_ids) for one in self.responses), "tokens that are in no response"
        versions = [one.version for one in self.responses]
        assert versions == sorted(versions), "an older version after a newer one"


@dataclass(frozen=True, slots=True)
class SavedResponse:
    version: int  # its place in `SavedHistories.versions`
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class SavedHistories:
    """All histories, as they are exported: keys in the order of their last use, responses in that of their end."""

    versions: list[str]
    keys: dict[str, list[SavedResponse]]


class PromptHistories:
    """The histories of all keys, within bounds over all of them."""

    def __init__(self, *, max_tree_depth: int, max_responses: int, max_tokens: int, num_versions: int) -> None:
        """`num_versions`: the weight versions whose responses are kept, this one included."""
        self._max_tree_depth, self._max_responses, self._max_tokens = max_tree_depth, max_responses, max_tokens
        self._keys: OrderedDict[str, PromptHistory] = OrderedDict()  # the least recently used first
        self._num_versions = num_versions
        self._versions: deque[str] = deque(maxlen=num_versions)  # oldest first
        self._newest = 0  # number of the newest version; seeded responses may be older than the first one known here
        self._num_responses = self._num_tokens = 0

    def find(self, key: str) -> PromptHistory | None:
        """Return what is known of a key."""
        return self._keys.get(key)

    def use(self, key: str, weight_version: str) -> None:
        """Note that a response of a key begins: the key was used, and responses of too old versions are dropped."""
        self._note_version(weight_version)
        history = self._keys.get(key)
        if history is None:
            return
        self._keys.move_to_end(key)
        while history.responses and history.responses[0].version <= self._last_dropped:
            self._remove_oldest(history)
        if not history.responses:
            del self._keys[key]

    def add(self, key: str, weight_version: str, token_ids: Sequence[int]) -> None:
        """Add a response that has ended, cut at the front to the bounds.

        It counts as of the newest version known by now: a sample may have gone on under new weights.
        """
        self.use(key, weight_version)
        self._add(key, self._newest, self._bounded(token_ids))

    def seed(self, key: str, weight_version: str, responses: Iterable[PastResponse]) -> None:
        """Add responses that ended elsewhere, oldest first, but for those that are known: each is kept once.

        Of responses with the same tokens, as many are kept as are given at a time. None counts as older than what is
        there of its key: a tree's oldest text leaves it first.
        """
        self.use(key, weight_version)
        history = self._keys.get(key)
        known = Counter(tuple(one.token_ids) for one in (history.responses if history is not None else ()))
        oldest = self._last_dropped + 1 if history is None else history.responses[-1].version
        for one in responses:
            kept = tuple(self._bounded(one.token_ids))
            if known[kept]:
                known[kept] -= 1
            elif one.age < self._num_versions:
                oldest = max(oldest, self._newest - one.age)
                self._add(key, oldest, kept)

    @property
    def _last_dropped(self) -> int:
        """Number of the newest version whose responses are too old."""
        return self._newest - self._num_versions

    def _bounded(self, token_ids: Sequence[int]) -> Sequence[int]:
        return token_ids[max(0, len(token_ids) - self._max_tokens) :]

    def _add(self, key: str, version: int, kept: Sequence[int]) -> None:
        if not self._max_responses or len(kept) < 2:  # no token has a next one
            return
        history = self._keys.setdefault(key, PromptHistory(SuffixTree(self._max_tree_depth)))
        history.add(version, kept)
        self._num_responses += 1
        self._num_tokens += len(kept)
        while self._num_responses > self._max_responses or self._num_tokens > self._max_tokens:
            self._drop_least_used()

    def _note_version(self, weight_version: str) -> None:
        if weight_version not in self._versions:
            self._versions.append(weight_version)
            self._newest += 1

    def _drop_least_used(self) -> None:
        """Drop the key that was not used for longest; of the only key, its oldest response."""
        if len(self._keys) == 1:
            self._remove_oldest(next(iter(self._keys.values())))
            return
        _, history = self._keys.popitem(last=False)
        self._num_responses -= len(history.responses)
        self._num_tokens -= history.num_tokens

    def _remove_oldest(self, history: PromptHistory) -> None:
        self._num_responses -= 1
        self._num_tokens -= len(history.responses[0].token_ids)
        history.remove_oldest()

    def export(self) -> bytes:
        """Return all histories as msgpack."""
        first = self._newest - len(self._versions) + 1
        keys = {
            key: [
                SavedResponse(max(0, one.version - first), one.token_ids)
                for one in known.responses
                if one.version > self._last_dropped  # the others are about to be dropped
            ]
            for key, known in self._keys.items()
        }
        return encode(SavedHistories(list(self._versions), {key: kept for key, kept in keys.items() if kept}))

    def load(self, payload: bytes, vocab_size: int) -> None:
        """Replace all histories by exported ones; raises `ValueError` and changes nothing if they cannot be."""
        saved: SavedHistories = decode(payload, (SavedHistories,))
        if len(set(saved.versions)) < len(saved.versions):
            raise ValueError("histories: a version twice")
        for key, responses in saved.keys.items():
            check_ids(key, (one.token_ids for one in responses), vocab_size)
            versions = [one.version for one in responses]
            if versions != sorted(versions) or any(not 0 <= version < len(saved.versions) for version in versions):
                raise ValueError(f"histories: {key!r} has versions that are unknown or fall")
        self._keys.clear()
        self._versions.clear()
        self._newest = self._num_responses = self._num_tokens = 0
        for version in saved.versions:
            self._note_version(version)
        for key, responses in saved.keys.items():
            for one in responses:
                self._add(key, one.version + 1, self._bounded(one.token_ids))

    def check_integrity(self) -> None:
        """Raise `AssertionError` if bounds are exceeded, or the sums are those of other histories."""
        known = self._keys.values()
        for history in known:
            history.check_integrity()
            assert history.responses, "a key without responses"
        assert self._num_responses == sum(len(history.responses) for history in known) <= self._max_responses
        assert self._num_tokens == sum(history.num_tokens for history in known) <= self._max_tokens


def check_ids(key: str, responses: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Raise `ValueError` unless all ids are in the vocabulary: drafts of others would be refused."""
    for response in responses:
        if any(not 0 <= token_id < vocab_size for token_id in response):
            raise ValueError(f"histories: {key!r} has token ids outside [0, {vocab_size})")
