"""What `outrider serve` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from outrider.cluster.cli.main import main
from services.certificates import Certificates


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ssl-certfile", "absent.pem"], "ssl_keyfile is missing"),
        (["--ssl-certfile", "absent.pem", "--ssl-keyfile", "absent.key"], "ssl_certfile: cannot read absent.pem"),
        (["--link-ssl-certfile", "a", "--link-ssl-keyfile", "b"], "link_ssl_ca_certs is missing"),
        (["--api-key-file", "absent.txt"], "api_key_file: cannot read absent.txt"),
        (["--api-key", "two words"], "api_key: a key must be printable ASCII without spaces"),
    ],
)
def test_unusable_security_is_refused_by_the_options_name(arguments: list[str], complaint: str):
    result = CliRunner().invoke(main, ["serve", "embedded", *arguments])
    assert result.exit_code == 2
    assert complaint in result.output
    assert "two words" not in result.output


def test_a_link_certificate_of_another_key_is_refused(tmp_path: Path):
    certificates = Certificates(tmp_path)
    server, client = certificates.server, certificates.client
    files = {"certfile": server.certfile, "keyfile": client.keyfile, "ca-certs": certificates.ca_certs}
    arguments = [part for name, path in files.items() for part in (f"--link-ssl-{name}", path)]
    result = CliRunner().invoke(main, ["serve", "embedded", *arguments])
    assert result.exit_code == 2
    assert "link_ssl_certfile, link_ssl_keyfile" in result.output


def test_an_environment_variable_without_a_key_does_not_open_the_service():
    result = CliRunner().invoke(main, ["serve", "embedded"], env={"OUTRIDER_API_KEY": ""})
    assert result.exit_code == 2
    assert "OUTRIDER_API_KEY holds no key" in result.output
