"""`python -m benchmarks.invariance`: measure the path that this process takes; see study.py for all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import click

from benchmarks.invariance.attention import attention_cases
from benchmarks.invariance.company import BRIEF, WHOLE, Finding, found
from benchmarks.invariance.models import model_findings
from benchmarks.invariance.products import product_cases
from outrider.verifier_service.cpu.kernels import own_isa


@click.command()
@click.option("--brief", "is_brief", is_flag=True, help="Small shapes and fewer batches, as the tests take them.")
@click.option("--json", "is_json", is_flag=True)
def main(is_brief: bool, is_json: bool) -> None:
    """Say of each product whether a row's bits depend on its company; OUTRIDER_CPU_KERNELS chooses the path."""
    if not is_json:
        for finding in findings(is_brief=is_brief):
            click.echo(f"{finding.product:<45} {finding.dtype:<24} {finding.seen or 'invariant'}")
        return
    found_all = [dataclasses.asdict(finding) for finding in findings(is_brief=is_brief)]
    click.echo(json.dumps({"isa": own_isa(), "findings": found_all}))


def findings(*, is_brief: bool) -> Iterator[Finding]:
    plan = BRIEF if is_brief else WHOLE
    for case in product_cases(is_brief=is_brief):
        yield found(case, plan)
    for case in attention_cases():
        yield found(case, plan)
    yield from model_findings(is_brief=is_brief)


if __name__ == "__main__":
    main()
