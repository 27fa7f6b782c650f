"""A trained fleet of one verifier on a port of 127.0.0.1, for trainers' own clients, beside the library's answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
import uvicorn
from transformers import PreTrainedModel

from tiny.models import full_logits, make_model
from tiny.refits import perturb
from tiny.trained_fleet import TrainedFleet, trained_fleet

TIMEOUT_S = 60.0


class RolloutService:
    """A running service; `old` and `new` are folders of the weights that it started with, and of others that fit."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = folder / "v0", folder / "new"
        perturb(make_model()).save_pretrained(self.new)
        self.url = ""
        self._folder = folder
        self._fleet: TrainedFleet | None = None
        self._loop = asyncio.new_event_loop()
        self._is_up, self._stopping = threading.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-service", daemon=True)
        self._thread.start()
        assert self._is_up.wait(TIMEOUT_S), "the service does not start"
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def begin_anew(self) -> None:
        """Bring back the weights and their version, and go on if generation is paused."""
        asyncio.run_coroutine_threadsafe(self._begin_anew(), self._loop).result(TIMEOUT_S)

    async def _begin_anew(self) -> None:
        assert self._fleet is not None
        await self._fleet.fleet.update_from_folder(str(self.old), "default")
        await self._fleet.fleet.resume()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._is_up.set()
            self._loop.close()

    async def _serve(self) -> None:
        async with trained_fleet(self._folder) as self._fleet:
            server = uvicorn.Server(uvicorn.Config(self._fleet.app, host="127.0.0.1", port=0, log_level="warning"))
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            self._is_up.set()
            await self._stopping.wait()
            server.should_exit = True
            await serving


class Reference:
    """The library's own answers of one of the service's two models."""

    def __init__(self, *, is_new: bool) -> None:
        self._model: PreTrainedModel = perturb(make_model()) if is_new else make_model()

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(int(self._logits(token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return the log probability of each token but the first, given those before it."""
        laws = (self._logits(list(token_ids))[:-1] / temperature).log_softmax(dim=-1)
        return [float(law[id_]) for law, id_ in zip(laws, token_ids[1:], strict=True)]

    def _logits(self, token_ids: list[int]) -> torch.Tensor:
        return full_logits(self._model, token_ids)
