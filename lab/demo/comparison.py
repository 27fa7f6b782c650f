"""What the demo measures of each act: the same without drafts and with them, and why the one was faster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.lab.demo.ask import Answer
from outrider.lab.demo.questions import Question
from outrider.lab.same_tokens import Pair

WON, LOST = 1.05, 0.97  # on ÷ off, beyond which drafts made a difference
REASONS = {
    "load": "a draft token costs more than it brings",
    "low_acceptance": "too few were right",
    "draft_queue": "drafts come too late",
    "drafter_timeout": "no drafter answers in time",
    "drafter_unavailable": "there is no drafter",
    "warmup": "steps are not measured yet",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One act's answers without and with drafts."""

    what: str
    story: str  # why drafts may win here, or may not: half a sentence
    off: tuple[Answer, ...]
    on: tuple[Answer, ...]
    seconds: tuple[float, float] | None = None  # that all took together, off and on; None: they came one by one
    pairs: tuple[Pair, ...] = ()  # answers that must be the same; none where each had a question of its own

    @property
    def rates(self) -> tuple[float, float]:
        """Tokens per second, off and on."""
        if self.seconds is None:
            return rate(self.off), rate(self.on)
        off_s, on_s = self.seconds
        return num_tokens(self.off) / off_s, num_tokens(self.on) / on_s

    @property
    def ratio(self) -> float | None:
        """On ÷ off; None: nothing was decoded without drafts."""
        off, on = self.rates
        return on / off if off else None

    @property
    def tokens_per_verification(self) -> float | None:
        """What a step that verifies a draft brings, its own token included; None: no draft was verified."""
        num_drafts = sum(answer.speculation.num_drafts for answer in self.on)
        num_accepted = sum(answer.speculation.num_accepted_tokens for answer in self.on)
        return 1 + num_accepted / num_drafts if num_drafts else None

    @property
    def why(self) -> str:
        """Say in one sentence why drafts won here, or did not."""
        speculations = [answer.speculation for answer in self.on]
        num_accepted = sum(one.num_accepted_tokens for one in speculations)
        num_drafted = sum(one.num_draft_tokens for one in speculations)
        num_steps = sum(answer.num_steps for answer in self.on)
        share = sum(one.num_drafts for one in speculations) / max(1, num_steps)
        counts = f"{num_accepted} of {num_drafted} drafted tokens were right, in {share:.0%} of the steps"
        if not num_drafted:
            counts = "nothing was drafted"
        ratio = self.ratio or 1.0
        verdict = "" if ratio >= WON else ": no more than they cost" if ratio >= LOST else ": less than they cost"
        ended = Counter(one.disabled_reason for one in speculations if one.disabled_reason)
        stopped = "".join(
            f"; stopped for {count} of {len(self.on)}: {REASONS.get(reason, reason)}"
            for reason, count in ended.most_common(1)
        )
        return f"{self.story}; {counts}{verdict}{stopped}"


def num_tokens(answers: Sequence[Answer]) -> int:
    return sum(len(answer.tokens) for answer in answers)


def rate(answers: Sequence[Answer]) -> float:
    """Return tokens per second from each answer's first token to its last."""
    seconds = sum(answer.decode_s for answer in answers)
    return sum(len(answer.tokens) - 1 for answer in answers) / seconds if seconds else 0.0


def paired(what: str, question: Question, plain: Answer, answer: Answer) -> Pair:
    """Return two answers to one question, which must have the same tokens."""
    return Pair(what=what, prompt=question.token_ids, expected=plain.token_ids, given=answer.token_ids)
