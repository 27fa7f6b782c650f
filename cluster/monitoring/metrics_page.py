"""Write deploy/METRICS.md, all metrics of a gateway's /metrics, when run as a module."""

from __future__ import annotations

from pathlib import Path

from outrider.cluster.monitoring.fleet_metrics import FLEET_DEFINITIONS
from outrider.cluster.monitoring.metrics import GATEWAY_DEFINITIONS, Definition

PAGE = Path(__file__).resolve().parents[2] / "deploy" / "METRICS.md"
_HEAD = """# Metrics

The gateway serves these at `/metrics`. A test compares; `python -m outrider.cluster.monitoring.metrics_page` writes it.
`engine` is the id of the replica that counted: a replica that is replaced ends its series, the next one begins at 0.
Names that begin with `vllm:` are the same samples under vLLM's names.
"""


def metrics_page() -> str:
    """Return the page as Markdown."""
    return "\n".join(
        [
            _HEAD,
            *_table("What a gateway published", GATEWAY_DEFINITIONS),
            *_table("What verifiers, drafters and the router reported", FLEET_DEFINITIONS),
        ]
    )


def _table(title: str, definitions: tuple[Definition, ...]) -> list[str]:
    return [
        f"## {title}",
        "",
        "| name | type | labels | formula |",
        "|---|---|---|---|",
        *(_row(definition) for definition in definitions),
        "",
    ]


def _row(definition: Definition) -> str:
    names = "<br>".join(f"`{name}`" for name in definition.names)
    return f"| {names} | {definition.kind} | {', '.join(definition.labels)} | {definition.formula} |"


if __name__ == "__main__":
    PAGE.write_text(metrics_page())
