"""The `outrider` command, run in this process: its verbs, their help and their usage errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest

from fakes.command_line import assert_usage_error, invoke
from outrider.cluster.cli.main import main


def verbs(command: click.Command = main, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every command, groups included."""
    yield path
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from verbs(inner, (*path, name))


def test_the_verbs_are_there():
    assert {("serve",), ("generate",), ("demo",), ("bench", "latency"), ("bench", "throughput")} <= set(verbs())


@pytest.mark.parametrize("path", list(verbs()), ids=lambda path: " ".join(path) or "outrider")
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_every_verb_explains_itself(path: tuple[str, ...], flag: str):
    result = invoke(*path, flag)
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output
    assert len(result.output.splitlines()) > 3


def test_help_loads_no_model_code():
    code = "import sys\nfrom outrider.cluster.cli.main import main\nmain(['--help'], standalone_mode=False)\n"
    code += "print(sys.modules.keys() & {'torch', 'transformers', 'ray', 'rich'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_the_version_is_the_packages():
    result = invoke("--version")
    assert result.exit_code == 0
    assert "0.1.0" in result.output


@pytest.mark.parametrize("verb", ["serve", "generate", "demo"])
def test_an_unknown_option_is_refused_by_name(verb: str):
    assert_usage_error(invoke(verb, "--tensor-paralel-size", "2"), "No such option", "--tensor-paralel-size")


def test_an_unknown_verb_is_refused():
    assert_usage_error(invoke("generat"), "No such command")


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--tensor-parallel-size", "0", "tensor_parallel_size"),
        ("--draft-tensor-parallel-size", "-1", "draft_tensor_parallel_size"),
        ("--num-speculative-tokens", "-1", "num_speculative_tokens"),
        ("--threads-per-rank", "0", "threads_per_rank"),
        ("--dtype", "float8", "--dtype"),
        ("--device", "tpu", "--device"),
        ("--max-num-seqs", "many", "--max-num-seqs"),
    ],
)
@pytest.mark.parametrize("verb", ["serve", "generate", "demo"])
def test_a_bad_value_is_a_usage_error_that_names_it(verb: str, option: str, value: str, field: str):
    assert_usage_error(invoke(verb, option, value), field)


def test_serve_shows_a_newcomers_options_first_and_all_when_asked():
    first, whole = invoke("serve", "--help").output, invoke("serve", "--help=all").output
    hidden = [name for command in [main.commands["serve"]] for option in command.params for name in option.opts]
    missing = [name for name in hidden if name.startswith("--") and name not in whole]
    assert missing == []
    assert first.count("\n  -") == 11
    assert ("--grpc-port" in first, "Service:" in whole) == (False, True)
