"""Rounds in columns against the same rounds one by one: the reference."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from fakes.engine_bench import MemoryDrafts
from outrider.verifier_service.messages.draft import Commit, Commits, Draft, DrafterEvent, Drafts, Open
from outrider.verifier_service.messages.request import Request
from support import parts
from support.parts import VOCAB_SIZE

NUM_REQUESTS, NUM_STEPS, LENGTH, DEADLINE_S = 6, 60, 3, 0.02


@dataclass
class Side:
    """A coordinator with its own requests, of which it is told the same as of the other side's."""

    min_columns: int
    client: MemoryDrafts = field(default_factory=MemoryDrafts)
    requests: dict[str, Request] = field(default_factory=dict)
    now_s: float = 0.0
    asked: list[Commit] = field(default_factory=list)  # by the last step
    num_frames: int = 0

    def __post_init__(self) -> None:
        # one deadline, so that how often a round trip counts makes no difference
        config = {"min_deadline_s": DEADLINE_S, "max_deadline_s": DEADLINE_S, "first_deadline_s": DEADLINE_S}
        self.coordinator = parts.coordinator(self.client, min_columns=self.min_columns, **config)
        self.client.events.append(DrafterEvent(drafter_id="d"))
        for name in "abcdef"[:NUM_REQUESTS]:
            self.requests[name] = parts.request(name, draft_length=LENGTH, temperature=0.0, max_tokens=50)

    def ask(self) -> None:
        send = self.client.send

        def counted(drafter_id: str, messages: Sequence[object]) -> None:
            self.num_frames += sum(isinstance(message, Commits) for message in messages)
            send(drafter_id, messages)

        self.client.send = counted
        self.coordinator.ask(self.requests.values(), self.now_s)
        self.client.send = send
        sent = [message for _, message in self.client.take()]
        self.asked = [message for message in sent if isinstance(message, Commit)]
        assert all(isinstance(message, Commit | Open) for message in sent)

    def receive(self, drafts: Sequence[Draft]) -> None:
        if self.min_columns == 1 and drafts:
            self.client.events.append(DrafterEvent(drafter_id="d", message=Drafts.of(drafts)))
        else:
            self.client.events += [DrafterEvent(drafter_id="d", message=draft) for draft in drafts]
        self.coordinator.receive(self.requests, self.now_s)

    def seen(self) -> object:
        counts = self.coordinator.fallbacks, self.coordinator.num_stale_drafts, self.coordinator.num_asked_tokens
        drafts = [None if r.draft is None else (r.draft.position, r.draft.token_ids) for r in self.requests.values()]
        return counts, drafts, [(r.hold_until_s, r.metrics.enabled) for r in self.requests.values()]


def drafted(asked: Sequence[Commit], rng: random.Random) -> list[Draft]:
    """Return answers: most are right, some too long, outside of the vocabulary, of another round, or missing."""
    drafts: list[Draft] = []
    for commit in asked:
        kind = rng.random()
        length = LENGTH + 1 if kind < 0.05 else rng.randint(0, LENGTH)
        ids = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        if ids and kind > 0.95:
            ids[-1] = VOCAB_SIZE
        draft = parts.draft(commit, ids, round_id=commit.round_id + (0.05 <= kind < 0.1))
        if not 0.1 <= kind < 0.2:
            drafts.append(draft)
    return drafts


@pytest.mark.parametrize("seed", range(5))
def test_columns_do_what_single_messages_do(seed: int):
    columns, singly = Side(1), Side(10**9)
    sides, rng = (columns, singly), random.Random(seed)
    for side in sides:
        side.coordinator.receive(side.requests, 0.0)
    for _ in range(NUM_STEPS):
        for side in sides:
            side.ask()
        by_id = {commit.request_id: commit for commit in columns.asked}
        for commit in singly.asked:  # rounds are numbered in another order where some are opened
            assert commit.token_ids == by_id[commit.request_id].token_ids
            assert commit.position == by_id[commit.request_id].position
        number, is_late = rng.getrandbits(32), rng.random() < 0.2
        for side in sides:
            side.now_s += 1.5 * DEADLINE_S if is_late else 0.4 * DEADLINE_S
            if is_late:
                side.coordinator.receive(side.requests, side.now_s)
            order = sorted(side.asked, key=lambda commit: commit.request_id)
            side.receive(drafted(order, random.Random(number)))
        assert columns.seen() == singly.seen()
        committed = {name: [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 2))] for name in columns.requests}
        for side in sides:
            side.now_s += 2 * DEADLINE_S
            side.coordinator.receive(side.requests, side.now_s)  # what has not come is late
            for name, request in side.requests.items():
                request.token_ids += committed[name]
                request.draft = request.hold_until_s = None
    assert columns.num_frames > NUM_STEPS // 2
    assert singly.num_frames == 0
    assert {"bad_draft", "timeout"} <= columns.coordinator.fallbacks.keys()
