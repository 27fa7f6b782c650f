"""What is kept of vLLM's scheduler outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.cluster.hosted.vllm_scheduled import ScheduledRequests


def said(*new: Any, cached: tuple[tuple[str, Any], ...] = (), finished: tuple[str, ...] = ()) -> Any:
    return SimpleNamespace(
        finished_req_ids=set(finished),
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request_id for request_id, _ in cached], new_block_ids=[blocks for _, blocks in cached]
        ),
    )


def new(request_id: str, *blocks: list[int], prompt_len: int = 3) -> Any:
    return SimpleNamespace(req_id=request_id, sampling_params="said", prompt_len=prompt_len, block_ids=blocks)


def test_blocks_are_those_of_the_first_group_and_grow():
    requests = ScheduledRequests()
    given = [1, 2]
    requests.follow(said(new("a", given, [7]), new("b")))
    requests.follow(said(cached=(("a", ([4], [8])), ("b", None), ("c", ([5],)))))
    assert (requests["a"].sampling, requests["a"].num_prompt_tokens, requests["a"].blocks) == ("said", 3, [1, 2, 4])
    assert given == [1, 2], "in one process with vLLM, the scheduler's own list"
    assert requests["b"].blocks == []
    assert requests.ids() == ["a", "b"], "and of whom nothing is known is no error"


def test_a_resumed_request_has_the_blocks_that_it_has_now():
    requests = ScheduledRequests()
    requests.follow(said(new("a", [1, 2])))
    requests.follow(said(new("a", [9])))
    assert requests["a"].blocks == [9]
    assert requests.take_finished() == set()


def test_who_left_is_told_once_and_an_id_may_come_again_in_the_same_step():
    requests = ScheduledRequests()
    requests.follow(said(new("a", [1]), new("b", [2])))
    requests.follow(said(finished=("a",)))
    requests.follow(said(new("b", [3], prompt_len=5), finished=("b", "unknown")))
    assert requests.ids() == ["b"]
    assert requests["b"].num_prompt_tokens == 5
    assert requests.take_finished() == {"a", "b", "unknown"}
    assert requests.take_finished() == set()
