"""The requests of vLLM's scheduler, from its outputs: the V2 runner keeps too little of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ScheduledRequest:
    """One request, as scheduled."""

    sampling: Any  # vLLM's `SamplingParams`
    num_prompt_tokens: int
    blocks: list[int]  # of its KV, in vLLM's first group of layers


class ScheduledRequests:
    """vLLM's present requests, preempted ones included, from each `SchedulerOutput`."""

    def __init__(self) -> None:
        self._requests: dict[str, ScheduledRequest] = {}
        self._finished: set[str] = set()  # not taken by `take_finished` yet

    def __getitem__(self, request_id: str) -> ScheduledRequest:
        return self._requests[request_id]

    def ids(self) -> list[str]:
        """Return the ids of vLLM's present requests; safe in any thread."""
        return list(self._requests)

    def follow(self, scheduler_output: Any) -> None:
        """Follow a step that begins; unknown request ids are ignored."""
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
            self._finished.add(request_id)
        for new in scheduler_output.scheduled_new_reqs:  # or resumed: V2 gets all fields again
            blocks = list(new.block_ids[0]) if new.block_ids else []
            self._requests[new.req_id] = ScheduledRequest(new.sampling_params, new.prompt_len, blocks)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=False):
            if new_blocks and request_id in self._requests:
                self._requests[request_id].blocks += new_blocks[0]

    def take_finished(self) -> set[str]:
        """Return the ids that have left since the last call, also in steps without a proposal."""
        finished, self._finished = self._finished, set()
        return finished
