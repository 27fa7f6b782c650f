from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path

import pytest

from outrider.cluster.common import api_keys
from outrider.cluster.common.api_keys import ApiKeys, KeyPolicy, hash_api_key, with_api_key_hashes
from outrider.cluster.config.service_config import ServiceConfig

KEYS = ApiKeys([hash_api_key("first"), hash_api_key("second")])


def policy_of(keys: ApiKeys, headers: list[tuple[str, str]]) -> KeyPolicy | None:
    shown = keys.admit(headers)
    return None if shown is None else shown.policy


def test_keys_of_all_sources_count_together_and_only_hashes_go_on(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(f"# team a\nfrom-file\n\n  sha256:{hash_api_key('hashed').upper()}\n   # team b\nfrom-option\n")
    options = {"port": 1, "api_key": ("from-option", "other"), "api_key_file": str(file)}
    built = with_api_key_hashes(options, {"OUTRIDER_API_KEY": "env-one, env-two"})
    expected = ("from-option", "other", "from-file", "hashed", "env-one", "env-two")
    assert built == {"port": 1, "api_key_hashes": tuple(hash_api_key(key) for key in expected)}
    assert ServiceConfig(**built).gateway.api_key_hashes == built["api_key_hashes"]
    assert "from-file" not in repr(ServiceConfig(**built))


def test_hashes_may_come_from_yaml_or_as_one_text():
    hashes = [hash_api_key("a"), hash_api_key("b")]
    for given in (hashes, ",".join(hashes)):
        assert with_api_key_hashes({"api_key_hashes": given}, {})["api_key_hashes"] == tuple(hashes)
    assert with_api_key_hashes({"api_key": (), "api_key_file": None}, {}) == {"api_key_hashes": ()}
    assert with_api_key_hashes({"api_key": "one"}, {})["api_key_hashes"] == (hash_api_key("one"),)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("# nothing but a comment\n\n", "api_key_file holds no key"),
        ("sha256:12ab", "api_key_file: after sha256:"),
        ("two words", "api_key_file: a key must be"),
        ("key stor=never", "api_key_file: a key must be"),
        ("key store=never more", "api_key_file: a key must be"),
        ("größer", "api_key_file: a key must be"),
    ],
)
def test_a_bad_file_is_refused_by_name_and_its_text_is_not_repeated(tmp_path: Path, content: str, complaint: str):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ValueError, match=complaint) as raised:
        with_api_key_hashes({"api_key_file": str(file)}, {})
    assert content not in str(raised.value)


def test_a_key_of_a_file_may_say_what_is_kept_of_what_comes_with_it(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(f"a\nb  store=never\n\tsha256:{hash_api_key('c')} store=salted \nstore=never\n")
    hashes = with_api_key_hashes({"api_key_file": str(file)}, {})["api_key_hashes"]
    expected = (hash_api_key("a"), f"{hash_api_key('b')}:never", f"{hash_api_key('c')}:salted")
    assert hashes == (*expected, hash_api_key("store=never")), "a key, however odd"
    keys = ApiKeys(ServiceConfig(api_key_hashes=hashes).gateway.api_key_hashes)
    found = [policy_of(keys, [("x-api-key", key)]) for key in "abcd"]
    assert found == [KeyPolicy.DEFAULT, KeyPolicy.NEVER, KeyPolicy.SALTED, None]


def test_some_keys_are_an_admins(tmp_path: Path):
    file = tmp_path / "keys"
    hashed = f"sha256:{hash_api_key('four')}"
    file.write_text(f"plain\nsecond role=admin\nthird store=never role=admin\n{hashed} role=admin\n")
    options = {"admin_api_key": "first", "api_key": ("plain-too",), "api_key_file": str(file)}
    hashes = with_api_key_hashes(options, {"OUTRIDER_ADMIN_API_KEY": f"sha256:{hash_api_key('env')}"})["api_key_hashes"]
    keys = ApiKeys(ServiceConfig(api_key_hashes=hashes).gateway.api_key_hashes)
    ranks = {name: keys.is_admin([("x-api-key", name)]) for name in ("first", "second", "third", "four", "env")}
    assert ranks == dict.fromkeys(ranks, True)
    assert not any(keys.is_admin([("x-api-key", name)]) for name in ("plain", "plain-too", "unknown"))
    assert not keys.is_admin([])
    assert keys.admit([("x-api-key", "third")]).policy is KeyPolicy.NEVER
    assert keys.admit([("x-api-key", "first")]).policy is KeyPolicy.DEFAULT, (
        "an admin's key opens what a plain one does"
    )
    assert keys.has_admin
    assert not KEYS.has_admin
    twice = ApiKeys([hash_api_key("k"), f"{hash_api_key('k')}:admin"])
    assert twice.is_admin([("authorization", "Bearer k")])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("key role=root", "api_key_file: a key's role must be admin"),
        ("key role=", "api_key_file: a key's role must be admin"),
        ("key store=never store=salted", "api_key_file: a key's store must be never or salted, not 'never:salted'"),
        ("key role=admin store=all", "api_key_file: a key's store must be"),
    ],
)
def test_a_role_that_there_is_not_is_named_with_its_source(tmp_path: Path, line: str, said: str):
    file = tmp_path / "keys"
    file.write_text(line)
    with pytest.raises(ValueError, match=said):
        with_api_key_hashes({"api_key_file": str(file)}, {})


@pytest.mark.parametrize("policies", list(itertools.permutations(KeyPolicy, 2)))
def test_of_several_keys_and_of_one_that_is_there_twice_the_strictest_policy_holds(policies: tuple[KeyPolicy, ...]):
    strictest = next(policy for policy in KeyPolicy if policy in policies)
    entries = [f"{hash_api_key(str(number))}:{policy.value}" for number, policy in enumerate(policies)]
    shown = [("authorization", "Bearer 0"), ("x-api-key", "1"), ("x-api-key", "unknown")]
    assert policy_of(ApiKeys([entry.rstrip(":") for entry in entries]), shown) is strictest
    twice = [f"{hash_api_key('k')}:{policy.value}".rstrip(":") for policy in policies]
    assert policy_of(ApiKeys(twice), [("x-api-key", "k")]) is strictest


@pytest.mark.parametrize("word", ["always", "", "never:salted", "Never"])
def test_a_policy_that_there_is_not_is_named_with_its_source(tmp_path: Path, word: str):
    file = tmp_path / "keys"
    file.write_text(f"secret store={word}")
    with pytest.raises(
        ValueError, match=f"api_key_file: a key's store must be never or salted, not '{word}'"
    ) as raised:
        with_api_key_hashes({"api_key_file": str(file)}, {})
    assert "secret" not in str(raised.value)
    with pytest.raises(ValueError, match=f"api_key_hashes: a key's store must be never or salted, not '{word}'"):
        ServiceConfig(api_key_hashes=(f"{hash_api_key('a')}:{word}",))


def test_a_missing_secret_does_not_open_the_service(tmp_path: Path):
    with pytest.raises(ValueError, match="api_key_file: cannot read"):
        with_api_key_hashes({"api_key_file": str(tmp_path / "absent")}, {})
    with pytest.raises(ValueError, match="OUTRIDER_API_KEY holds no key"):
        with_api_key_hashes({}, {"OUTRIDER_API_KEY": ""})
    with pytest.raises(ValueError, match="OUTRIDER_ADMIN_API_KEY holds no key"):
        with_api_key_hashes({}, {"OUTRIDER_ADMIN_API_KEY": " "})
    for empty in ("", ("",)):  # `serve run module:build_app api_key=$KEY` without a KEY
        with pytest.raises(ValueError, match="api_key: a key must be"):
            with_api_key_hashes({"api_key": empty}, {})
    with pytest.raises(ValueError, match="api_key_hashes must be"):
        ServiceConfig(**with_api_key_hashes({"api_key_hashes": ""}, {}))


@pytest.mark.parametrize("given", [12345, [12345], True])
def test_a_key_that_yaml_made_a_number_of_is_refused_by_name(given: object):
    with pytest.raises(ValueError, match="api_key must be text or a list of texts") as raised:
        with_api_key_hashes({"api_key": given}, {})
    assert "12345" not in str(raised.value)


def test_the_configuration_takes_nothing_but_hashes():
    with pytest.raises(ValueError, match="api_key_hashes must be") as raised:
        ServiceConfig(api_key_hashes=("a-secret-key",))
    assert "a-secret-key" not in str(raised.value)
    assert hash_api_key("abc") == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize(
    ("headers", "is_admitted"),
    [
        ([("authorization", "Bearer first")], True),
        ([("authorization", "bearer second")], True),
        ([("x-api-key", "second")], True),
        ([("authorization", "Bearer wrong"), ("x-api-key", "first")], True),
        ([], False),
        ([("authorization", "first")], False),
        ([("authorization", "Basic first")], False),
        ([("authorization", "Bearer ")], False),
        ([("authorization", "Bearer firs")], False),
        ([("x-api-key", "first, second")], False),
        ([("x-api-key", hash_api_key("first"))], False),
        ([("cookie", "first")], False),
    ],
)
def test_a_key_is_shown_as_bearer_token_or_x_api_key(headers: list[tuple[str, str]], is_admitted: bool):
    assert policy_of(KEYS, headers) is (KeyPolicy.DEFAULT if is_admitted else None)


def test_every_hash_is_compared_whichever_fits(monkeypatch: pytest.MonkeyPatch):
    compared: list[str] = []

    def compare(shown: str, known: str) -> bool:
        compared.append(known)
        return shown == known

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    for key in ("first", "second", "wrong"):
        KEYS.admit([("x-api-key", key)])
    assert compared == [hash_api_key("first"), hash_api_key("second")] * 3


def test_each_key_has_a_partition_of_its_own_unless_all_share_one():
    def partitions(*, shares: bool) -> list[str]:
        keys = ApiKeys([hash_api_key("a"), f"{hash_api_key('b')}:never", hash_api_key("c")], shares=shares)
        found = [keys.admit([("x-api-key", key)]) for key in "abca"]
        return [key.partition for key in found if key is not None]

    first, second, third, again = partitions(shares=False)
    assert first == again
    assert len({first, second, third}) == 3
    for digest in map(hash_api_key, "abc"):
        assert all(re.fullmatch("[0-9a-f]{32}", one) and one not in digest for one in (first, second, third))
    assert partitions(shares=True) == [""] * 4


def test_without_keys_there_is_nothing_to_ask_for():
    assert not ApiKeys(())
    assert KEYS
