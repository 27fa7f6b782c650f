"""Draft what followed the last token most often so far in the request's own text, token after token."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outrider.drafter_service.plugin import Ask, Draft, DraftNeeds, PluginContext, SessionKey


@dataclass
class Session:
    """One request's bigrams: how often which token followed which."""

    num_tokens: int = 0
    followers: defaultdict[int, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))


class BigramDrafter:
    """A `Drafter` of point masses: whatever it guesses, the tokens are the target's."""

    def __init__(self, context: PluginContext, min_count: int) -> None:
        self.vocab_size, self.max_model_len = context.vocab_size, context.max_model_len
        self.needs = DraftNeeds()  # tokens alone
        self._min_count = min_count
        self._sessions: defaultdict[SessionKey, Session] = defaultdict(Session)

    def draft(self, asks: Sequence[Ask], *, max_num_tokens: int) -> list[Draft]:
        return [ask.answer(self._guess(ask)) for ask in asks]

    def release(self, key: SessionKey) -> None:
        self._sessions.pop(key, None)

    def check_integrity(self, keys: Collection[SessionKey]) -> None:
        assert self._sessions.keys() <= set(keys), "bigrams of a session that is gone"

    def _guess(self, ask: Ask) -> tuple[int, ...]:
        session = self._sessions[ask.key]
        for index in range(max(1, session.num_tokens), len(ask.token_ids)):  # what was committed since
            session.followers[ask.token_ids[index - 1]][ask.token_ids[index]] += 1
        session.num_tokens = len(ask.token_ids)
        guessed, last = [], ask.token_ids[-1]
        while len(guessed) < ask.length and last in session.followers:
            last, count = session.followers[last].most_common(1)[0]
            if count < self._min_count:
                break
            guessed.append(last)
        return tuple(guessed)


def build(context: PluginContext) -> BigramDrafter:
    """Make the drafter; its one option is `min_count`: pairs that were seen less often are not drafted."""
    min_count = context.options.get("min_count", 1)
    if context.options.keys() - {"min_count"} or not isinstance(min_count, int) or min_count < 1:
        raise ValueError("plugin_config: min_count, a positive whole number, is the only option")
    return BigramDrafter(context, min_count)
