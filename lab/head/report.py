"""What making a head did, as a page: its phases with their seconds, and tokens per verification by kind of prompt."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from outrider.cluster.common.terminal import markdown_table
from outrider.drafter_service.training.served import Rounds
from outrider.lab.head.acceptance import Served, to_rows
from outrider.lab.head.phases import Done
from outrider.lab.report import describe_machine


def to_page(model: str, done: Mapping[str, Done]) -> str:
    """Write Markdown."""
    rows = [(name, each.does, str(each.figures["result"]), f"{each.seconds:.1f}") for name, each in done.items()]
    lines = [
        f"# A head for {model}",
        "",
        f"{describe_machine()}; {device_name()}",
        "",
        *markdown_table(("phase", "what it does", "what came of it", "seconds"), rows, num_left=3),
    ]
    if judged := [served for each in done.values() for served in served_of(each)]:
        lines += ["", "Tokens per verification, by kind of held-out prompt:", "", *to_rows(judged)]
    return "\n".join(lines) + "\n"


def served_of(done: Done) -> list[Served]:
    """Read back what a phase of judging found; other phases have found none."""
    return [
        Served(
            drafter=each["drafter"],
            sampling=each["sampling"],
            by_kind={kind: Rounds(**rounds) for kind, rounds in each["by_kind"].items()},
        )
        for each in done.figures.get("served", ())
    ]


def device_name() -> str:
    """Name the GPU, if there is one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
