"""Where responses are filed, for the drafters that remember them.

In rollouts by prompt: trainers send the same prompts epoch after epoch, and some use `cache_salt` for the version of
their policy. Elsewhere by `cache_salt`, a border of privacy, which drafters see to.
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
        self.weight_version = ""  # of the target's weights, which the engine changes

    def opening(self, request: Request) -> Open:
        """Return the message that opens a request's session."""
        return Open(
            request_id=request.request_id,
            sampling=request.sampling.of_draft,
            token_ids=tuple(request.token_ids),
            cache_salt=request.cache_salt,
            history=self._history(request) if self._in_rollouts else None,
        )

    def ending(self, request: Request, drafters: Mapping[str, DrafterRecord]) -> dict[str, list[VerifierMessage]]:
        """Return messages with the whole response of an ended request, to every drafter that keeps histories.

        A drafter lacks what was committed without asking it: all of it, while drafts do not pay.
        """
        keeping = self._keeping(request, drafters)
        if not keeping or request.num_output_tokens <= 0:
            return {}
        opening = self.opening(request)
        return {drafter_id: [opening, Close(request_id=request.request_id)] for drafter_id in keeping}

    def seeding(
        self, request: Request, responses: Sequence[PastResponse], drafters: Mapping[str, DrafterRecord]
    ) -> dict[str, list[VerifierMessage]]:
        """Return messages with responses of a request's key that ended elsewhere, to the same drafters as `ending`."""
        keeping = self._keeping(request, drafters)
        if not keeping:
            return {}
        seed = Seed(request_id=request.request_id, history=self._history(request), responses=tuple(responses))
        return {drafter_id: [seed] for drafter_id in keeping}

    def _keeping(self, request: Request, drafters: Mapping[str, DrafterRecord]) -> list[str]:
        """Return the drafters that keep the histories of a request's key."""
        if not self._in_rollouts or request.history_key == "":
            return []
        return [drafter_id for drafter_id, record in drafters.items() if record.needs.history]

    def _history(self, request: Request) -> History:
        key = filed_under(request.history_key, request.token_ids[: request.num_prompt_tokens])
        return History(key=key, num_prompt_tokens=request.num_prompt_tokens, weight_version=self.weight_version)
