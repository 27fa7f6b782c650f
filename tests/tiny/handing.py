"""Verifier engines over the embedded target that hand requests over to one another, in this process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from transformers import AutoTokenizer

from exactness.drafter_cells import FramedDraftClient
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service import embedded
from outrider.drafter_service.service.rank_main import build_draft_engine
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.factory import build_engine, connect_handovers
from outrider.verifier_service.handover.kv_bytes import EngineKV
from outrider.verifier_service.messages.handover import EndTake, KVSource, PartsRead, TakeKV, TakenFrame
from outrider.verifier_service.messages.request import (
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationPlan,
)
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup

HEAD = {"method": "eagle3", "num_speculative_tokens": 4}
PATIENCE_S = 60.0  # a drafter in memory is never late
NUM_NEW_TOKENS = 24
Bend = Callable[[bytes], bytes]  # changes a frame on its way


@functools.cache
def prompts() -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(embedded.target_path())
    return [tuple(tokenizer.encode(prompt)[:70]) for prompt in embedded.held_out_prompts()[:3]]


def ask(name: str, prompt: tuple[int, ...], **fields: Any) -> GenerationRequest:
    sampling = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True, "temperature": 0.0, **fields.pop("sampling", {})}
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),
        plan=SpeculationPlan(draft_length=4),
        **fields,
    )


class HandingEngine:
    """One verifier with an EAGLE-3 head; `num_tokens_per_step` makes prompts come in chunks."""

    def __init__(self, *, num_tokens_per_step: int = 16, num_kv_blocks: int = 64, has_channel: bool = False) -> None:
        speculative = {**HEAD, "model": str(embedded.drafter_paths()[HEAD["method"]])}
        config = ServiceConfig(
            model="embedded", seed=0, speculative_config=speculative, dtype="float32", kv_cache_memory_bytes=1 << 25
        )
        spec = config.verifier_spec
        model = replace(spec.model, check_logits=False, num_kv_blocks=num_kv_blocks, kv_cache_memory_bytes=None)
        store = {"tensor_transport": "gloo", "tensor_host": "127.0.0.1"} if has_channel else {}
        times = {"min_draft_deadline_s": PATIENCE_S, "max_draft_deadline_s": PATIENCE_S}
        self.spec = replace(spec, model=model, max_num_batched_tokens=num_tokens_per_step, **times, **store)
        self.share = ModelRunner(model, TensorParallelGroup.single())
        drafter = config.drafter_spec
        assert drafter is not None
        client = FramedDraftClient(build_draft_engine(drafter))
        self.engine: VerifierEngine = build_engine(ParallelRunner(self.share), self.spec, client, has_grammars=False)
        self.kv = EngineKV(self.share)
        self.handovers = connect_handovers(self.engine, self.kv, self.spec)
        self.outputs: list[RequestOutput] = []

    def add(self, message: GenerationRequest) -> None:
        if message.kv_source is not None:
            self.handovers.taker.begin(message)
        else:
            assert self.engine.add(message) is None

    def step(self) -> None:
        self.outputs += self.engine.step() or []
        self.engine.check_integrity()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs_of(name) for token in output.token_ids]

    def outputs_of(self, name: str) -> list[RequestOutput]:
        return [output for output in self.outputs if output.request_id == name]

    def has_ended(self, name: str) -> bool:
        return any(output.finish_reason is not None for output in self.outputs_of(name))

    def run(self, *messages: GenerationRequest) -> list[list[int]]:
        """Run requests to their end, alone."""
        for message in messages:
            self.add(message)
        while self.engine.has_work():
            self.step()
        return [self.tokens(message.request_id) for message in messages]


class Ferry:
    """What shells and gRPC do between two engines: frames from the giver to the taker, one round at a time."""

    def __init__(self, giver: HandingEngine, taker: HandingEngine, bend: Bend = lambda payload: payload) -> None:
        self.giver, self.taker, self._bend = giver, taker, bend
        self._serial = itertools.count()
        self._takes: dict[str, str] = {}  # by the taker's request
        self.num_frames = 0
        self.is_cut = False  # nothing passes any more
        self.is_slow = False  # what the giver says is not read
        self._unread: list[tuple[str, bytes]] = []  # take and payload of frames

    @property
    def num_unread_bytes(self) -> int:
        return sum(len(payload) for _, payload in self._unread)

    def round(self) -> None:
        """Let the giver say what it has, the taker take it in, and both call or hang up as they like."""
        for call in self.taker.handovers.taker.take_calls():
            if call.terms is None:
                if (take_id := self._takes.pop(call.request_id, None)) is not None:
                    self.giver.handovers.handle(EndTake(take_id=take_id))
                continue
            take_id = self._takes[call.request_id] = str(next(self._serial))
            self.giver.handovers.handle(TakeKV(take_id=take_id, request_id=call.source.request_id, terms=call.terms))
        given = [] if self.is_cut else self.giver.handovers.pump().given
        names = {take_id: name for name, take_id in self._takes.items()}
        self._unread += [(frame.take_id, frame.payload) for frame in given]
        read, self._unread = ([], self._unread) if self.is_slow else (self._unread, [])
        for take_id, payload in read:
            self.num_frames += 1
            self.giver.handovers.handle(PartsRead(take_id=take_id, num_bytes=len(payload)))
            if take_id in names:
                self.taker.handovers.handle(TakenFrame(request_id=names[take_id], payload=self._bend(payload)))
        self._land()

    def cut(self) -> None:
        """The giver is gone."""
        self.is_cut = True
        for name in self._takes:
            self.taker.handovers.handle(TakenFrame(request_id=name, payload=b"", error="UNAVAILABLE: gone"))
        self._land()

    def _land(self) -> None:
        pumped = self.taker.handovers.pump()
        self.taker.outputs += pumped.failed
        for message, arrived in pumped.taken:
            assert self.taker.engine.add(message, arrived) is None

    def hand_over(self, message: GenerationRequest, name: str = "taken", **fields: Any) -> list[int]:
        """Prefill at the giver, decode at the taker; return the tokens that a client sees."""
        self.giver.add(replace(message, hands_over=True))
        source = KVSource(endpoint="", request_id=message.request_id, draws_anew=fields.pop("draws_anew", False))
        self.taker.add(replace(message, request_id=name, kv_source=source, **fields))
        while not self.taker.has_ended(name):
            self.giver.step()
            self.round()
            self.taker.step()
        self.giver.engine.cancel(message.request_id)
        self.round()
        first = [] if source.draws_anew else self.giver.tokens(message.request_id)
        return first + self.taker.tokens(name)


def was_refused(outputs: list[RequestOutput]) -> bool:
    return [output.finish_reason for output in outputs] == [FinishReason.NOT_TAKEN]


def per_position(engine: HandingEngine, name: str) -> list[tuple[int, int]]:
    """Return, of each round of a request that had a draft, how many tokens were verified and accepted."""
    rounds: Iterator[RequestOutput] = (output for output in engine.outputs_of(name) if output.num_draft_tokens)
    return [(output.num_draft_tokens, output.num_accepted_tokens) for output in rounds]
