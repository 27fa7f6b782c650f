"""Gather what an engine's requests produce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SpeculationMetrics,
)


@dataclass(slots=True)
class Result:
    """Everything one request produced."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    speculation: SpeculationMetrics | None = None

    def extend(self, output: RequestOutput) -> None:
        """Take in one step's output."""
        self.token_ids.extend(output.token_ids)
        self.finish_reason, self.error, self.speculation = output.finish_reason, output.error, output.speculation


def collect(requests: Sequence[GenerationRequest], outputs: Iterable[RequestOutput]) -> Iterator[Result]:
    """Yield each request's result as it finishes."""
    results = {request.request_id: Result(request) for request in requests}
    for output in outputs:
        result = results[output.request_id]
        result.extend(output)
        if result.finish_reason is not None:
            yield result
