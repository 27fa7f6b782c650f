"""Where a service's gateways listen for each other, as the router knows it."""

from __future__ import annotations

from collections.abc import Mapping

MEET_INTERVAL_S = 5.0  # of a gateway; a new one goes to the others itself
EXPIRE_AFTER_S = 3 * MEET_INTERVAL_S


class Registry:
    """The endpoints of all gateways by their ids; one that stays silent is forgotten."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, str]] = {}

    def meet(self, gateway_id: str, endpoint: str, now_s: float) -> Mapping[str, str]:
        """Note where a gateway listens; return where the others do."""
        self._known[gateway_id] = now_s, endpoint
        self._known = {id_: known for id_, known in self._known.items() if now_s - known[0] <= EXPIRE_AFTER_S}
        return {id_: where for id_, (_, where) in self._known.items() if id_ != gateway_id}
