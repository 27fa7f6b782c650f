"""Which requests are choices of one prompt, so that its KV is computed once: bookkeeping only, blocks are elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.prefix_cache import ROOT_HASH, block_hash

_Key = tuple[str, bytes]


@dataclass(slots=True)
class _Group:
    running: list[Request] = field(default_factory=list)  # in order of admission
    parked: list[Request] = field(default_factory=list)  # wait for one of `running` to compute the prompt


def has_prompt(request: Request) -> bool:
    """Return whether the KV of a request's whole prompt, all but its last token, is computed."""
    return request.num_computed_tokens >= request.num_prompt_tokens - 1


class PromptGroups:
    """The requests with one `group_id`, prompt and salt; one without a `group_id` has no siblings.

    A prompt is part of the key: an id that two clients happened to share must not mix their contexts.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}  # by request id
        self._groups: dict[_Key, _Group] = {}  # those with a running request

    def add(self, request: Request) -> None:
        if request.group_id is not None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            self._keys[request.request_id] = (request.group_id, block_hash(ROOT_HASH, prompt, request.cache_salt))

    def remove(self, request: Request) -> None:
        """Forget a request that does not run; one that does must leave first."""
        group = self._group_of(request)
        if group is not None and request in group.parked:
            group.parked.remove(request)
        self._keys.pop(request.request_id, None)

    def enter(self, request: Request) -> None:
        """Note that a request runs."""
        key = self._keys.get(request.request_id)
        if key is not None:
            self._groups.setdefault(key, _Group()).running.append(request)

    def leave(self, request: Request) -> list[Request]:
        """Note that a request runs no more; returns the parked siblings, which must look for another."""
        group = self._group_of(request)
        if group is None:
            return []
        group.running.remove(request)
        if not group.running:
            del self._groups[self._keys[request.request_id]]
        return _take_parked(group)

    def source(self, request: Request) -> Request | None:
        """Return the running sibling that has the prompt's KV for longest, if any has."""
        group = self._group_of(request)
        return None if group is None else next(filter(has_prompt, group.running), None)

    def park(self, request: Request) -> bool:
        """Put a request aside if a running sibling is computing their prompt: False when none is."""
        group = self._group_of(request)
        if group is None or any(map(has_prompt, group.running)):
            return False
        group.parked.append(request)
        return True

    def release(self, request: Request) -> list[Request]:
        """Return the siblings that were parked for the prompt that this request has computed."""
        group = self._group_of(request)
        return [] if group is None or not has_prompt(request) else _take_parked(group)

    @property
    def parked(self) -> list[Request]:
        return [request for group in self._groups.values() for request in group.parked]

    def check_integrity(self, running: list[Request]) -> None:
        """Raise `AssertionError` unless the groups hold what runs and nobody is parked in vain."""
        entered = {id(request) for group in self._groups.values() for request in group.running}
        wanted = {id(request) for request in running if request.request_id in self._keys}
        assert entered == wanted, "the groups and the running requests differ"
        for group in self._groups.values():
            assert group.running, "a group that nobody is in"
            assert not (group.parked and any(map(has_prompt, group.running))), "parked for what is computed"

    def _group_of(self, request: Request) -> _Group | None:
        key = self._keys.get(request.request_id)
        return None if key is None else self._groups.get(key)


def _take_parked(group: _Group) -> list[Request]:
    parked, group.parked = group.parked, []
    return parked
