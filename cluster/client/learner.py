"""`outrider learner`: ask a running service what its learners are at, and have them do something."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cluster.client.openai_client import Server, ServerError, ask_json, open_client
from outrider.cluster.client.top_view import safe_text
from outrider.cluster.common.terminal import NOTHING

PATH = "/v1/learner"


def ask(server: Server, action: str | None = None, body: dict[str, Any] | None = None) -> Any:
    """Return the server's answer to an action, or what its learners are at; raises `ServerError` in one line."""
    return asyncio.run(_ask(server, action, body))


async def _ask(server: Server, action: str | None, body: dict[str, Any] | None) -> Any:
    async with open_client(server) as client:
        try:
            if action is None:
                return (await ask_json(client, "GET", PATH))["data"]
            return await ask_json(client, "POST", f"{PATH}/{action}", body or {})
        except ServerError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise ServerError(
                    f"nothing learns at {server.base_url}, or not at a port that all may reach"
                ) from error
            raise
        except (LookupError, TypeError) as error:
            raise ServerError(f"{PATH} answers no list of learners: is this an Outrider service?") from error


def render(learners: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Draw what each learner is at: its counts, a table of its versions, and what happened last."""
    parts: list[RenderableType] = []
    for learner in learners:
        parts += [Text() for _ in parts[:1]] + [_title(learner), *_counts(learner)]
        parts += [_versions(learner["versions"]), safe_text(f"last: {learner['last_event'] or NOTHING}", "dim")]
    return Group(*parts or [Text("no learner has reported yet")])


def _title(learner: Mapping[str, Any]) -> Text:
    return Text.assemble(safe_text(learner["pool"], "bold"), safe_text(f"   {learner['phase']}"))


def _counts(learner: Mapping[str, Any]) -> list[Text]:
    loss = NOTHING if learner["loss"] is None else f"{learner['loss']:.3f}"
    size = learner["num_bytes"] / (1 << 20)
    return [
        Text(
            f"{learner['num_samples']} samples of {size:.1f} MiB; "
            f"{learner['num_seen']} seen, {learner['num_dropped']} dropped on the way"
        ),
        Text(f"{learner['num_steps']} training steps in {learner['train_s']:.0f} CPU s, loss {loss}"),
        Text(
            f"{learner['num_candidates']} candidates: {learner['num_published']} published, "
            f"{learner['num_refused']} refused, {learner['num_rolled_back']} rolled back"
        ),
    ]


def _versions(versions: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("version", "fate", box=None, pad_edge=False, header_style="bold cyan")
    for figure in ("rounds", "drafted", "named", "acceptance", "named per round"):
        table.add_column(figure, justify="right")
    for version in versions:
        acceptance, per_round = version["acceptance"], version["named_per_round"]
        table.add_row(
            safe_text(version["name"], "green" if version["is_serving"] else ""),
            safe_text(version["fate"]),
            *(str(version[name]) for name in ("num_rounds", "num_draft_tokens", "num_named_tokens")),
            NOTHING if acceptance is None else f"{acceptance:.1%}",
            NOTHING if per_round is None else f"{per_round:.2f}",
        )
    return table
