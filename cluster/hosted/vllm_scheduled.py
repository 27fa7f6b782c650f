"""What vLLM's scheduler says of the requests that it holds, kept for its V2 runner, which keeps little of it itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ScheduledRequest:
    """What was said of one request."""

    sampling: Any  # vLLM's `SamplingParams`
    num_prompt_tokens: int
    blocks: list[int]  # of its KV, in vLLM's first group of layers


class ScheduledRequests:
    """The requests that vLLM holds, by what each `SchedulerOutput` says; a preempted one is held, too."""

    def __init__(self) -> None:
        self._requests: dict[str, ScheduledRequest] = {}
        self._finished: set[str] = set()  # that nobody was told of yet

    def __getitem__(self, request_id: str) -> ScheduledRequest:
        return self._requests[request_id]

    def ids(self) -> list[str]:
        """Return the requests that vLLM holds; from any thread."""
        return list(self._requests)

    def follow(self, scheduler_output: Any) -> None:
        """Take in a step that begins; what vLLM itself would stumble over is no error here."""
        for request_id in scheduler_output.finished_req_ids:
            self._requests.pop(request_id, None)
            self._finished.add(request_id)
        for new in scheduler_output.scheduled_new_reqs:  # or resumed: V2 is told everything again
            blocks = list(new.block_ids[0]) if new.block_ids else []
            self._requests[new.req_id] = ScheduledRequest(new.sampling_params, new.prompt_len, blocks)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, new_blocks in zip(cached.req_ids, cached.new_block_ids, strict=False):
            if new_blocks and request_id in self._requests:
                self._requests[request_id].blocks += new_blocks[0]

    def take_finished(self) -> set[str]:
        """Return who has left since the last call, in steps that asked for no drafts, too."""
        finished, self._finished = self._finished, set()
        return finished
