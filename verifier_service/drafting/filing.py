"""Where responses are filed, for the drafters that remember them.

In rollouts by prompt: trainers send the same prompts epoch after epoch, and some use `cache_salt` for the version of
their policy. Elsewhere by `cache_salt`, a border of privacy, which drafters see to. What must not be kept is filed
nowhere, in rollouts and elsewhere. Nor does a request of a lossy rule see what is filed: where a rule takes whatever is
drafted, as it does at high temperatures, it would say the texts of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.verifier_service.drafting.drafter_record import DrafterRecord
from outrider.verifier_service.messages.draft import Close, History, Open, Seed, VerifierMessage
from outrider.verifier_service.messages.history import PastResponse, filed_under
from outrider.verifier_service.messages.request import Request


class Filing:
    """Opens requests' sessions with the key of their histories, and gives drafters the responses that have ended."""

    def __init__(self, *, in_rollouts: bool) -> None:
        self._in_rollouts = in_rollouts
        self._seeds: list[Seed] = []  # at once they would miss a drafter whose coming up was not read yet
        self.weight_version = ""  # of the target's weights, which the engine changes

    def opening(self, request: Request, num_tokens: int | None = None) -> Open:
        """Return the message that opens a request's session with its first tokens; None: with all."""
        return Open(
            request_id=request.request_id,
            sampling=request.sampling.of_draft,
            token_ids=tuple(request.token_ids[:num_tokens]),
            cache_salt=request.cache_salt,
            history=self._history(request) if self._in_rollouts or _stands_alone(request) else None,
            may_learn=request.may_learn,
        )

    def ending(self, request: Request, drafters: Mapping[str, DrafterRecord]) -> dict[str, list[VerifierMessage]]:
        """Return messages with the whole response of an ended request, to every drafter that keeps histories.

        A drafter lacks what was committed without asking it: all of it, while drafts do not pay.
        """
        keeping = [drafter_id for drafter_id, record in drafters.items() if record.needs.history]
        if not self._in_rollouts or request.history_key == "" or not keeping or request.num_output_tokens <= 0:
            return {}
        opening = self.opening(request)
        return {drafter_id: [opening, Close(request_id=request.request_id)] for drafter_id in keeping}

    def seed(self, request: Request, responses: Sequence[PastResponse]) -> None:
        """Keep responses of a request's key that ended elsewhere, until `take_seeds`."""
        if responses and self._in_rollouts and request.history_key != "":
            history = self._history(request)
            self._seeds.append(Seed(request_id=request.request_id, history=history, responses=tuple(responses)))

    def take_seeds(self, drafters: Mapping[str, DrafterRecord]) -> dict[str, list[VerifierMessage]]:
        """Return messages with the responses that `seed` has kept, to every drafter that keeps histories."""
        if not self._seeds:
            return {}
        seeds, self._seeds = self._seeds, []
        return {drafter_id: [*seeds] for drafter_id, record in drafters.items() if record.needs.history}

    def _history(self, request: Request) -> History:
        prompt = request.token_ids[: request.num_prompt_tokens]
        key = "" if _stands_alone(request) else filed_under(request.history_key, prompt, request.partition)
        return History(key=key, num_prompt_tokens=request.num_prompt_tokens, weight_version=self.weight_version)


def _stands_alone(request: Request) -> bool:
    """Return whether a request neither sees others' texts nor leaves its own behind."""
    return request.history_key == "" or request.sampling.acceptance.is_lossy
