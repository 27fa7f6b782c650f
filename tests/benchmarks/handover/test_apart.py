"""The load and the figures of a study of prefill and decode apart, without a service."""

from __future__ import annotations

import json

import httpx
import pytest

from benchmarks.handover.apart import APART, ARMS, Answered, Ask, answer, asks_of, figures_of, load, served_with
from benchmarks.handover.links import BYTES_PER_TOKEN, Handed, row_of
from outrider.cluster.config.service_config import ServiceConfig
from outrider.lab.same_tokens import Pair, Seeded

TEXTS = ["Count the stars. ", "Name a river. "]


def event(token_ids: list[int], **more: object) -> str:
    return f"data: {json.dumps({'choices': [{'text': '', 'token_ids': token_ids}], **more})}\n\n"


def client(*events: str) -> httpx.Client:
    body = "".join((*events, "data: [DONE]\n\n"))
    return httpx.Client(
        base_url="http://served", transport=httpx.MockTransport(lambda _: httpx.Response(200, text=body))
    )


def test_streams_come_first_and_long_prompts_share_no_beginning():
    asks = asks_of(TEXTS, streams=3, max_tokens=5, prompts=2, tokens=100, every_s=2.0)
    assert [ask.is_long for ask in asks] == [False, False, False, True, True]
    assert [ask.begins_s for ask in asks] == [0.0, 0.0, 0.0, 1.0, 3.0]
    assert [ask.body["temperature"] for ask in asks] == [0, 0.8, 0, 0, 0]
    long = [ask.body["prompt"] for ask in asks[3:]]
    assert long[0][0] != long[1][0]
    assert len(long[0]) == pytest.approx(400, abs=5)


def test_an_answer_is_its_tokens_and_its_last_counts():
    metrics = {"speculative_decoding": {"num_accepted_per_position": [2, 1], "num_drafts": 3}}
    begin = json.dumps({"choices": [{"text": "", "token_ids": [1], "prompt_token_ids": [7, 8]}]})
    found = answer(client(f"data: {begin}\n\n", event([]), event([2, 3], metrics=metrics)), {"prompt": "a"})
    assert (found.prompt, found.token_ids) == ([7, 8], [1, 2, 3])
    assert len(found.arrivals_s) == 2, "what brings no token is no output"
    assert (found.accepted, found.num_drafts) == ([2, 1], 3)


def test_every_request_waits_for_its_time():
    waits: list[float] = []
    answers = load(client(event([7])), [Ask({"prompt": "a"}, False), Ask({"prompt": "b"}, True, 1.5)], waits.append)
    assert [one.token_ids for one in answers] == [[7], [7]]
    assert sorted(waits) == [0.0, 1.5]


def test_figures_tell_streams_from_prompts_and_count_what_differs():
    asks = [
        Ask({"prompt": "A river.", "seed": 3, "temperature": 0.8}, False),
        Ask({"prompt": "B", "temperature": 0}, True),
    ]
    rounds = [(2.0, asks, [Answered([0.5, 0.6, 0.9], [8], [1, 2, 3]), Answered([1.5], [9], [4])])]
    bodies = [{"prompt": "a", "temperature": 0}, {"prompt": "b", "temperature": 0}]
    short = [Answered([0.1], [7], [5], [1, 0], 2), Answered([0.1], [7], [6], [1, 1, 1], 2)]
    figures = figures_of(rounds, list(zip(bodies, short, strict=True)))
    assert figures.first_s == [1.5]
    assert figures.gaps_s == pytest.approx([0.1, 0.3])
    assert figures.tokens_per_s == 2.0
    assert figures.accepted == [2, 1, 1, 4]
    row = figures.row("x", figures)
    assert row[:2] == ["x", "1.50"]
    assert row[-2:] == ["4 of 4", "2 1 1 4"]
    other = figures_of([(2.0, asks, [Answered([0.5, 0.6], [8], [1, 9]), Answered([1.5], [9], [4])])], [])
    alone = figures_of(rounds, [])
    assert other.row("y", alone)[-2] == "1 of 2"
    seeded = Seeded(seed=3, temperature=0.8)
    assert other.pairs("y", alone) == [
        Pair(what="y: A river.", prompt=[8], expected=[1, 2, 3], given=[1, 9], seeded=seeded),
        Pair(what="y: B", prompt=[9], expected=[4], given=[4]),
    ]


def test_an_arm_is_what_serve_takes():
    options = served_with(APART, 256, "--max-model-len 2048")
    known = {f"--{name.replace('_', '-')}" for name in ServiceConfig.option_fields()}
    wanted = {option for option in options if option.startswith("--")}
    assert wanted - known <= {"--num-prefill-verifiers"}, "which comes with roles"
    assert options[-2:] == ["--max-model-len", "2048"]
    assert len(ARMS) == 3


def test_a_way_of_kv_is_shown_by_its_medians():
    num_bytes = 512 * BYTES_PER_TOKEN
    found = [Handed(0.1, 0.03, 0.05, num_bytes), Handed(0.2, 0.04, 0.06, num_bytes // 4), Handed(0.4, 0.05, 0.09, 0)]
    row = row_of("the KV waits", (1, 512), "channel", found)
    assert row == ["the KV waits", "1 of 512, 24", "channel", "200", "100, 400", "118", "40", "60", "75%"]
    assert row_of("", (1, 512), "frames", found[:1])[-1] == "0%", "no more than all went in frames"
