"""Names of requests inside the fleet: two clients may choose one id, and every attempt has its own."""

from __future__ import annotations


def internal_id(gateway_id: str, serial: int, request_id: str) -> str:
    """Return the name that verifiers and drafters know an attempt by; `request_id` is its choice's."""
    return f"{gateway_id}/{serial}/{request_id}"


def client_id(internal_id: str) -> str:
    """Return the choice's id of an internal one; an id of another engine's request stays as it is."""
    return internal_id.split("/", 2)[-1]
