"""The drafter directory over gRPC: verifiers report to it and receive their drafters and plans."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from outrider.cluster.router.fleet import Directive, VerifierReport
from outrider.verifier_service.messages.link import frame_of
from outrider.verifier_service.messages.wire import WireError, decode, encode


class DirectoryServicer:
    """Serves `outrider.link.v1.DrafterDirectory`."""

    def __init__(
        self,
        answer: Callable[[VerifierReport], Awaitable[Directive | None]],
        forget: Callable[[str], Awaitable[object]],
    ) -> None:
        """`answer` returns each report's directive (None: unknown); `forget` is called when a verifier disconnects."""
        self._answer = answer
        self._forget = forget

    async def Follow(self, request_iterator: Any, context: Any) -> None:
        """Serve one verifier until it disconnects."""
        verifier_ids: set[str] = set()
        try:
            while (frame := await context.read()) is not grpc.aio.EOF:
                try:
                    report = decode(frame.payload, (VerifierReport,))
                except WireError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                verifier_ids.add(report.verifier_id)
                directive = await self._answer(report)
                if directive is None:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the router does not answer")
                await context.write(frame_of(frame.sender, frame.epoch, encode(directive)))
        finally:
            for verifier_id in verifier_ids:
                await self._forget(verifier_id)
