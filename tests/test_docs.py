"""What the Markdown pages tell people to type and to open exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from checkout import ROOT, own_files

FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)[^)]*\)")
COMMAND_END = re.compile(r"&&|\|\||[;|#]")
MAX_README_WORDS = 1300
BEFORE_COMMAND = re.compile(r"^\s*(?:\$\s+)?(?:[A-Z_]+=\S+\s+)*(?:\S*/)?(?=(?:outrider|make)(?:\s|$))")


def pages() -> list[Path]:
    return [ROOT / path for path in own_files() if path.endswith(".md")]


def commands(text: str) -> list[list[str]]:
    """Return the words of every `outrider …` and `make …` in code blocks and code spans."""
    blocks = FENCE.findall(text)
    code = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    code += SPAN.findall(FENCE.sub("", text))
    found = []
    for line in code:
        for command in COMMAND_END.split(line):
            if start := BEFORE_COMMAND.match(command):
                found.append(shlex.split(command[start.end() :].replace("…", "")))
    return found


def links(text: str) -> list[str]:
    """Return the targets of links and images that are not code."""
    return LINK.findall(SPAN.sub("", FENCE.sub("", text)))


def make_problems(words: list[str], targets: set[str]) -> list[str]:
    asked = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
    return [f"no make target {word}" for word in asked if word not in targets]


def cli_problems(words: list[str], group: click.Group) -> list[str]:
    """Complain of verbs that the CLI lacks and of long options that the verb lacks."""
    command: click.Command = group
    for word in words[1:]:
        if isinstance(command, click.Group) and re.fullmatch("[a-z][a-z-]*", word):
            if word not in command.commands:
                return [f"no verb {word} in `{shlex.join(words)}`"]
            command = command.commands[word]
        elif word.startswith("--"):
            option = word.partition("=")[0]
            known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
            if option not in known | {"--help"}:
                return [f"no option {option} in `{shlex.join(words)}`"]
    return []


def link_problem(target: str, page: Path) -> str | None:
    """Complain of a relative link to a missing file or heading; other sites are left alone: tests need no network."""
    path, _, anchor = target.partition("#")
    if re.match(r"[a-z]+:", target):
        return None
    file = page.parent / path if path else page
    is_there = file.exists() and (not anchor or file.suffix != ".md" or anchor in anchors(file.read_text()))
    return None if is_there else f"{target} does not exist"


def anchors(text: str) -> set[str]:
    """Return what GitHub calls the headings of a page."""
    headings = HEADING.findall(FENCE.sub("", text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def make_targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):(?!=)", makefile, re.MULTILINE))


# The pages.


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    assert not [problem for target in links(page.read_text()) if (problem := link_problem(target, page))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_of_a_page_exist(page: Path) -> None:
    targets = make_targets((ROOT / "Makefile").read_text())
    asked = [words for words in commands(page.read_text()) if words[0] == "make"]
    assert not [problem for words in asked for problem in make_problems(words, targets)]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_outrider_commands_of_a_page_exist(page: Path) -> None:
    from outrider.cluster.cli.main import main

    asked = [words for words in commands(page.read_text()) if words[0] == "outrider"]
    assert not [problem for words in asked for problem in cli_problems(words, main)]


def test_the_makefile_runs_verbs_that_exist() -> None:
    from outrider.cluster.cli.main import main

    verbs = re.findall(r"^\t\$\(BIN\)/outrider ([a-z-]+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "demo" in verbs
    assert set(verbs) <= set(main.commands)


def test_the_makefile_has_the_promised_targets() -> None:
    promised = {"demo", "serve", "test", "soak", "bench", "lint", "train", "proto", "clean"}
    assert promised <= make_targets((ROOT / "Makefile").read_text())


def test_the_readme_says_how_to_begin() -> None:
    asked = commands((ROOT / "README.md").read_text())
    assert ["make", "demo"] in asked
    assert any(words[:2] == ["outrider", "serve"] for words in asked)


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MAX_README_WORDS


# The rules.

PAGE = """
Run `outrider serve` or `make demo`; say `make` and `outrider` as you like. `[not](a-link)` is code.

```bash
$ HF_HOME=/tmp .venv/bin/outrider bench latency --num-prompts 3 \\
    --output=x.json   # then make tea
make test && make lint ARGS=-v
pip install outrider
```

See [the design](docs/design.md#words), [here](#rules), [there](https://example.org/x.md) and ![it](a.png "title").
"""


def test_commands_are_found_where_they_are_code() -> None:
    assert commands(PAGE) == [
        ["outrider", "bench", "latency", "--num-prompts", "3", "--output=x.json"],
        ["make", "test"],
        ["make", "lint", "ARGS=-v"],
        ["outrider", "serve"],
        ["make", "demo"],
        ["make"],
        ["outrider"],
    ]


def test_links_are_found_where_they_are_not_code() -> None:
    assert links(PAGE) == ["docs/design.md#words", "#rules", "https://example.org/x.md", "a.png"]


def test_a_missing_link_is_caught() -> None:
    page = ROOT / "README.md"
    assert link_problem("no/such.md#x", page) == "no/such.md#x does not exist"
    assert link_problem("LICENSE", page) is None
    assert link_problem("https://example.org/x.md#y", page) is None
    assert link_problem("CONTRIBUTING.md#where-a-new-thing-goes", page) is None
    assert link_problem("CONTRIBUTING.md#no-such-heading", page) == "CONTRIBUTING.md#no-such-heading does not exist"
    assert link_problem("#no-such-heading", page) == "#no-such-heading does not exist"


def test_headings_are_called_as_github_calls_them() -> None:
    page = "# `GET` it, now\n\n```\n# code\n```\n## 5. Exact, in two ways\n"
    assert anchors(page) == {"get-it-now", "5-exact-in-two-ways"}


def test_a_missing_make_target_is_caught() -> None:
    assert make_problems(["make", "test", "tea", "ARGS=x"], {"test"}) == ["no make target tea"]
    assert make_targets("a:=1\nVENV := x\nlint: x  ## y\n\t@true\n") == {"lint"}


@click.group()
def fake_cli() -> None: ...


@fake_cli.command()
@click.argument("model", required=False)
@click.option("--port", type=int)
@click.option("--color/--no-color")
def serve(model: str | None, port: int, color: bool) -> None: ...


def test_a_missing_verb_or_option_is_caught() -> None:
    assert cli_problems(["outrider", "sevre"], fake_cli)
    assert cli_problems(["outrider", "serve", "--prot", "1"], fake_cli)
    assert not cli_problems(["outrider", "serve", "my-model", "--port=1", "--no-color", "--help"], fake_cli)
    assert not cli_problems(["outrider", "--help"], fake_cli)
