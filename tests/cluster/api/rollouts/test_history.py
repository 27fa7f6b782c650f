"""A trainer's door to histories: what is given reaches requests, what goes out comes in again, errors name fields."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

import pytest

from outrider.cluster.api.openai import endpoints
from outrider.cluster.api.rollouts import history
from outrider.cluster.api.rollouts.history import PATH
from outrider.cluster.common.api_keys import PARTITION_CHARS, ShownKey, shown_key
from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.verifier_service.messages.history import filed_under, prompt_hash
from outrider.verifier_service.messages.request import GenerationRequest
from support.stack import Stack

LINES = {"content-type": "application/jsonl"}


class Door:
    """A gateway with a memory, behind its HTTP application."""

    def __init__(self) -> None:
        self.memory = RolloutMemory()
        self.client = Stack([[5]], rollouts=True, memory=self.memory).client()

    async def give(self, **body: Any) -> dict[str, Any]:
        answer = await self.client.post(PATH, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def taken_along(self, **fields: Any) -> list[tuple[tuple[int, ...], int]]:
        request = GenerationRequest(request_id="r", prompt_token_ids=(1, 2), **fields)
        with self.memory.sampling(request, "v") as sample:
            return [(one.token_ids, one.age) for one in sample.request.history]


def opening(version: str) -> dict[str, Any]:
    return {"weight_version": version, "opens_version": True}


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    door = Door()
    async with door.client:
        yield door


async def test_what_is_given_goes_along_with_the_next_request_of_its_key(door: Door):
    answer = await door.give(prompt_ids=[1, 2], responses=[[7, 8], [7, 9]], weight_version="1", opens_version=True)
    assert answer == {"object": "history", "num_responses": 2}
    await door.give(history_key="k", responses=[[7, 10]], weight_version="2", opens_version=True)
    await door.give(prompt_hash=prompt_hash([1, 2]), responses=[[7, 11]])
    assert door.taken_along() == [((7, 8), 1), ((7, 9), 1), ((7, 11), 0)]
    assert door.taken_along(history_key="k") == [((7, 10), 0)]
    assert door.taken_along(history_key="") == []


async def test_each_key_has_histories_of_its_own_which_an_export_names(door: Door):
    first, second = "a" * PARTITION_CHARS, "b" * PARTITION_CHARS
    for partition, token_id in ((first, 7), (second, 8), ("", 9)):
        token = shown_key.set(ShownKey(partition=partition))
        await door.give(prompt_ids=[1, 2], responses=[[token_id, token_id]])
        await door.give(history_key="k", responses=[[token_id, 1]])
        shown_key.reset(token)
    for partition, token_id in ((first, 7), (second, 8), ("", 9)):
        assert door.taken_along(partition=partition) == [((token_id, token_id), 0)]
        assert door.taken_along(partition=partition, history_key="k") == [((token_id, 1), 0)]
    exported = (await door.client.get(PATH)).content
    assert [json.loads(line).get("partition") for line in exported.splitlines()] == [first] * 2 + [second] * 2 + [
        None
    ] * 2
    await door.client.delete(PATH)
    await door.client.post(PATH, content=exported, headers=LINES)
    assert (await door.client.get(PATH)).content == exported


async def test_a_version_that_is_not_known_ends_no_other_by_mistake(door: Door):
    for version in "1234":
        await door.give(history_key="k", responses=[[7, int(version)]], **opening(version))
    for version in ("5", "44", "", "1 "):
        body = {"history_key": "k", "responses": [[7, 8]], "weight_version": version}
        answer = await door.client.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "weight_version")
    assert [one.token_ids for one in door.memory.exported()] == [[7, int(version)] for version in "1234"]
    await door.give(history_key="k", responses=[[7, 9]], weight_version="2")
    await door.give(history_key="k", responses=[[7, 5]], **opening("5"))
    assert [one.token_ids[1] for one in door.memory.exported()] == [2, 9, 3, 4, 5]


async def test_what_goes_out_comes_in_again(door: Door):
    await door.give(prompt_ids=[1, 2], responses=[[3, 4]])
    for version in "123":
        await door.give(prompt_ids=[1, 2], responses=[[7, 8, int(version)]], **opening(version))
        await door.give(history_key="größer", responses=[[7, 9], [7, 10]], **opening(version))
    exported = await door.client.get(PATH)
    assert exported.headers["content-type"].startswith("application/jsonl")
    lines = [json.loads(line) for line in exported.text.splitlines()]
    assert len(lines) == 10
    assert lines[0] == {"prompt_hash": prompt_hash([1, 2]), "responses": [[3, 4]]}
    first = {"prompt_hash": prompt_hash([1, 2]), "weight_version": "1", "opens_version": True}
    assert lines[1] == {**first, "responses": [[7, 8, 1]]}
    assert [line["weight_version"] for line in lines if line.get("opens_version")] == ["1", "2", "3"]
    other = Door()
    async with other.client:
        answer = await other.client.post(PATH, content=exported.content, headers=LINES)
        assert answer.json() == {"object": "history", "num_responses": 10}
        assert (await other.client.get(PATH)).content == exported.content
    for key in (None, "größer"):
        assert other.taken_along(history_key=key) == door.taken_along(history_key=key) != []


async def test_lines_may_come_in_any_pieces_and_be_empty(door: Door):
    body = b'{"history_key": "k", "responses": [[7, 8]]}\r\n\n{"history_key": "k", "responses": [[7, 9]]}'

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 7):
            yield body[start : start + 7]

    answer = await door.client.post(
        PATH, content=pieces(), headers={"content-type": "application/x-ndjson; charset=utf-8"}
    )
    assert answer.json()["num_responses"] == 2
    assert [one.token_ids for one in door.memory.exported()] == [[7, 8], [7, 9]]
    assert (await door.client.post(PATH, content=b"", headers=LINES)).json()["num_responses"] == 0


async def test_a_bad_line_is_named_and_those_before_it_count(door: Door):
    lines = [{"history_key": "k", "responses": [[7, 8]]}, {"history_key": "k", "responses": [[9999]]}]
    answer = await door.client.post(PATH, content="\n".join(map(json.dumps, lines)), headers=LINES)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"].partition(":")[0]) == ("responses", "line 2")
    assert len(list(door.memory.exported())) == 1
    answer = await door.client.post(PATH, content=b"\n{", headers=LINES)
    assert answer.json()["error"]["message"].startswith("line 2: the body is not JSON")


async def test_a_line_without_end_is_refused(door: Door, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(history, "MAX_BODY_BYTES", 100)
    lines: Iterable[str] = [json.dumps({"history_key": "k", "responses": [[7, 8]]})] * 3
    assert (await door.client.post(PATH, content="\n".join(lines), headers=LINES)).status_code == 413

    async def slowly() -> AsyncIterator[bytes]:
        for line in lines:
            yield f"{line}\n".encode()

    assert (await door.client.post(PATH, content=slowly(), headers=LINES)).json()["num_responses"] == 3
    assert endpoints.MAX_BODY_BYTES > 100


async def test_all_is_forgotten(door: Door):
    await door.give(prompt_ids=[1, 2], responses=[[7, 8]])
    assert (await door.client.delete(PATH)).json() == {"object": "history", "deleted": True}
    assert (await door.client.get(PATH)).text == ""
    assert door.taken_along() == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"responses": [[7, 8]]}, "prompt_ids"),
        ({"prompt_ids": [1], "history_key": "k", "responses": [[7, 8]]}, "history_key"),
        ({"prompt_ids": [], "responses": [[7, 8]]}, "prompt_ids"),
        ({"prompt_ids": [9999], "responses": [[7, 8]]}, "prompt_ids"),
        ({"prompt_ids": "ab", "responses": [[7, 8]]}, "prompt_ids"),
        ({"history_key": "", "responses": [[7, 8]]}, "history_key"),
        ({"history_key": "k" * 129, "responses": [[7, 8]]}, "history_key"),
        ({"prompt_hash": "k", "responses": [[7, 8]]}, "prompt_hash"),
        ({"history_key": "k", "partition": "a b", "responses": [[7, 8]]}, "partition"),
        ({"history_key": "k", "partition": "", "responses": [[7, 8]]}, "partition"),
        ({"history_key": "k"}, "responses"),
        ({"history_key": "k", "responses": [7, 8]}, "responses"),
        ({"history_key": "k", "responses": [[7, -1]]}, "responses"),
        ({"history_key": "k", "responses": [[7, 9999]]}, "responses"),
        ({"history_key": "k", "responses": [[7, 1 << 70]]}, "responses"),
        ({"history_key": "k", "responses": [[7, 8]], "weight_version": 3}, "weight_version"),
        ({"history_key": "k", "responses": [[7, 8]], "weight_version": "v" * 257}, "weight_version"),
        ({"history_key": "k", "responses": [[7, 8]], "model": "other"}, "model"),
        ({"history_key": "k", "responses": [[7, 8]], "respones": 1}, "respones"),
    ],
)
async def test_errors_name_the_field_and_nothing_is_kept(door: Door, body: dict[str, Any], field: str):
    answer = await door.client.post(PATH, json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == field
    assert list(door.memory.exported()) == []


async def test_out_of_rollouts_there_is_no_door_and_no_body_brings_a_history():
    stack = Stack([[5]])
    async with stack.client() as client:
        for method in ("GET", "POST", "DELETE"):
            assert (await client.request(method, PATH)).status_code == 404
        past = [{"token_ids": [7, 8], "age": 0}]
        answer = await client.post("/v1/completions", json={"prompt": [5], "history": past})
        assert answer.json()["warnings"] == ["history: unknown here, passed over"]
    assert [request.history for request in stack.requests] == [()]
    assert filed_under("", ()) == ""
