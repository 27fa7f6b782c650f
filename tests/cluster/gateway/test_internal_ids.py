"""A choice's id is found again in what the fleet calls its attempts."""

from __future__ import annotations

import pytest

from outrider.cluster.gateway.internal_ids import client_id, internal_id


@pytest.mark.parametrize("choice", ["cmpl-1", "cmpl-1-0", "a/b/c-1"])
def test_the_clients_id_comes_back(choice: str):
    first, second = (internal_id("gateway", serial, choice) for serial in (0, 1))
    assert first != second
    assert client_id(first) == client_id(second) == choice


def test_other_engines_ids_stay_as_they_are():
    assert client_id("cmpl-1-0") == "cmpl-1-0"
