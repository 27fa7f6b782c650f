"""API keys: hashed when configured, compared in constant time; what one opens, what is kept of its requests."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import model_validator

from outrider.cluster.common.options import Json, Options

ENVIRONMENT_VARIABLE = "OUTRIDER_API_KEY"
ADMIN_VARIABLE = "OUTRIDER_ADMIN_API_KEY"
HOW_TO_SHOW = "as Authorization: Bearer KEY or x-api-key: KEY"
HOW_TO_BE_ADMIN = f"--admin-api-key, {ADMIN_VARIABLE} or role=admin behind a key of --api-key-file"
ADMIN = "admin"  # the role of a key that also changes weights, others' state and files
_HASH = re.compile(r"[0-9a-f]{64}")
_HASH_PREFIX = "sha256:"
_STORE_PREFIX, _ROLE_PREFIX = "store=", "role="


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """A key that is configured."""

    digest: str  # SHA-256 in hex
    policy: KeyPolicy
    is_admin: bool


def _known(entry: str, source: str) -> _Known:
    """Read a hash, behind which words may stand after colons: a policy, a role."""
    digest, *words = entry.split(":")
    if not _HASH.fullmatch(digest):
        raise ValueError(f"{source} must be SHA-256 sums of 64 hex digits")
    stores = [word for word in words if word != ADMIN]
    policy = _policy_of(":".join(stores), source) if stores else KeyPolicy.DEFAULT
    return _Known(digest=digest, policy=policy, is_admin=ADMIN in words)


def require_hashes(hashes: Iterable[str]) -> None:
    """Raise `ValueError` unless each is a SHA-256 in hex, behind which `:never`, `:salted` and `:admin` may stand.

    The text does not quote what may be a key.
    """
    for entry in hashes:
        _known(entry, "api_key_hashes")


def with_api_key_hashes(options: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Replace the options `api_key`, `admin_api_key`, `api_key_file` and the environment's keys by `api_key_hashes`.

    The sources are combined. Raises `ValueError` naming the source of a malformed key, or a source without keys: a
    missing secret must not open the service.
    """
    rest = dict(options)
    hashes = [digest for entry in _texts(rest, "api_key_hashes") for digest in entry.split(",")]
    hashes += [_hash_of(key, "api_key") for key in _texts(rest, "api_key")]
    hashes += [_admin_hash_of(key, "admin_api_key") for key in _texts(rest, "admin_api_key")]
    if (path := rest.pop("api_key_file", None)) is not None:
        hashes += _hashes_in(_lines(path), "api_key_file", _hash_of_line)
    for variable, hash_of in ((ENVIRONMENT_VARIABLE, _hash_of), (ADMIN_VARIABLE, _admin_hash_of)):
        if variable in environ:
            hashes += _hashes_in(environ[variable].split(","), variable, hash_of)
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
    """Return the hash of a file's line, with the policy and the role that may follow the key."""
    key, *rest = line.split()
    if not rest or not all(word.startswith((_STORE_PREFIX, _ROLE_PREFIX)) for word in rest):
        return _hash_of(line, source)
    stores = [word.removeprefix(_STORE_PREFIX) for word in rest if word.startswith(_STORE_PREFIX)]
    roles = [word.removeprefix(_ROLE_PREFIX) for word in rest if word.startswith(_ROLE_PREFIX)]
    if any(role != ADMIN for role in roles):
        raise ValueError(f"{source}: a key's role must be {ADMIN}, or left out")
    entry = ":".join((_hash_of(key, source), *stores, *roles))
    _known(entry, source)
    return entry


def _admin_hash_of(entry: str, source: str) -> str:
    return f"{_hash_of(entry, source)}:{ADMIN}"


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


class KeyOptions(Options):
    """The keys of a port, as hashes: no secret goes further than the command line, a file or the environment."""

    api_key_hashes: Annotated[tuple[str, ...], Json] = ()  # SHA-256 in hex; none: no key is asked for

    @model_validator(mode="after")
    def _check_hashes(self) -> Self:
        require_hashes(self.api_key_hashes)
        return self


class ApiKeys:
    """The service's keys, as hashes with policies and roles; without keys, the service is open."""

    def __init__(self, hashes: Sequence[str], *, shares: bool = False) -> None:
        """`hashes`: see `require_hashes`. A key that is there twice has the stricter policy, and each role.

        `shares`: all keys have one partition, not each its own.
        """
        self._known = [_known(entry, "api_key_hashes") for entry in hashes]
        self._shares = shares

    def __bool__(self) -> bool:
        return bool(self._known)

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin's key."""
        return any(key.is_admin for key in self._known)

    def admit(self, headers: Iterable[tuple[str, str]]) -> ShownKey | None:
        """Return the known key in the headers, of several the one with the strictest policy; None: there is none."""
        found = min(self._found(headers), key=lambda key: _POLICIES.index(key.policy), default=None)
        if found is None:
            return None
        return ShownKey(policy=found.policy, partition="" if self._shares else _partition_of(found.digest))

    def is_admin(self, headers: Iterable[tuple[str, str]]) -> bool:
        """Return whether an admin's key is in the headers."""
        return any(key.is_admin for key in self._found(headers))

    def _found(self, headers: Iterable[tuple[str, str]]) -> list[_Known]:
        """Return the known keys in the headers. A wrong one takes as long as a right one: each is compared with all."""
        digests = [hash_api_key(key) for key in _shown_keys(headers)]
        fits = [(hmac.compare_digest(digest, key.digest), key) for digest in digests for key in self._known]
        return [key for is_right, key in fits if is_right]


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
