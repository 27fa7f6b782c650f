"""What is wrong with options is one line that names the field, and never says the value."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import Field, model_validator

from outrider.cluster.common.options import Json, Options, Port, Positive, Seconds


class Example(Options):
    name: str
    count: Positive = 1
    port: Port = 80
    wait_s: Seconds = 1.0
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    mode: Literal["fast", "slow", "off"] = "fast"
    labels: Annotated[dict[str, str], Json] = Field({})
    taps: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.count == self.port:
            raise ValueError("count must be another number than port")
        return self


def test_a_value_becomes_its_type_and_so_does_the_json_of_one():
    options = Example(name="n", count="3", taps=[1, 2], labels='{"a": "b"}')
    assert (options.count, options.taps, options.labels) == (3, (1, 2), {"a": "b"})
    assert options == Example(name="n", count=3, taps=(1, 2), labels={"a": "b"})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"nmae": "n"}, "unknown option 'nmae'; did you mean 'name'?"),  # although `name` is missing, too
        ({}, "name is missing"),
        ({"count": 0}, "count must be at least 1"),
        ({"count": 1.5}, "count: Input should be a valid integer, got a number with a fractional part"),
        ({"port": 65536}, "port must be at most 65535"),
        ({"wait_s": 0}, "wait_s must be positive"),
        ({"wait_s": "inf"}, "wait_s must be finite"),
        ({"share": 1.5}, "share must be at most 1"),
        ({"mode": "secret"}, "mode must be fast, slow or off"),
        ({"labels": "{secret"}, "labels: Invalid JSON: key must be a string at line 1 column 2"),
        ({"labels": {"a": 1}}, "labels: Input should be a valid string"),
        ({"taps": [1, "secret"]}, "taps: Input should be a valid integer, unable to parse string as an integer"),
        ({"count": 80}, "count must be another number than port"),
    ],
)
def test_an_error_is_one_line_that_names_the_field_and_not_the_value(values: dict[str, Any], said: str):
    required = {} if "nmae" in values or not values else {"name": "n"}
    with pytest.raises(ValueError) as error:  # noqa: PT011 - the text is compared below
        Example(**required, **values)
    assert str(error.value) == said


def test_options_do_not_change():
    with pytest.raises(ValueError, match="frozen"):
        Example(name="n").count = 2
