"""The view of `outrider top`: a pure function from a service's state to a rich renderable.

Figures are from /load (see `fleet_load`); latencies are from /metrics, of one gateway's requests since its start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cluster.client.chat import UNSAFE
from outrider.cluster.common.terminal import NOTHING

BAR_CELLS = 10
FULL_KV = 0.9  # above it, preemptions are near
SHOWN_VERSIONS = 3
OLD_SNAPSHOT_S = 3.0  # the router has missed several intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Quantiles of one of a gateway's histograms."""

    name: str
    p50_s: float
    p99_s: float
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopState:
    """A service's last answers, and the error if there is no newer one."""

    url: str
    load: Mapping[str, Any] | None = None  # None: it has never answered
    latencies: Sequence[Latency] = field(default=())
    error: str | None = None
    age_s: float = 0.0  # of `load`


def render(state: TopState) -> RenderableType:
    """Draw one frame."""
    parts: list[RenderableType] = [_title(state)]
    if state.error is not None:
        since = "" if state.load is None else f"; what follows is {state.age_s:.0f} s old"
        parts.append(safe_text(f"no answer: {state.error}{since}", style="bold red"))
    if state.load is not None:
        beside = Columns([_decisions(state.load["decisions"]), _latencies(state.latencies)], padding=(0, 4))
        verifiers, drafters = state.load["verifiers"], state.load["drafters"]
        parts.append(_totals(state.load["totals"]))
        learners = state.load.get("learners") or ()
        learning: list[RenderableType] = [_learners(learners)] if learners else []  # most services have none
        for part in (_verifiers(verifiers), _drafts(verifiers), _drafters(drafters), *learning, beside):
            parts += [Text(), part]
    return Group(*parts)


def _title(state: TopState) -> Text:
    title = Text.assemble(("Outrider ", "bold"), state.url)
    if state.load is None:
        return title
    age_s = state.load["age_s"]
    if age_s is None:
        title.append("   no word from the router yet", style="yellow")
    elif age_s > OLD_SNAPSHOT_S:
        title.append(f"   the router has been silent for {age_s:.0f} s", style="yellow")
    return title


def _totals(totals: Mapping[str, Any]) -> Text:
    return Text.assemble(
        f"running {totals['num_running']}   waiting {totals['num_waiting']}   ",
        (f"{totals['tokens_per_s']:.1f} tokens/s", "bold"),
        f"   {_number(totals['tokens_per_s_per_accelerator'], 1)} per accelerator",
        f"   accepted {_percent(totals['acceptance_rate'])}",
        f"   {_number(totals['mean_acceptance_length'], 2)} tokens/verification",
    )


def _verifiers(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("verifiers", "state", ["running", "waiting", "KV", "tokens/s", "step", "knee", "verify idle"])
    for row in rows:
        table.add_row(
            safe_text(row["id"]),
            _state(row["state"]),
            str(row["num_running"]),
            Text(str(row["num_waiting"]), style="yellow" if row["num_waiting"] else ""),
            _bar(row["kv_usage"]),
            f"{row['tokens_per_s']:.1f}",
            _ms(row["mean_step_s"]),
            _number(row["knee"], 0),
            _percent(row["verify_idle_share"]),
        )
    return _or_empty(table)


def _drafts(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Draw the verifiers' drafts."""
    table = _table("drafts of", "plan", ["asked", "price", "accepted", "tokens/verif.", "late", "late by"])
    for row in rows:
        table.add_row(
            safe_text(row["id"]),
            _speculation(row),
            _number(row["draft_length_mean"], 1),
            _number(row["price"], 2),
            _percent(row["acceptance_rate"]),
            _number(row["mean_acceptance_length"], 2),
            _percent(row["late_share"]),
            _ms(row["mean_lateness_s"]),
        )
    return _or_empty(table)


def _drafters(rows: Sequence[Mapping[str, Any]]) -> Table:
    figures = ["pool", "sessions", "queue", "draft", "ahead hits", "links up", "circuits open"]
    table = _table("drafters", "state", figures)
    for row in rows:
        table.add_row(
            safe_text(row["id"]),
            _state(row["state"]),
            safe_text(row["pool"]),
            str(row["num_sessions"]),
            str(row["queue_depth"]),
            _ms(row["mean_draft_s"] or None),
            _percent(row["hit_rate"]),
            str(row["num_links_up"]),
            Text(str(row["num_circuits_open"]), style="red" if row["num_circuits_open"] else ""),
        )
    return _or_empty(table)


def _learners(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("learner of", "phase", ["serving", "samples", "steps"])
    table.add_column("named per round")
    table.add_column("last event")
    for row in rows:
        table.add_row(
            safe_text(row["pool"]),
            safe_text(row["phase"]),
            safe_text(row["serving"]),
            str(row["num_samples"]),
            str(row["num_steps"]),
            safe_text(named_per_round(row["versions"])),
            safe_text(row["last_event"] or NOTHING),
        )
    return table


def named_per_round(versions: Sequence[Mapping[str, Any]]) -> str:
    """Return how many draft tokens the target committed, per round, of the last versions that drafted: "v2 1.75"."""
    drafted = [version for version in versions if version["named_per_round"] is not None]
    shown = [f"{version['name']} {version['named_per_round']:.2f}" for version in drafted[-SHOWN_VERSIONS:]]
    return ", ".join(shown) or NOTHING


def _decisions(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("speculation", "reason", "decisions", "share", box=None, pad_edge=False, title_justify="left")
    total = sum(row["count"] for row in rows)
    for row in sorted(rows, key=lambda row: -row["count"]):
        reason = NOTHING if row["reason"] == "none" else row["reason"]
        style = "green" if row["decision"] == "on" else ""
        table.add_row(
            Text(row["decision"], style=style), safe_text(reason), str(row["count"]), _percent(row["count"] / total)
        )
    return _or_empty(table)


def _latencies(latencies: Sequence[Latency]) -> Table:
    table = Table("latency", "p50", "p99", "count", box=None, pad_edge=False)
    for latency in latencies:
        table.add_row(latency.name, _ms(latency.p50_s), _ms(latency.p99_s), str(latency.count))
    return _or_empty(table)


def _table(role: str, state: str, figures: Sequence[str]) -> Table:
    table = Table(role, state, box=None, pad_edge=False, header_style="bold cyan")
    for column in figures:
        table.add_column(column, justify="right")
    return table


def _or_empty(table: Table) -> Table:
    if table.row_count == 0:
        table.add_row("none")
    return table


def safe_text(text: str, style: str = "") -> Text:
    """Return a server's text without styles or control characters: it must not control the terminal."""
    return Text(text.translate(UNSAFE), style=style)


def _state(state: str) -> Text:
    return Text(state, style="green" if state == "ready" else "yellow")


def _speculation(row: Mapping[str, Any]) -> Text:
    if row["draft_length"]:
        return Text(f"up to {row['draft_length']}", style="green")
    return safe_text(f"off: {row['disabled_reason'] or NOTHING}", style="yellow")


def _bar(share: float) -> Text:
    num_full = round(BAR_CELLS * min(max(share, 0.0), 1.0))
    style = "red" if share >= FULL_KV else "cyan"
    return Text.assemble(("█" * num_full, style), ("░" * (BAR_CELLS - num_full), "dim"), f" {share:4.0%}")


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _number(value: float | None, num_digits: int) -> str:
    return NOTHING if value is None else f"{value:.{num_digits}f}"


def _ms(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:.1f} ms"
