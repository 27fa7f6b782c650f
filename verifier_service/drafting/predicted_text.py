"""A client's prediction of an answer, followed along: as long as the answer keeps to it, it is the draft.

Predicted outputs, as OpenAI's `prediction`: an edited file is mostly the file. Where the answer leaves the prediction,
it is found again by its last few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.verifier_service.messages.request import Request

PREDICTION = "prediction"  # what drafts then, in the place of a drafter's id
MATCH_TOKENS = 3  # of the answer, found in the prediction, say that it goes on from there


class PredictedText:
    """One request's prediction, and where in it the answer stands, which begins after `num_prompt_tokens`."""

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int = 0) -> None:
        self._token_ids = tuple(token_ids)
        self._num_prompt_tokens = num_prompt_tokens
        self._next = 0  # what the answer is expected to say next
        self._is_lost = False  # the answer has left it
        self._num_right = 0  # tokens in a row that it has said before they came
        self._num_seen = num_prompt_tokens  # tokens of the request
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where runs of MATCH_TOKENS end, in their order
        for end in range(MATCH_TOKENS, len(self._token_ids) + 1):
            self._ends.setdefault(self._token_ids[end - MATCH_TOKENS : end], []).append(end)

    def guess(self, token_ids: Sequence[int], length: int) -> tuple[int, ...]:
        """Return what should follow a prompt and its answer so far, at most `length` tokens; (): it does not say.

        Looks at what is new alone.
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
        """Return how likely the next token is as predicted, by how long it has been so (Laplace's rule)."""
        return (self._num_right + 1) / (self._num_right + 2)

    def _find(self, last_ids: tuple[int, ...]) -> None:
        """Go on after the next place that reads like the answer's end, or else the last such place before."""
        ends = self._ends.get(last_ids, [])
        self._is_lost = not ends
        if ends:
            self._next = next((end for end in ends if end > self._next), ends[-1])


class Predictions:
    """The predictions of all requests that have one and are under way."""

    def __init__(self) -> None:
        self._texts: dict[str, PredictedText] = {}

    @property
    def request_ids(self) -> set[str]:
        """The requests of which anything is kept here."""
        return {*self._texts}

    def guess(self, request: Request) -> tuple[int, ...]:
        """Return what a request's prediction says next, as long as its plan allows; (): nothing, or it has none."""
        if not request.prediction_token_ids or request.plan.is_off:
            return ()  # it is not followed meanwhile: what comes back begins with all that was said since
        text = self._texts.get(request.request_id)
        if text is None:
            text = PredictedText(request.prediction_token_ids, request.num_prompt_tokens)
            self._texts[request.request_id] = text
        return text.guess(request.token_ids, request.plan.draft_length)

    def survivals(self, request: Request, length: int) -> list[float]:
        """Return how likely so many tokens of a guess are right, each with all before it."""
        chance = self._texts[request.request_id].chance
        return [chance**depth for depth in range(1, length + 1)]

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
