"""What links ask who comes, where programs of other machines reach them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import NoReturn

from outrider.cluster.config.drafters_config import DraftersConfig
from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.replicas.node_address import with_closed_links

SECRET = b"0123456789abcdef" * 4


def nobody_asks() -> NoReturn:
    raise AssertionError("no secret is needed")


def test_links_of_one_machine_and_those_that_ask_already_stay_as_they_are():
    files = {"link_ssl_certfile": "c", "link_ssl_keyfile": "k", "link_ssl_ca_certs": "a"}
    for options in ({}, {"internal_host": "10.0.0.7", "link_secret_file": "s"}, {"internal_host": "10.0.0.7", **files}):
        config = ServiceConfig(**options)
        assert with_closed_links(config, nobody_asks) is config
    pool = DraftersConfig(model="m", draft_model="d")
    assert with_closed_links(pool, nobody_asks) is pool


def test_beyond_this_machine_all_replicas_show_the_clusters_secret():
    config = ServiceConfig(internal_host="10.0.0.7", rollouts=True, seed=7)
    closed = with_closed_links(config, lambda: SECRET)
    assert (closed.links.secret, closed.seed, closed.verifiers.rollouts) == (SECRET.decode(), 7, True)
    assert with_closed_links(closed, nobody_asks) is closed
    other = with_closed_links(config, lambda: SECRET[::-1])
    assert other.links.secret == SECRET.decode()[::-1]
    assert closed.links.secret == SECRET.decode(), "another cluster on this machine changes nothing"
    for one in (closed, other):
        assert stat.S_IMODE(Path(one.links.link_secret_file or "").stat().st_mode) == 0o600
        assert SECRET.decode() not in repr(one)
