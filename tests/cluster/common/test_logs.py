from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from outrider.cluster.common.logs import JsonFormatter, TextFormatter, configure_logging, request_id

Lines = Callable[[], list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Iterator[Lines]:
    """Return what reads the lines on stderr; the logger is left as it was."""
    logger = logging.getLogger("outrider")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield lambda: capsys.readouterr().err.splitlines()
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_a_record_is_one_json_object_a_line(lines: Lines):
    configure_logging("json", replica="Gateway#a1")
    logger = logging.getLogger("outrider.request")
    logger.info("request %s\nended", "r1", extra={"num_prompt_tokens": 3, "acceptance": 0.5, "finish_reason": None})
    logger.debug("too detailed")
    line = json.loads(*lines())
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "outrider.request",
        "message": "request r1\nended",
        "replica": "Gateway#a1",
        "num_prompt_tokens": 3,
        "acceptance": 0.5,
    }


def test_an_exception_stays_within_its_line(lines: Lines):
    configure_logging("json")
    try:
        raise LookupError("no such block")
    except LookupError:
        logging.getLogger("outrider.x").exception("step failed")
    line = json.loads(*lines())
    assert line["exception"].startswith("Traceback")
    assert line["exception"].endswith("LookupError: no such block")


async def test_each_request_logs_its_own_id(lines: Lines):
    configure_logging("json")
    logger = logging.getLogger("outrider.x")

    async def serve(name: str) -> None:
        request_id.set(name)
        await asyncio.sleep(0)
        logger.info("at work")

    await asyncio.gather(serve("a"), serve("b"))
    logger.info("between requests")
    assert [json.loads(line).get("request_id") for line in lines()] == ["a", "b", None]


def test_a_record_with_an_id_of_its_own_shows_the_clients_beside_it(lines: Lines):
    configure_logging("json")
    logger = logging.getLogger("outrider.request")
    token = request_id.set("client")
    logger.info("done", extra={"request_id": "cmpl-1"})
    logger.info("done", extra={"request_id": "client"})
    request_id.reset(token)
    logger.info("done", extra={"request_id": "cmpl-2"})
    ids = [(line.get("request_id"), line.get("client_request_id")) for line in map(json.loads, lines())]
    assert ids == [("cmpl-1", "client"), ("client", None), ("cmpl-2", None)]


def test_configuring_again_replaces_the_format(lines: Lines, caplog: pytest.LogCaptureFixture):
    configure_logging("json")
    configure_logging("text", replica="v0")
    logging.getLogger("outrider.x").warning("hot", extra={"degrees": 90})
    (line,) = lines()
    assert line.endswith("WARNING outrider.x hot replica=v0 degrees=90")
    assert caplog.records == [], "handlers of the root logger would show it again"


def test_what_libraries_hide_in_records_is_not_shown():
    record = logging.makeLogRecord({"msg": "m", "name": "outrider", "_ray_timestamp_ns": 1})
    assert "ray" not in JsonFormatter().format(record)


@pytest.mark.parametrize("formatter", [JsonFormatter("r"), TextFormatter("r")])
def test_what_is_no_json_value_is_shown_as_text(formatter: logging.Formatter):
    record = logging.makeLogRecord({"msg": "m", "name": "outrider", "peer": {1, 2}})
    assert "{1, 2}" in formatter.format(record)
