"""The studies that only developers run, from a checkout: `make study NAME=adaptive ARGS="--concurrency 1,4"`.

Each asks one question of the controller that decides how much to draft, and leaves a page in docs/results. What users
run is `outrider bench`.
"""

from __future__ import annotations

import click

from agents.study import agents
from benchmarks.adaptive import adaptive
from benchmarks.device.study import device
from benchmarks.draft_lengths.far import far
from benchmarks.exact import exact
from benchmarks.invariance.study import invariance
from benchmarks.policy import policy
from benchmarks.pricing import pricing
from benchmarks.router import router
from benchmarks.step import step
from benchmarks.usual import usual
from benchmarks.weights.drift import drift
from outrider.cluster.common.server_options import CONTEXT_SETTINGS

STUDIES = (
    adaptive,
    agents,
    device,
    drift,
    exact,
    far,
    invariance,
    policy,
    pricing,
    router,
    step,
    usual,
)


@click.group(context_settings=CONTEXT_SETTINGS)
def study() -> None:
    """Measure what only developers ask.

    adaptive: the price of a step beside every fixed draft length; agents: what real agents and their libraries can
    do here; device: what drafts bring on a played accelerator; drift: a pool that learns, while the kind of text
    changes; exact: a real model's tokens in company, with drafts; far: what priced drafts bring with a drafter
    elsewhere, in virtual time; invariance: rows alone and in company, on every path that a CPU takes; policy: how
    much to draft, over recorded acceptance; pricing: what deciding that costs a step; router: what its decisions
    cost; step: a running server's load from 1 to many streams and back; usual: what a small machine should draft
    with.
    """


for command in STUDIES:
    study.add_command(command)

if __name__ == "__main__":
    study()
