"""API keys: hashed when they are configured, compared in constant time; what is kept of a key's requests, and where."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

ENVIRONMENT_VARIABLE = "OUTRIDER_API_KEY"
_HASH = re.compile(r"[0-9a-f]{64}")
_HASH_PREFIX = "sha256:"
_STORE_PREFIX = "store="


class KeyPolicy(Enum):
    """What may be kept of requests that show a key; the strictest stands first."""

    NEVER = "never"  # nothing
    DEFAULT = ""  # what requests allow; nothing of salted ones is learned from
    SALTED = "salted"  # what requests allow, and within their salt's partition salted ones are learned from


_POLICIES = tuple(KeyPolicy)
PARTITION_CHARS = 32  # hex digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownKey:
    """What holds for requests that show a key."""

    policy: KeyPolicy = KeyPolicy.DEFAULT
    # `PARTITION_CHARS` hex digits: only requests of one partition share KV, past responses and samples. "": that of all
    partition: str = ""


NO_KEY = ShownKey()
# the one of the present HTTP request or gRPC call; set in front of the doors
shown_key: ContextVar[ShownKey] = ContextVar("shown_key", default=NO_KEY)


def hash_api_key(key: str) -> str:
    """Return the SHA-256 of a key in hex. Keys are random and long, so neither salt nor stretching is needed."""
    return hashlib.sha256(key.encode()).hexdigest()


def require_hashes(hashes: Iterable[str]) -> None:
    """Raise `ValueError` unless each is a SHA-256 in hex, with or without a policy after a colon.

    The text does not quote what may be a key.
    """
    for entry in hashes:
        digest, colon, word = entry.partition(":")
        if not _HASH.fullmatch(digest):
            raise ValueError("api_key_hashes must be SHA-256 sums of 64 hex digits")
        if colon:
            _policy_of(word, "api_key_hashes")


def with_api_key_hashes(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Replace the options `api_key` and `api_key_file`, and the environment's keys, by `api_key_hashes`.

    The sources are combined. Raises `ValueError` naming the source of a malformed key, or a source without keys: a
    missing secret must not open the service.
    """
    rest = dict(options)
    hashes = [digest for entry in _texts(rest, "api_key_hashes") for digest in entry.split(",")]
    hashes += [_hash_of(key, "api_key") for key in _texts(rest, "api_key")]
    if (path := rest.pop("api_key_file", None)) is not None:
        hashes += _hashes_in(_lines(path), "api_key_file", _hash_of_line)
    if ENVIRONMENT_VARIABLE in environ:
        hashes += _hashes_in(environ[ENVIRONMENT_VARIABLE].split(","), ENVIRONMENT_VARIABLE, _hash_of)
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


def _hashes_in(entries: Iterable[str], source: str, hash_of: Callable[[str, str], str]) -> list[str]:
    keys = [entry.strip() for entry in entries]
    hashes = [hash_of(key, source) for key in keys if key]
    if not hashes:
        raise ValueError(f"{source} holds no key")
    return hashes


def _hash_of_line(line: str, source: str) -> str:
    """Return the hash of a file's line, with the policy that may follow the key."""
    key, *rest = line.split()
    if len(rest) != 1 or not rest[0].startswith(_STORE_PREFIX):
        return _hash_of(line, source)
    policy = _policy_of(rest[0].removeprefix(_STORE_PREFIX), source)
    return f"{_hash_of(key, source)}:{policy.value}"


def _policy_of(word: str, source: str) -> KeyPolicy:
    if word not in (KeyPolicy.NEVER.value, KeyPolicy.SALTED.value):
        raise ValueError(f"{source}: a key's store must be never or salted, not {word!r}")
    return KeyPolicy(word)


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
    """The service's keys, as hashes with policies; without keys, the service is open."""

    def __init__(self, hashes: Sequence[str], *, shares: bool = False) -> None:
        """`hashes`: see `require_hashes`. A key that is there twice has the stricter policy.

        `shares`: all keys have one partition, not each its own.
        """
        entries = [entry.partition(":") for entry in hashes]
        self._hashes = [
            (digest, ShownKey(policy=KeyPolicy(word), partition="" if shares else _partition_of(digest)))
            for digest, _, word in entries
        ]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def admit(self, headers: Iterable[tuple[str, str]]) -> ShownKey | None:
        """Return the known key in the headers, of several the one with the strictest policy; None: there is none.

        A wrong key takes as long as a right one: each is compared with all.
        """
        digests = [hash_api_key(key) for key in _shown_keys(headers)]
        found = [(hmac.compare_digest(digest, known), key) for digest in digests for known, key in self._hashes]
        return min((key for fits, key in found if fits), key=lambda key: _POLICIES.index(key.policy), default=None)


def _partition_of(digest: str) -> str:
    """Return the name of a key's partition, which tells neither the key nor its hash."""
    return hashlib.blake2b(digest.encode(), digest_size=PARTITION_CHARS // 2, person=b"partition").hexdigest()


def _shown_keys(headers: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in headers:
        if name == "x-api-key":
            yield value
        elif name == "authorization":
            scheme, _, key = value.partition(" ")
            if scheme.lower() == "bearer":
                yield key.strip()
