"""API keys: hashed when they are configured, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ENVIRONMENT_VARIABLE = "OUTRIDER_API_KEY"
_HASH = re.compile(r"[0-9a-f]{64}")
_HASH_PREFIX = "sha256:"


def hash_api_key(key: str) -> str:
    """Return the SHA-256 of a key in hex. Keys are random and long, so neither salt nor stretching is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def require_hashes(hashes: Iterable[str]) -> None:
    """Raise `ValueError` unless each is a SHA-256 in hex; the text does not quote what may be a key."""
    if not all(_HASH.fullmatch(item) for item in hashes):
        raise ValueError("api_key_hashes must be SHA-256 sums of 64 hex digits")


def with_api_key_hashes(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Replace the options `api_key` and `api_key_file`, and the environment's keys, by `api_key_hashes`.

    The sources are combined. Raises `ValueError` naming the source of a malformed key, or a source without keys: a
    missing secret must not open the service.
    """
    rest = dict(options)
    hashes = [digest for entry in _texts(rest, "api_key_hashes") for digest in entry.split(",")]
    hashes += [_hash_of(key, "api_key") for key in _texts(rest, "api_key")]
    if (path := rest.pop("api_key_file", None)) is not None:
        hashes += _hashes_in(_lines(path), "api_key_file")
    if ENVIRONMENT_VARIABLE in environ:
        hashes += _hashes_in(environ[ENVIRONMENT_VARIABLE].split(","), ENVIRONMENT_VARIABLE)
    return {**rest, "api_key_hashes": tuple(dict.fromkeys(hashes))}


def _texts(options: dict[str, Any], name: str) -> list[str]:
    """Remove an option of one or several texts from the others and return it; an empty text is kept, as no key."""
    given = options.pop(name, None)
    texts = [given] if isinstance(given, str) else given or []
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} must be text or a list of texts")
    return list(texts)


def _lines(path: str) -> list[str]:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_key_file: cannot read {path}: {error}") from error
    return [line for line in lines if not line.lstrip().startswith("#")]


def _hashes_in(entries: Iterable[str], source: str) -> list[str]:
    keys = [entry.strip() for entry in entries]
    hashes = [_hash_of(key, source) for key in keys if key]
    if not hashes:
        raise ValueError(f"{source} holds no key")
    return hashes


def _hash_of(entry: str, source: str) -> str:
    if entry.startswith(_HASH_PREFIX):
        digest = entry.removeprefix(_HASH_PREFIX).lower()
        if not _HASH.fullmatch(digest):
            raise ValueError(f"{source}: after sha256: 64 hex digits must follow")
        return digest
    if not entry or not entry.isascii() or not entry.isprintable() or " " in entry:
        raise ValueError(f"{source}: a key must be printable ASCII without spaces")
    return hash_api_key(entry)


class ApiKeys:
    """The service's keys, as hashes; without keys, the service is open."""

    def __init__(self, hashes: Sequence[str]) -> None:
        self._hashes = tuple(hashes)

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def admit(self, headers: Iterable[tuple[str, str]]) -> bool:
        """Return whether the headers have a known key; a wrong key takes as long as a right one."""
        is_known = False
        for key in _shown_keys(headers):
            digest = hash_api_key(key)
            for known in self._hashes:
                is_known |= hmac.compare_digest(digest, known)
        return is_known


def _shown_keys(headers: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in headers:
        if name == "x-api-key":
            yield value
        elif name == "authorization":
            scheme, _, key = value.partition(" ")
            if scheme.lower() == "bearer":
                yield key.strip()
