from __future__ import annotations

import random

import pytest

from outrider.verifier_service.messages.request import Request
from outrider.verifier_service.scheduling.waiting_queue import Seniority, WaitingQueue
from support import parts


def test_an_empty_queue_has_no_first():
    queue = WaitingQueue()
    assert (queue.first(), len(queue), list(queue)) == (None, 0, [])
    with pytest.raises(AssertionError, match="nobody waits"):
        queue.pop()


def test_a_request_waits_once():
    queue = WaitingQueue()
    queue.push((0.0, 1), parts.request("a"))
    with pytest.raises(AssertionError, match="a waits already"):
        queue.push((0.0, 1), parts.request("a"))


def test_any_use_equals_sorting():
    rng = random.Random(0)
    queue = WaitingQueue()
    reference: dict[Seniority, Request] = {}
    for index in range(5000):
        action = rng.random()
        if action < 0.5:
            seniority, request = (float(rng.randrange(20)), index), parts.request(str(index))
            queue.push(seniority, request)
            reference[seniority] = request
        elif action < 0.7 and reference:
            seniority = rng.choice(sorted(reference))
            queue.discard(seniority)
            del reference[seniority]
            assert seniority not in queue
        elif reference:
            assert queue.pop() is reference.pop(min(reference))
        assert queue.first() is (reference[min(reference)] if reference else None)
        assert len(queue) == len(reference)
    assert list(queue) == [reference[seniority] for seniority in sorted(reference)]
    assert all(seniority in queue for seniority in reference)


def test_a_queue_that_does_not_move_stays_small():
    queue = WaitingQueue()
    queue.push((0.0, 0), parts.request("first"))
    for index in range(1, 10_000):
        queue.push((1.0, index), parts.request(str(index)))
        queue.discard((1.0, index))
    assert len(queue._heap) <= 3
