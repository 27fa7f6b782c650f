"""An engine that verifies by itself, and a pool of drafters in memory, both in one virtual time.

The target is greedy and known: whatever the engine commits is checked against it. A drafter knows the target, too, and
is wrong where a test says so.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from outrider.cluster.hosted.drafting import HostedConfig, HostedDrafting, HostRequest, HostRow
from outrider.verifier_service.messages.draft import Close, Commit, Draft, Open, Resync, VerifierMessage
from outrider.verifier_service.messages.engine import PeerState, Relay
from outrider.verifier_service.messages.link import VERIFIER_MESSAGES
from outrider.verifier_service.messages.wire import decode, encode
from support import parts

VOCAB_SIZE = 97
MAX_MODEL_LEN = 512
NEVER: float | None = None  # as the time of an answer


def target_token(token_ids: Sequence[int]) -> int:
    return (token_ids[-1] * 31 + len(token_ids) * 7 + 5) % VOCAB_SIZE


def continued(token_ids: Sequence[int], length: int) -> list[int]:
    """Return what the target says after `token_ids`."""
    tokens = list(token_ids)
    for _ in range(length):
        tokens.append(target_token(tokens))
    return tokens[len(token_ids) :]


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class PlayedPool:
    """`Drafters` whose answers come when the test says; waiting moves the clock."""

    def __init__(self, clock: Clock) -> None:
        self.answer_s: float | None = 0.002  # from a commit to its draft
        self.opening_s: float | None = 0.002  # the same, of a session's first
        self.is_right: Callable[[int], bool] = lambda position: True  # whether a draft's token there is the target's
        self.spoil: Callable[[Draft], Draft | Resync | bytes] = lambda draft: draft
        self.sent: list[tuple[str, VerifierMessage]] = []
        self.sessions: dict[tuple[str, str], list[int]] = {}
        self._clock = clock
        self._up: set[str] = set()
        self._just_opened: set[tuple[str, str]] = set()
        self._due: list[tuple[float, int, PeerState | Relay]] = []
        self._order = itertools.count()

    # --- the test's side ---

    def come_up(self, *drafter_ids: str, vocab_size: int = VOCAB_SIZE) -> None:
        for drafter_id in drafter_ids:
            self._up.add(drafter_id)
            self._deliver(0.0, PeerState(peer=drafter_id, is_up=True, vocab_size=vocab_size))

    def go_away(self, drafter_id: str) -> None:
        """Lose a drafter with all that it knows; what it was about to say is lost with it."""
        self._up.discard(drafter_id)
        self.sessions = {key: tokens for key, tokens in self.sessions.items() if key[0] != drafter_id}
        self._due = [one for one in self._due if one[2].peer != drafter_id]
        heapq.heapify(self._due)
        self._deliver(0.0, PeerState(peer=drafter_id, is_up=False))

    def forget(self, request_id: str) -> None:
        """Let drafters lose a session that they were told of: they will want the prefix again."""
        self.sessions = {key: tokens for key, tokens in self.sessions.items() if key[1] != request_id}

    def take(self) -> list[VerifierMessage]:
        """Return, and forget, what drafters were told."""
        sent, self.sent = self.sent, []
        return [message for _, message in sent]

    # --- the plug-in's side ---

    def send(self, relays: Sequence[Relay]) -> None:
        for relay in relays:
            if relay.peer in self._up:
                for message in parts.singly([decode(relay.payload, VERIFIER_MESSAGES)]):
                    self.sent.append((relay.peer, message))
                    self._hear(relay.peer, message)

    def wait(self, timeout_s: float) -> list[PeerState | Relay]:
        begin_s, now_s = self._clock.now_s, self._clock.now_s
        if timeout_s > 0.0 and (not self._due or self._due[0][0] > now_s):
            next_s = self._due[0][0] if self._due else begin_s + timeout_s
            now_s = self._clock.now_s = min(next_s, begin_s + timeout_s)
        arrived: list[PeerState | Relay] = []
        while self._due and self._due[0][0] <= now_s:
            arrived.append(heapq.heappop(self._due)[2])
        return arrived

    # --- the drafters ---

    def _hear(self, drafter_id: str, message: VerifierMessage) -> None:
        key = (drafter_id, message.request_id)
        match message:
            case Open(token_ids=token_ids):
                self.sessions[key] = list(token_ids)
                self._just_opened.add(key)
            case Commit() as commit:
                session = self.sessions.get(key)
                if session is None or commit.position != len(session):
                    self._say(drafter_id, 0.001, Resync(request_id=commit.request_id))
                    return
                session.extend(commit.token_ids)
                delay_s = self.opening_s if key in self._just_opened else self.answer_s
                if delay_s is not None:
                    self._just_opened.discard(key)
                    self._say(drafter_id, delay_s, self.spoil(self._draft(commit, session)))
            case Close():
                self.sessions.pop(key, None)

    def _draft(self, commit: Commit, session: Sequence[int]) -> Draft:
        tokens = list(session)
        for _ in range(commit.max_length):
            token_id = target_token(tokens)
            tokens.append(token_id if self.is_right(len(tokens)) else (token_id + 1) % VOCAB_SIZE)
        return Draft(
            request_id=commit.request_id,
            round_id=commit.round_id,
            position=len(session),
            token_ids=tuple(tokens[len(session) :]),
        )

    def _say(self, drafter_id: str, delay_s: float, message: Draft | Resync | bytes) -> None:
        payload = message if isinstance(message, bytes) else encode(message)
        received_s = self._clock.now_s + delay_s
        self._deliver(delay_s, Relay(peer=drafter_id, payload=payload, received_s=received_s))

    def _deliver(self, delay_s: float, message: PeerState | Relay) -> None:
        heapq.heappush(self._due, (self._clock.now_s + delay_s, next(self._order), message))


@dataclass(slots=True)
class HostedSequence:
    """A request as the engine holds it."""

    token_ids: list[int]
    description: HostRequest
    num_computed: int = 0
    draft: list[int] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        num_output = len(self.token_ids) - self.description.num_prompt_tokens
        output = self.token_ids[self.description.num_prompt_tokens :]
        is_stop = not self.description.stop_token_ids.isdisjoint(output)
        return is_stop or num_output >= self.description.max_tokens or len(self.token_ids) >= MAX_MODEL_LEN


def free_steps(num_tokens: int) -> float:
    """Steps whose tokens cost next to nothing."""
    return 0.02 + num_tokens * 1e-5


class HostedEngine:
    """The engine: it runs steps, and asks `HostedDrafting` what to verify; a `Host`, too."""

    def __init__(
        self,
        *,
        num_speculative_tokens: int = 4,
        max_wait_s: float = 0.1,
        opening_s: float = 10.0,
        learn: bool | Literal["all"] = False,
    ) -> None:
        self.clock = Clock()
        self.pool = PlayedPool(self.clock)
        self.config = HostedConfig(
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_speculative_tokens=num_speculative_tokens,
            max_wait_s=max_wait_s,
            opening_s=opening_s,
            learn=learn,
        )
        self.drafting = HostedDrafting(self.pool, self.config, clock=self.clock)
        self.running: dict[str, HostedSequence] = {}
        self.outputs: dict[str, list[int]] = {}  # of requests that have ended
        self.step_s: Callable[[int], float] = free_steps  # by the number of tokens
        self.chunk = MAX_MODEL_LEN  # the most tokens that a request may compute in a step
        self.waited_s: list[float] = []  # by call of `propose`
        self.num_described = 0
        self.began_s = 0.0
        self._rows: list[str] = []
        self._finished: set[str] = set()  # to be told with the next step

    def add(self, request_id: str = "a", prompt: Sequence[int] = (3, 1, 4), **described: object) -> None:
        values: dict[str, object] = {"num_prompt_tokens": len(prompt), "max_tokens": 1 << 30, **described}
        self.running[request_id] = HostedSequence(list(prompt), HostRequest(**values))  # type: ignore[arg-type]

    def drop(self, request_id: str, *, is_told: bool = True) -> None:
        """Abort a request; not `is_told`: the step that would have said so asks nobody for drafts."""
        del self.running[request_id]
        self._finished |= {request_id} if is_told else set()

    def preempt(self, request_id: str) -> None:
        self.running[request_id].num_computed = 0
        self.running[request_id].draft = []

    def step(
        self, request_ids: Collection[str] | None = None, *, num_verified: int | None = None, proposes: bool = True
    ) -> dict[str, list[int]]:
        """Run one step of some requests, by default all; return the drafts for the next one, by request.

        `num_verified`: no more of any draft is verified. Not `proposes`: nobody is asked for drafts.
        """
        self.began_s = self.clock.now_s
        self._rows = [one for one in self.running if request_ids is None or one in request_ids]
        rows = [self._computed(request_id, num_verified) for request_id in self._rows]
        self.clock.now_s += self.step_s(sum(row.num_scheduled_tokens for row in rows))
        told, self._finished = self._finished, set()
        drafts: list[list[int]] = [[] for _ in rows]
        if proposes:
            asked_s = self.clock.now_s
            drafts = self.drafting.propose(rows, told, self)
            self.waited_s.append(self.clock.now_s - asked_s)
            assert self.waited_s[-1] <= self.config.max_wait_s + 1e-9, "a step waited beyond every deadline"
        by_id = dict(zip(self._rows, drafts, strict=True))
        for request_id, draft in by_id.items():
            assert len(draft) <= self.config.num_speculative_tokens
            assert all(0 <= token_id < VOCAB_SIZE for token_id in draft)
            self.running[request_id].draft = draft
            if self.running[request_id].has_ended:
                self.outputs[request_id] = self.running.pop(request_id).token_ids
                self._finished.add(request_id)
        return by_id

    def steps(self, count: int, **options: object) -> list[dict[str, list[int]]]:
        return [self.step(**options) for _ in range(count)]  # type: ignore[arg-type]

    def _computed(self, request_id: str, num_verified: int | None) -> HostRow:
        sequence = self.running[request_id]
        left = len(sequence.token_ids) - sequence.num_computed
        draft, sequence.draft = sequence.draft[:num_verified], []
        num_new_tokens = 0
        num_scheduled = min(left, self.chunk)
        if left <= self.chunk:
            assert left == 1 or not draft, "drafts are for requests that decode"
            right = continued(sequence.token_ids, len(draft) + 1)
            agreed = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, right, strict=False))
            num_new_tokens = sum(1 for _ in agreed) + 1
            sequence.token_ids += right[:num_new_tokens]
            sequence.num_computed = len(sequence.token_ids) - 1
            num_scheduled = left + len(draft)
        else:
            sequence.num_computed += num_scheduled
        return HostRow(
            request_id=request_id,
            num_tokens=len(sequence.token_ids),
            num_scheduled_tokens=num_scheduled,
            num_draft_tokens=len(draft),
            num_new_tokens=num_new_tokens,
        )

    # --- Host ---

    def describe(self, row: int) -> HostRequest:
        self.num_described += 1
        return replace(self.running[self._rows[row]].description)

    def token_ids(self, row: int, start: int, stop: int) -> Sequence[int]:
        return self.running[self._rows[row]].token_ids[start:stop]


def messages_of(messages: Iterable[VerifierMessage], kind: type) -> list[VerifierMessage]:
    return [message for message in messages if isinstance(message, kind)]


def num_drafted(steps: Iterable[Mapping[str, Sequence[int]]]) -> int:
    return sum(len(draft) for step in steps for draft in step.values())
