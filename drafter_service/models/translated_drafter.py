"""Draft with a model whose tokenizer is not the target's.

*Through text* (universal assisted generation; "string-level exact match" of Timor et al. 2025, arXiv 2502.05202): the
committed text is encoded for the inner drafter, and what it drafts is decoded and encoded again for the target. The
draft is a guess of text, so it comes as a chain of point masses, for any sampling.

*Through the intersection of the vocabularies* (`vocabulary_map`): the draft's law lives on the tokens that both know,
so chains and trees, rows and seeds work as with a model of the target's own vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.engine.kv_budget import num_common
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.engine.tree_growth import DEFAULT_TREES, DraftRules, TreeConfig
from outrider.drafter_service.models.model_drafter import ModelForward
from outrider.drafter_service.models.vocabulary_map import MappedRunner, TextTokenizer, VocabularyMap
from outrider.verifier_service.engine.runners import Runner
from outrider.verifier_service.messages.draft import Draft, DraftNeeds, DraftSampling

GREEDY = DraftSampling(temperature=0.0)  # a guess that is compared as text is best the likeliest one
CUT_CHARACTER = "\ufffd"  # what decoders put where the bytes of a character are not all there
NUM_KEPT_TOKENS = 32  # of the target's, encoded again at every ask at least; at most about twice as many
NUM_ANCHOR_TRIES = 8
CONTEXT_LENGTHS = (16, 4, 1)  # committed tokens that a draft is encoded with, the first that comes out unchanged


@dataclass(slots=True)
class _Text:
    """A session's committed tokens in the inner drafter's ids; only what follows the anchor is encoded again.

    target   |<- num_anchored ->|<- decoded, encoded ->|
    inner    |<- num_inner_anchored: fixed ->|<- may change with every new token ->|
    """

    target_ids: list[int] = field(default_factory=list)
    inner_ids: list[int] = field(default_factory=list)
    num_anchored: int = 0
    num_inner_anchored: int = 0


@dataclass(frozen=True, slots=True)
class _Translated:
    """An unanswered ask and what the inner drafter is asked in its place."""

    ask: Ask
    inner: Ask
    forced_ids: list[int]


class TextDrafter:
    """A `Drafter` around one with another tokenizer; they exchange text."""

    def __init__(
        self,
        inner: Drafter,
        *,
        target_tokenizer: TextTokenizer,
        draft_tokenizer: TextTokenizer,
        target_vocab_size: int,
        first_ids: Sequence[int] = (),
    ) -> None:
        """Begin every inner sequence with `first_ids` (the draft model's begin-of-sequence token, if it has one)."""
        if inner.needs != DraftNeeds():
            raise ValueError("a drafter that reads the target's states or predictions cannot have another tokenizer")
        self.vocab_size = target_vocab_size
        self.max_model_len = inner.max_model_len  # a text that is longer in the inner one's tokens gets empty drafts
        self.needs = DraftNeeds()
        self._inner = inner
        self._target, self._draft = target_tokenizer, draft_tokenizer
        self._first_ids = list(first_ids)
        self._texts: dict[SessionKey, _Text] = {}
        self._asked: dict[SessionKey, _Translated] = {}

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        translated = [self._translated(ask) for ask in asks]
        if hopeless := [each for each in translated if each.inner.length < 1 or not each.inner.token_ids]:
            return [self._answer(each, each.forced_ids) for each in hopeless]
        asked = {each.ask.ask_id: each for each in translated}
        drafts = self._inner.draft([each.inner for each in translated], max_num_tokens=max_num_tokens)
        return [self._complete(asked[draft.round_id], draft.token_ids) for draft in drafts]

    def release(self, key: SessionKey) -> None:
        self._texts.pop(key, None)
        self._asked.pop(key, None)
        self._inner.release(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._texts.keys() <= set(keys), "text of a session that is gone"
        assert self._asked.keys() <= self._texts.keys(), "an ask without its text"
        self._inner.check_integrity(keys)

    def _translated(self, ask: Ask) -> _Translated:
        known = self._asked.get(ask.key)
        if known is not None and known.ask.ask_id == ask.ask_id:
            return known
        forced_ids = list(ask.forced_ids[: ask.length])
        text = self._texts.setdefault(ask.key, _Text())
        self._follow(text, [*ask.token_ids, *forced_ids])
        inner_ids = self._first_ids + text.inner_ids
        room = self._inner.max_model_len - len(inner_ids) + 1
        inner = Ask(
            key=ask.key,
            ask_id=ask.ask_id,
            token_ids=inner_ids,
            sampling=GREEDY,
            length=min(ask.length - len(forced_ids), room),
            cache_salt=ask.cache_salt,
        )
        self._asked[ask.key] = _Translated(ask, inner, forced_ids)
        return self._asked[ask.key]

    # --- committed tokens to text to inner tokens ---

    def _follow(self, text: _Text, target_ids: list[int]) -> None:
        """Encode what is new, and as much before it as may be merged with it."""
        if num_common(text.target_ids, target_ids) < text.num_anchored:
            text.num_anchored = text.num_inner_anchored = 0
        text.target_ids = target_ids
        tail = target_ids[text.num_anchored :]
        tail_text = self._target.decode(tail).rstrip(CUT_CHARACTER)
        text.inner_ids = text.inner_ids[: text.num_inner_anchored] + self._draft.encode(tail_text)
        if len(tail) > 2 * NUM_KEPT_TOKENS:
            self._move_anchor(text, tail, tail_text)

    def _move_anchor(self, text: _Text, tail: Sequence[int], tail_text: str) -> None:
        """Look for a place near the end from which encoding anew gives what encoding from the old anchor gave."""
        for start in range(len(tail) - NUM_KEPT_TOKENS, len(tail) - NUM_KEPT_TOKENS - NUM_ANCHOR_TRIES, -1):
            suffix = self._target.decode(tail[start:]).rstrip(CUT_CHARACTER)
            ids = self._draft.encode(suffix)
            if ids and tail_text.endswith(suffix) and text.inner_ids[-len(ids) :] == ids:
                text.num_anchored += start
                text.num_inner_anchored = len(text.inner_ids) - len(ids)
                return

    # --- drafted inner tokens to text to target tokens ---

    def _complete(self, translated: _Translated, drafted: Sequence[int]) -> Draft:
        context = translated.inner.token_ids[-CONTEXT_LENGTHS[0] :]
        before, after = self._draft.decode(context), self._draft.decode([*context, *drafted])
        new_text = after[len(before) :].rstrip(CUT_CHARACTER) if after.startswith(before) else ""
        committed = [*translated.ask.token_ids[-CONTEXT_LENGTHS[0] :], *translated.forced_ids]
        return self._answer(translated, [*translated.forced_ids, *self._target_ids_of(new_text, committed)])

    def _target_ids_of(self, new_text: str, committed: Sequence[int]) -> list[int]:
        """Encode drafted text after the committed tokens, which must come out as they are.

        Where they do not (their last token would have been merged with what follows) the text is encoded alone.
        """
        if not new_text:
            return []
        for length in CONTEXT_LENGTHS:
            context = list(committed[-length:])
            ids = self._target.encode(self._target.decode(context).rstrip(CUT_CHARACTER) + new_text)
            if ids[: len(context)] == context:
                return ids[len(context) :]
        is_cut = self._target.decode(committed).endswith(CUT_CHARACTER)
        return [] if is_cut else self._target.encode(new_text)

    def _answer(self, translated: _Translated, token_ids: Sequence[int]) -> Draft:
        ask = translated.ask
        del self._asked[ask.key]
        known = itertools.takewhile(lambda token_id: token_id < self.vocab_size, token_ids)
        return ask.answer(tuple(known)[: ask.length])


@dataclass(slots=True)
class _Mapped:
    """A session's committed tokens as `MappedRunner` reads them; a run that the draft model does not know is text.

    target   |<- num_done: up to a shared token ->|<- the last run of others, so far ->|
    """

    target_ids: list[int] = field(default_factory=list)
    done_ids: list[int] = field(default_factory=list)  # of the first `num_done` tokens
    num_done: int = 0
    ask_id: int | None = None
    mapped_ids: list[int] = field(default_factory=list)  # of all


class IntersectionDrafter:
    """A `Drafter` over a model that drafts the tokens which its vocabulary shares with the target's."""

    def __init__(
        self,
        runner: Runner,
        rng: torch.Generator,
        *,
        vocabulary: VocabularyMap,
        target_tokenizer: TextTokenizer,
        draft_tokenizer: TextTokenizer,
        top_n: int = 32,
        trees: TreeConfig = DEFAULT_TREES,
        first_ids: Sequence[int] = (),
    ) -> None:
        """Begin every sequence with `first_ids` of the draft model (its begin-of-sequence token, if it has one)."""
        mapped = MappedRunner(runner, vocabulary)
        self.vocab_size = mapped.target_vocab_size
        self.max_model_len = mapped.max_model_len  # a sequence that is longer in its tokens gets empty drafts
        self.needs = DraftNeeds()
        self._vocabulary = vocabulary
        self._target, self._draft = target_tokenizer, draft_tokenizer
        self._first_ids = [self.vocab_size + token_id for token_id in first_ids]
        self._sessions: dict[SessionKey, _Mapped] = {}
        rules = DraftRules(rng=rng, vocab_size=self.vocab_size, top_n=top_n, trees=trees)
        self._inner = PagedDrafter(
            ModelForward(mapped, rules, first_position=lambda ask: len(self._sessions[ask.key].target_ids))
        )

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        mapped = [self._mapped(ask) for ask in asks]
        if hopeless := [ask for ask in mapped if ask.length < 1 or not ask.token_ids]:
            return [ask.answer() for ask in hopeless]
        return self._inner.draft(mapped, max_num_tokens=max_num_tokens)

    def release(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)
        self._inner.release(key)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._sessions.keys() <= set(keys), "tokens of a session that is gone"
        self._inner.check_integrity(keys)

    def _mapped(self, ask: Ask) -> Ask:
        session = self._sessions.setdefault(ask.key, _Mapped())
        if session.ask_id != ask.ask_id:
            self._follow(session, list(ask.token_ids))
            session.ask_id = ask.ask_id
        return dataclasses.replace(
            ask,
            token_ids=session.mapped_ids,
            length=min(ask.length, self._inner.max_model_len - len(session.mapped_ids) + 1),
            forced_ids=list(itertools.takewhile(self._vocabulary.is_shared, ask.forced_ids)),
        )

    def _follow(self, session: _Mapped, target_ids: list[int]) -> None:
        """Map what is new, after the last token that cannot change any more."""
        if num_common(session.target_ids, target_ids) < session.num_done:
            session.done_ids, session.num_done = [], 0
        session.target_ids = target_ids
        run: list[int] = []
        for index in range(session.num_done, len(target_ids)):
            if not self._vocabulary.is_shared(target_ids[index]):
                run.append(target_ids[index])
                continue
            session.done_ids += [*self._as_text(run), target_ids[index]]
            session.num_done = index + 1
            run = []
        session.mapped_ids = [*self._first_ids, *session.done_ids, *self._as_text(run)]

    def _as_text(self, run: Sequence[int]) -> list[int]:
        """Write tokens that the draft model does not know as those of its own that spell the same."""
        text = self._target.decode(run).rstrip(CUT_CHARACTER) if run else ""
        return [self.vocab_size + token_id for token_id in self._draft.encode(text)] if text else []
