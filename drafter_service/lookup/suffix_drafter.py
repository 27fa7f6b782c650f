"""SuffixDecoding: continue the longest known suffix, as here or in past responses (Oliaro et al. 2024; DAS, 2025).

Each request has a suffix tree of its prompt and output; each `cache_salt` has one of its finished requests' responses.
In rollouts, a prompt's key takes the salt's place, and samples of one key also draft from one another while they run.
A draft's length is bounded by the match (`max_spec_factor`). A token is drafted while the estimated probability that it
and all before it are right is at least `min_token_prob`. The prior of a token is its share of the occurrences; the
estimate learns the acceptance by match length, count and share. Salts share only these rates.
"""

from __future__ import annotations

import collections
import heapq
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

from outrider.drafter_service.engine.drafter import Ask, SessionKey, first_bad_token
from outrider.drafter_service.engine.learning_messages import ServedSample
from outrider.drafter_service.engine.tree_growth import result_of
from outrider.drafter_service.lookup.prompt_history import PromptHistories, check_ids
from outrider.drafter_service.lookup.suffix_tree import Follower, Place, SuffixTree
from outrider.drafter_service.lookup.token_history import (
    UNBOUNDED_MODEL_LEN,
    Guesses,
    GuessTree,
    LookupDrafter,
    LookupSession,
)
from outrider.verifier_service.messages.draft import NO_NEEDS, ROOT, Draft, DraftNeeds, History, require
from outrider.verifier_service.messages.history import PastResponse

MAX_BRANCHES = 8  # children of one node of a draft tree
MAX_SIBLINGS = 8  # running samples of one prompt that a draft is looked up in: the longest


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Limits of the trees and of a draft; the first four are vLLM's `suffix_decoding_*`."""

    max_tree_depth: int = 24  # tokens of a match plus its continuation
    max_cached_requests: int = 10_000  # past responses, all salts together; 0: none
    max_spec_factor: float = 4.0  # longest draft per matched token; vLLM's 1 cuts drafts that pay
    min_token_prob: float = 0.1  # that a chain's token and all before it are right
    min_tree_prob: float = 0.02  # the same in a tree, which is also bounded by its nodes
    max_cached_tokens: int = 500_000  # of past responses; a token costs about 0.3 KB
    max_versions: int = 4  # of the target's weights, whose rollouts are drafted from

    def __post_init__(self) -> None:
        require(self.max_tree_depth >= 2, "max_tree_depth", "at least 2")
        require(self.max_cached_requests >= 0, "max_cached_requests", "0 (none) or positive")
        require(self.max_spec_factor > 0, "max_spec_factor", "positive")
        require(0 <= self.min_token_prob <= 1, "min_token_prob", "in [0, 1]")
        require(0 <= self.min_tree_prob <= 1, "min_tree_prob", "in [0, 1]")
        require(self.max_cached_tokens >= 0, "max_cached_tokens", "0 (none) or positive")
        require(self.max_versions >= 1, "max_versions", "at least 1")


@dataclass(slots=True, kw_only=True)
class _Session(LookupSession):
    """One request's tree."""

    tree: SuffixTree
    cache_salt: str
    num_prompt_tokens: int
    shared: History | None = None  # in rollouts, instead of the salt


@dataclass(slots=True)
class _Chain:
    token_ids: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    kinds: list[Hashable] = field(default_factory=list)
    expected: float = 0.0  # expected accepted tokens beyond the forced ones

    @classmethod
    def of_forced(cls, forced: Sequence[int]) -> _Chain:
        return cls(list(forced), [1.0] * len(forced), [None] * len(forced))


class PastResponses:
    """One suffix tree per salt, within common bounds; the oldest response is evicted first."""

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._trees: dict[str, SuffixTree] = {}
        self._texts: collections.deque[tuple[str, list[int]]] = collections.deque()  # oldest first
        self._num_tokens = 0

    def tree(self, cache_salt: str) -> SuffixTree | None:
        return self._trees.get(cache_salt)

    def add(self, cache_salt: str, token_ids: Sequence[int]) -> None:
        """Add a response, cut at the front to the bounds."""
        if not self._config.max_cached_requests:
            return
        token_ids = token_ids[max(0, len(token_ids) - self._config.max_cached_tokens) :]
        if len(token_ids) < 2:  # no token has a next one
            return
        tree = self._trees.setdefault(cache_salt, SuffixTree(self._config.max_tree_depth))
        for token_id in token_ids:
            tree.append(token_id)
        self._texts.append((cache_salt, tree.close()))
        self._num_tokens += len(token_ids)
        while len(self._texts) > self._config.max_cached_requests or self._num_tokens > self._config.max_cached_tokens:
            self._remove_oldest()

    def _remove_oldest(self) -> None:
        cache_salt, text = self._texts.popleft()
        tree = self._trees[cache_salt]
        tree.remove(text)
        self._num_tokens -= len(text)
        if tree.is_empty():
            del self._trees[cache_salt]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if bounds are exceeded, or the trees have other texts."""
        assert len(self._texts) <= self._config.max_cached_requests, "more past responses than allowed"
        assert self._num_tokens == sum(len(text) for _, text in self._texts), "tokens that are in no response"
        assert self._num_tokens <= self._config.max_cached_tokens, "more tokens of past responses than allowed"
        assert self._trees.keys() == {cache_salt for cache_salt, _ in self._texts}, "trees without responses"
        known = {id(text) for _, text in self._texts}
        for tree in self._trees.values():
            tree.check_integrity()
            assert all(id(node.source) in known for node, _ in tree.nodes()), "a label in a response that is gone"


class SuffixDrafter(LookupDrafter[_Session]):
    """A `Drafter` over suffix trees, for chains and trees."""

    def __init__(
        self,
        *,
        vocab_size: int,
        config: SuffixConfig | None = None,
        max_model_len: int = UNBOUNDED_MODEL_LEN,
        needs: DraftNeeds = NO_NEEDS,
    ) -> None:
        super().__init__(vocab_size=vocab_size, max_model_len=max_model_len, needs=needs)
        self._config = config or SuffixConfig()
        self._past = PastResponses(self._config)
        self._histories = PromptHistories(
            max_tree_depth=self._config.max_tree_depth,
            max_responses=self._config.max_cached_requests,
            max_tokens=self._config.max_cached_tokens,
            num_versions=self._config.max_versions,
        )
        self._samples: dict[str, dict[SessionKey, _Session]] = {}  # the sessions of rollouts, by their history's key

    def release(self, key: SessionKey) -> None:
        """Close a session; its response joins the past responses of its salt, in rollouts when it is remembered."""
        session = self._sessions.pop(key, None)
        if session is None:
            return
        if session.shared is None:
            self._past.add(session.cache_salt, session.history.token_ids[session.num_prompt_tokens :])
        elif session.shared.key:
            samples = self._samples[session.shared.key]
            del samples[key]
            if not samples:
                del self._samples[session.shared.key]

    def take_texts(self, samples: Sequence[ServedSample]) -> None:
        """Remember the responses of requests that ended elsewhere, oldest first, each for its salt.

        Raises `ValueError` and remembers none for ids outside the vocabulary.
        """
        responses = [(one.cache_salt, one.token_ids[one.num_prompt_tokens :]) for one in samples]
        if any(first_bad_token(response, self.vocab_size) is not None for _, response in responses):
            raise ValueError(f"samples: token ids outside [0, {self.vocab_size})")
        for cache_salt, response in responses:
            self._past.add(cache_salt, response)

    # --- histories of rollouts ---

    def remember(self, history: History, response: Sequence[int]) -> None:
        """Keep a rollout's response for later ones of its key."""
        self._histories.add(history.key, history.weight_version, response)

    def seed(self, history: History, responses: Sequence[PastResponse]) -> None:
        """Keep responses that ended elsewhere, oldest first; raises `ValueError` for ids outside the vocabulary."""
        check_ids(history.key, (one.token_ids for one in responses), self.vocab_size)
        self._histories.seed(history.key, history.weight_version, responses)

    def export(self) -> bytes:
        """Return the histories of all keys, for `load`."""
        return self._histories.export()

    def load(self, payload: bytes) -> None:
        """Replace the histories of all keys by exported ones; raises `ValueError` and changes nothing if malformed."""
        self._histories.load(payload, self.vocab_size)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        super().check_integrity(keys)
        for session in self._sessions.values():
            assert session.tree.token_ids == session.history.token_ids, "a suffix tree of other tokens"
            session.tree.check_integrity()
        self._past.check_integrity()
        self._histories.check_integrity()
        in_rollouts = {key for key, session in self._sessions.items() if session.shared and session.shared.key}
        found = [key for samples in self._samples.values() for key in samples]
        assert sorted(found) == sorted(in_rollouts), "samples of sessions that are gone"

    # --- one ask ---

    def _answer(self, ask: Ask) -> Draft:
        session, new_ids = self._follow(ask)
        for token_id in new_ids:
            session.tree.append(token_id)
        forced = list(ask.forced_ids[: ask.length])
        places = self._places(session, forced)
        make = self._tree if ask.max_nodes else self._chain
        return make(ask, session, forced, places)

    def _is_continued_by(self, session: _Session, ask: Ask) -> bool:
        is_same = (session.cache_salt, session.shared) == (ask.cache_salt, ask.history)
        return is_same and super()._is_continued_by(session, ask)

    def _start(self, ask: Ask) -> _Session:
        session = _Session(
            tree=SuffixTree(self._config.max_tree_depth),
            cache_salt=ask.cache_salt,
            num_prompt_tokens=len(ask.token_ids),
            shared=ask.history,
        )
        if ask.history is not None and ask.history.key:
            self._histories.use(ask.history.key, ask.history.weight_version)
            self._samples.setdefault(ask.history.key, {})[ask.key] = session
        return session

    def _places(self, session: _Session, forced: list[int]) -> list[Place]:
        """Return the places of the last tokens in the request's own tree and in those that it may look at."""
        tail = session.history.token_ids[1 - self._config.max_tree_depth :] + forced
        own = session.tree.longest_match(tail) if forced else session.tree.longest_repeat()
        places = (own, *(tree.longest_match(tail) for tree in self._shared_trees(session)))
        return [place for place in places if place is not None]

    def _shared_trees(self, session: _Session) -> list[SuffixTree]:
        """Return the trees of past responses and, in rollouts, of the longest running samples of the same key."""
        if session.shared is None:
            past = self._past.tree(session.cache_salt)
            return [] if past is None else [past]
        if not session.shared.key:
            return []
        known = self._histories.find(session.shared.key)
        others = [one.tree for one in self._samples[session.shared.key].values() if one is not session]
        longest = heapq.nlargest(MAX_SIBLINGS, others, key=lambda tree: len(tree.token_ids))
        return longest if known is None else [known.tree, *longest]

    def _chain(self, ask: Ask, session: _Session, forced: list[int], places: Sequence[Place]) -> Draft:
        chain = self._best_chain(session, forced, places, ask.length)
        if not forced:
            session.guesses = Guesses(chain.token_ids, None, chain.kinds)
        return ask.answer(tuple(chain.token_ids), confidences=tuple(chain.rates))

    def _best_chain(self, session: _Session, forced: list[int], places: Sequence[Place], length: int) -> _Chain:
        """Return the chain with the most expected tokens; every chain begins with the forced ones."""
        chains = [self._chain_from(place, session, forced, length) for place in places]
        return max(chains, key=lambda chain: chain.expected, default=_Chain.of_forced(forced))

    def _chain_from(self, place: Place, session: _Session, forced: list[int], length: int) -> _Chain:
        """Follow the most frequent tokens; at the end of the request's own text, continue with the draft itself."""
        chain = _Chain.of_forced(forced)
        survival = 1.0
        num_copied = 0
        for _ in range(min(length - len(forced), self._max_length(place))):
            follower = place.likeliest()
            if follower is None and place.node.source is session.tree.token_ids:
                after = place._replace(depth=place.depth + 1)
                follower = Follower(chain.token_ids[num_copied], 1.0, after)
                num_copied += 1
            if follower is None:
                break
            kind, rate = self._judge(follower)
            survival *= rate
            if survival < self._config.min_token_prob:
                break
            chain.token_ids.append(follower.token_id)
            chain.rates.append(rate)
            chain.kinds.append(kind)
            chain.expected += survival
            place = follower.place
        return chain

    def _tree(self, ask: Ask, session: _Session, forced: list[int], places: Sequence[Place]) -> Draft:
        """Draft the best chain and other likely tokens, from both trees."""
        guesses = GuessTree()
        chain = self._best_chain(session, forced, places, ask.length)
        node = root = ROOT
        for depth, (token_id, rate, kind) in enumerate(zip(chain.token_ids, chain.rates, chain.kinds, strict=True)):
            node = guesses.add(node, token_id, rate, kind)
            root = node if depth < len(forced) else root
        for place in places:
            self._grow(guesses, root, place, ask.max_nodes, ask.length - len(forced))
        if not forced:
            session.guesses = guesses.guesses()
        return result_of(ask, guesses.best(ask.max_nodes))

    def _grow(self, guesses: GuessTree, root: int, place: Place, max_nodes: int, max_length: int) -> None:
        """Add the likeliest continuations of a place, best first."""
        limit = place.depth + min(max_length, self._max_length(place))
        frontier = [(-1.0, root, place)]
        num_guesses = 0
        while frontier and num_guesses < max_nodes:
            survival, parent, place = heapq.heappop(frontier)
            if place.depth == limit:
                continue
            for follower in place.followers(MAX_BRANCHES):
                kind, rate = self._judge(follower)
                if -survival * rate < self._config.min_tree_prob:
                    break
                index = guesses.add(parent, follower.token_id, rate, kind)
                heapq.heappush(frontier, (survival * rate, index, follower.place))
                num_guesses += 1

    def _max_length(self, place: Place) -> int:
        return max(1, int(self._config.max_spec_factor * place.depth))

    def _judge(self, follower: Follower) -> tuple[Hashable, float]:
        """Return a guess's kind and estimated acceptance."""
        place = follower.place
        kind = (min(place.depth, 32).bit_length(), min(place.node.count, 64).bit_length(), int(4 * follower.share))
        return kind, self._estimate.rate(kind, follower.share * place.depth / (place.depth + 1))
