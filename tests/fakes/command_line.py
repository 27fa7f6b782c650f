"""What the tests of the verbs share: how one is called, and what a usage error looks like."""

from __future__ import annotations

from click.testing import CliRunner, Result

from outrider.cluster.cli.main import main


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def assert_usage_error(result: Result, *named: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Usage:" in result.output
    for text in named:
        assert text in result.output, result.output
    assert "Traceback" not in result.output
