"""Groups of requests with one prompt (`n` choices), whose KV is computed once. `BlockTables` shares the blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.prefix_cache import ROOT_HASH, block_hash

_Key = tuple[str, bytes]


@dataclass(slots=True)
class _Group:
    running: list[Request] = field(default_factory=list)  # in order of admission
    parked: list[Request] = field(default_factory=list)  # waiting for one of `running` to compute the prompt


def has_prompt(request: Request) -> bool:
    """Return whether the KV of a request's prompt, without its last token, is computed."""
    return request.num_computed_tokens >= request.num_prompt_tokens - 1


class PromptGroups:
    """Requests by `group_id`, prompt and salt; a request without a `group_id` has no siblings.

    The prompt is part of the key: two clients that use the same id must not share contexts.
    """

    def __init__(self) -> None:
        self._keys: dict[str, _Key] = {}  # by request id
        self._groups: dict[_Key, _Group] = {}  # with at least one running request

    def add(self, request: Request) -> None:
        if request.group_id is not None:
            prompt = request.token_ids[: request.num_prompt_tokens]
            self._keys[request.request_id] = (request.group_id, block_hash(ROOT_HASH, prompt, request.cache_salt))

    def remove(self, request: Request) -> None:
        """Forget a request; `leave` must have been called if it ran."""
        group = self._group_of(request)
        if group is not None and request in group.parked:
            group.parked.remove(request)
        self._keys.pop(request.request_id, None)

    def enter(self, request: Request) -> None:
        """Add a request that starts to run."""
        key = self._keys.get(request.request_id)
        if key is not None:
            self._groups.setdefault(key, _Group()).running.append(request)

    def leave(self, request: Request) -> list[Request]:
        """Take out a request that stops running; return its parked siblings, which must be queued again."""
        group = self._group_of(request)
        if group is None:
            return []
        group.running.remove(request)
        if not group.running:
            del self._groups[self._keys[request.request_id]]
        return _take_parked(group)

    def source(self, request: Request) -> Request | None:
        """Return the first running sibling that has the prompt's KV, or None."""
        group = self._group_of(request)
        return None if group is None else next(filter(has_prompt, group.running), None)

    def park(self, request: Request) -> bool:
        """Park a request while a running sibling computes their prompt; return False if none does."""
        group = self._group_of(request)
        if group is None or any(map(has_prompt, group.running)):
            return False
        group.parked.append(request)
        return True

    def release(self, request: Request) -> list[Request]:
        """Take out and return the parked siblings once this request has computed their prompt."""
        group = self._group_of(request)
        return [] if group is None or not has_prompt(request) else _take_parked(group)

    @property
    def parked(self) -> list[Request]:
        return [request for group in self._groups.values() for request in group.parked]

    def check_integrity(self, running: list[Request]) -> None:
        """Raise `AssertionError` unless the groups match `running` and no request is parked for a computed prompt."""
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
