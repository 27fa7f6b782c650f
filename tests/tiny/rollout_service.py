"""A service of a tiny model with trainers' doors, on a port: its engine is a process, the rest a thread's event loop.

Between doors and engine is what serves elsewhere: gateway, `FleetControl`, gRPC, the verifier's tables. There is no
router: one verifier is the fleet, and its look-ups draft four tokens a step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import uvicorn
from prometheus_client import CollectorRegistry
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from fakes.backend import build_tokenizer
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.api.rollouts.doors import TrainerDoors
from outrider.cluster.api.rollouts.trainer_routes import add_trainer_routes
from outrider.cluster.common.errors import RequestFailed
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.config.verifier_main import verifier_main
from outrider.cluster.gateway.fleet_control import FleetControl, verifier_calls
from outrider.cluster.gateway.gateway import Gateway
from outrider.cluster.gateway.request_parser import ModelInfo
from outrider.cluster.monitoring.metrics import GatewayMetrics
from outrider.cluster.offline.engine import RankProcesses
from outrider.cluster.replicas.engine_host import EngineHost
from outrider.cluster.router.fleet import FleetSnapshot, VerifierReport, VerifierState
from outrider.proto import link_pb2_grpc
from outrider.verifier_service.engine.service import RequestTable, VerifierLinkServicer
from outrider.verifier_service.links.control_table import ControlTable
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.engine import FROM_ENGINE, EngineLoad, EngineReady, EngineUpdate
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    LogprobsMode,
    RequestOutput,
    SpeculationPlan,
)
from outrider.verifier_service.messages.wire import encode
from outrider.verifier_service.model.ranks import PipeListener, RankSpec
from tiny.forking import FORKING
from tiny.models import full_logits, make_model
from tiny.refits import perturb

START_TIMEOUT_S = 120.0
MAX_MODEL_LEN = 4096  # long enough that a client can interfere
DRAFTING = SpeculationPlan(drafter_id=LOCAL_DRAFTER_ID, draft_length=4, is_pinned=True)
ResultT = TypeVar("ResultT")


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Write a model with its tokenizer, and the same with other weights; return their folders."""
    tokenizer = build_tokenizer()
    options: dict[str, Any] = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 3}
    options["max_position_embeddings"] = MAX_MODEL_LEN
    for name, model in (("old", make_model(**options)), ("new", perturb(make_model(**options)))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder / "old", folder / "new"


def run_rank(main: Any, rank: RankSpec) -> None:
    main.run_rank(rank)


class _Ranks:
    """The verifier's process, for an `EngineHost` that is given actors elsewhere."""

    def __init__(self, main: Any) -> None:
        self._processes = RankProcesses(run_rank, main, 1, first_rank=0, context=FORKING)
        self._listener = PipeListener(self._processes.rank(0, 1).shell_address)

    async def connect(self) -> Connection:
        with self._listener:
            self._processes.start()
            return await asyncio.to_thread(self._listener.accept, self._processes.are_alive)

    def ended(self) -> bool:
        return not self._processes.are_alive()

    def stop(self) -> None:
        self._processes.close()


class RolloutService:
    """A running service; `old` and `new` are the folders of its weights and of others that fit."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = write_checkpoints(folder)
        self.url = ""
        self._config = ServiceConfig(
            model=str(self.old),
            served_model_name="tiny",
            rollouts=True,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            check_integrity=True,
            speculative_config={"method": "suffix", "location": "verifier"},
        )
        self._load: EngineLoad | None = None
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._is_up = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-service", daemon=True)
        self._thread.start()
        assert self._is_up.wait(START_TIMEOUT_S), "the service does not start"
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(START_TIMEOUT_S)
        if self._error is not None:
            raise self._error

    def begin_anew(self) -> None:
        """Bring back the weights, their version and the state that the service started with."""
        self._await(self._begin_anew())

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._is_up.set()
            self._loop.close()

    async def _serve(self) -> None:
        host = EngineHost(on_message=self._hear, on_failure=self._fail, timeout_s=self._config.engine_timeout_s)
        self._table, self._control = RequestTable(host.send), ControlTable(host.send)
        try:
            self._ready: EngineReady = await host.start(_Ranks(verifier_main(self._config)), FROM_ENGINE)  # type: ignore[arg-type]
            servicer = VerifierLinkServicer(self._table, self._control)
            self._endpoint = await host.serve(
                "127.0.0.1", lambda server: link_pb2_grpc.add_VerifierLinkServicer_to_server(servicer, server)
            )
            while self._load is None:
                await asyncio.sleep(0.01)
            self._fleet = FleetControl(self._snapshot, verifier_calls(None))
            server = uvicorn.Server(uvicorn.Config(self._app(), host="127.0.0.1", port=0, log_level="warning"))
            serving = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.005)
            self.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            self._is_up.set()
            await self._stopping.wait()
            server.should_exit = True
            await serving
        finally:
            await host.close()

    def _app(self) -> Any:
        tokenizer: PreTrainedTokenizerBase = build_tokenizer()
        info = ModelInfo(
            name="tiny",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=self._ready.vocab_size,
            eos_token_ids=self._ready.eos_token_ids,
            created=1_700_000_000,
            logprobs_mode=LogprobsMode.PROCESSED,
            rollouts=True,
        )
        metrics = GatewayMetrics(CollectorRegistry(), model_name="tiny")
        gateway = Gateway(info, tokenizer, self, metrics, time.monotonic)
        app = build_api(gateway, self._is_healthy)
        doors = TrainerDoors(
            gateway=gateway,
            fleet=self._fleet,
            is_healthy=self._is_healthy,
            model_path=str(self.old),
            tensor_parallel_size=1,
        )
        add_trainer_routes(app, doors)
        return app

    async def generate(self, request: GenerationRequest) -> AsyncIterator[RequestOutput]:
        """Be the gateway's backend."""
        message = encode(dataclasses.replace(request, plan=DRAFTING))
        async with aclosing(self._table.stream(message)) as outputs:
            async for output in outputs:
                if output is not None:  # None: the engine has the request
                    if output.finish_reason is FinishReason.ERROR:
                        raise RequestFailed(str(output.error))
                    yield output

    def _snapshot(self) -> FleetSnapshot:
        assert self._load is not None
        report = VerifierReport(
            verifier_id="v", endpoint=self._endpoint, epoch=1, load=self._load, dtype=self._ready.dtype
        )
        state = VerifierState(report=report, reported_s=time.time(), default_plan=DRAFTING)
        return FleetSnapshot(verifiers=(state,), drafters=(), decided_at_s=time.time())

    async def _is_healthy(self) -> bool:
        return self._load is not None and self._load.weights_error is None

    def _hear(self, update: EngineUpdate) -> None:
        self._table.deliver(update.outputs)
        self._control.deliver(update.results)
        self._load = update.load or self._load

    def _fail(self, reason: str) -> None:
        self._table.fail(reason)
        self._control.fail(reason)

    async def _begin_anew(self) -> None:
        await self._fleet.update_from_folder(str(self.old), "default")
        await self._fleet.resume()

    def _await(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(START_TIMEOUT_S)


class Reference:
    """The library's own greedy answers of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        token_ids = list(prompt)
        for _ in range(num_tokens):
            token_ids.append(int(full_logits(self._model, token_ids)[-1].argmax()))
        return token_ids[len(prompt) :]

    def logprobs(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Return the log probability of each token but the first, given those before it."""
        laws = (full_logits(self._model, list(token_ids))[:-1] / temperature).log_softmax(dim=-1)
        return [float(law[id_]) for law, id_ in zip(laws, token_ids[1:], strict=True)]
