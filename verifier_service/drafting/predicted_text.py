"""A client's prediction of the output as a source of drafts (OpenAI's `prediction`): an edited file is mostly the file.

While the output follows the prediction, the prediction's next tokens are the draft. When the output leaves it, the
output's last few tokens are looked up in the prediction.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.verifier_service.messages.request import Request

PREDICTION = "prediction"  # used as the drafter id in pricing
MATCH_TOKENS = 3  # last output tokens to look up in the prediction


class PredictedText:
    """One request's prediction and the output's place in it. The output begins after `num_prompt_tokens`."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int = 0) -> None:
        self._token_ids = tuple(token_ids)
        self._num_prompt_tokens = num_prompt_tokens
        self._next = 0  # index of the expected next token
        self._is_lost = False  # the output has left the prediction
        self._num_right = 0  # correctly predicted tokens in a row
        self._num_seen = num_prompt_tokens  # tokens of the request
        self._ends: dict[tuple[int, ...], list[int]] = {}  # ends of each n-gram of MATCH_TOKENS, ascending
        for end in range(MATCH_TOKENS, len(self._token_ids) + 1):
            self._ends.setdefault(self._token_ids[end - MATCH_TOKENS : end], []).append(end)

    def guess(self, token_ids: Sequence[int], length: int) -> tuple[int, ...]:
        """Follow the output's new tokens, then return at most `length` predicted ones; (): the output has left it.

        `token_ids`: prompt and output so far.
        """
        for position in range(self._num_seen, len(token_ids)):
            self._num_seen += 1
            is_right = self._next < len(self._token_ids) and self._token_ids[self._next] == token_ids[position]
            if is_right and not self._is_lost:
                self._next += 1
                self._num_right += 1
            else:
                self._num_right = 0
                first = max(self._num_prompt_tokens, position + 1 - MATCH_TOKENS)
                self._find(tuple(token_ids[first : position + 1]))
        return () if self._is_lost else self._token_ids[self._next : self._next + length]

    @property
    def chance(self) -> float:
        """Return the estimated probability that the next token is as predicted (Laplace's rule of succession)."""
        return (self._num_right + 1) / (self._num_right + 2)

    def _find(self, last_ids: tuple[int, ...]) -> None:
        """Continue after the next occurrence of the output's last tokens, else after the last earlier one."""
        ends = self._ends.get(last_ids, [])
        self._is_lost = not ends
        if ends:
            self._next = next((end for end in ends if end > self._next), ends[-1])


class Predictions:
    """The predictions of all running requests that have one."""

    def __init__(self) -> None:
        self._texts: dict[str, PredictedText] = {}

    @property
    def request_ids(self) -> set[str]:
        """The requests whose prediction is being followed."""
        return {*self._texts}

    def guess(self, request: Request) -> tuple[int, ...]:
        """Return a request's predicted next tokens, at most its plan's draft length; (): none."""
        if not request.prediction_token_ids or request.plan.is_off:
            return ()  # when the plan is on again, `guess` follows all tokens since then
        text = self._texts.get(request.request_id)
        if text is None:
            text = PredictedText(request.prediction_token_ids, request.num_prompt_tokens)
            self._texts[request.request_id] = text
        return text.guess(request.token_ids, request.plan.draft_length)

    def survivals(self, request: Request, length: int) -> list[float]:
        """Return the survival of each of the first `length` tokens of a guess."""
        chance = self._texts[request.request_id].chance
        return [chance**depth for depth in range(1, length + 1)]

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
