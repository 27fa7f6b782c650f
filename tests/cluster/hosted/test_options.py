"""What an operator of another engine says of the pool."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.cluster.hosted.options import PluginOptions


def test_the_pool_is_all_that_must_be_said():
    options = PluginOptions(pool="drafters.example:50061")
    assert options == PluginOptions(pool="drafters.example:50061")
    assert options.credentials is None
    assert (options.speculation, options.draft_seeded, options.learn) == ("auto", False, False)


def test_values_are_what_the_operator_says():
    options = PluginOptions(pool="[::1]:1", max_wait_ms=50, draft_seeded=True, speculation="always")
    assert (options.pool, options.max_wait_ms) == ("[::1]:1", 50.0)
    assert (options.draft_seeded, options.speculation) == (True, "always")
    assert [PluginOptions(pool="h:1", learn=value).learn for value in (True, "all")] == [True, "all"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "pool is missing"),
        ({"pol": "h:1"}, "unknown option 'pol'; did you mean 'pool'"),
        ({"pool": "h:1", "zzz": 1}, "unknown option 'zzz'"),
        ({"pool": 50061}, "pool: "),
        ({"pool": None}, "pool: "),
        ({"pool": "h:1", "max_wait_ms": "soon"}, "max_wait_ms: "),
        ({"pool": "h:1", "draft_seeded": "perhaps"}, "draft_seeded: "),
        ({"pool": "h:1", "learn": "sometimes"}, "learn"),
        ({"pool": "h:1", "speculation": "sometimes"}, "speculation must be auto or always"),
        *[
            ({"pool": "h:1", "max_wait_ms": value}, "max_wait_ms must be ")
            for value in (0, -5, 1e9, float("nan"), float("inf"))
        ],
        *[
            ({"pool": pool}, 'pool must be "host:port"')
            for pool in ("", "host", ":1", "host:", "host:http", "host:0", "host:65536", "host:-1")
        ],
        ({"pool": "h:1", "link_ssl_certfile": "cert.pem"}, "link_ssl_"),
    ],
)
def test_a_bad_value_is_named(values: dict[Any, Any], said: str):
    with pytest.raises(ValueError, match="^" + said.replace("(", r"\(")):
        PluginOptions(**values)
