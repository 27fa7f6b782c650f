"""The studies that only developers run, from a checkout: `make study NAME=adaptive ARGS="--concurrency 1,4"`.

Each asks one question of the controller that decides how much to draft, and leaves a page in docs/results. What users
run is `outrider bench`.
"""

from __future__ import annotations

import click

from agents.study import agents
from benchmarks.acceptance import acceptance
from benchmarks.adaptive import adaptive
from benchmarks.ahead import ahead
from benchmarks.chats.turns import turns
from benchmarks.clients import clients
from benchmarks.device.study import device
from benchmarks.draft_lengths.far import far
from benchmarks.draft_lengths.multi import multi
from benchmarks.draft_lengths.rollouts import rollouts
from benchmarks.draft_lengths.survival import survival
from benchmarks.exact import exact
from benchmarks.experts.study import experts
from benchmarks.handover.apart import apart
from benchmarks.handover.moves import moves
from benchmarks.invariance.study import invariance
from benchmarks.kv.study import kv
from benchmarks.masks.tidar import tidar
from benchmarks.policy import policy
from benchmarks.pricing import pricing
from benchmarks.router import router
from benchmarks.step import step
from benchmarks.training.objectives import objectives
from benchmarks.usual import usual
from benchmarks.vllm.pool import vllm_pool
from benchmarks.weights.drift import drift
from benchmarks.weights.follow import follow
from benchmarks.weights.poison import poison
from benchmarks.weights.updates import updates
from outrider.cluster.common.server_options import CONTEXT_SETTINGS

STUDIES = (
    acceptance,
    adaptive,
    agents,
    ahead,
    apart,
    clients,
    device,
    drift,
    exact,
    experts,
    far,
    follow,
    invariance,
    kv,
    moves,
    multi,
    objectives,
    poison,
    policy,
    pricing,
    rollouts,
    router,
    step,
    survival,
    tidar,
    turns,
    updates,
    usual,
    vllm_pool,
)


@click.group(context_settings=CONTEXT_SETTINGS)
def study() -> None:
    """Measure what only developers ask.

    acceptance: what a model's drafters bring per verification, by kind of prompt; adaptive: the price of a step beside
    every fixed draft length; agents: what real agents and their libraries can do here; ahead: drafting while the
    verifier verifies; apart: prefill and decode on verifiers of their own, under streams and long prompts; clients:
    required tool calls and predicted edits of a running server; device: what drafts bring on a played accelerator;
    drift: a pool that learns, while the kind of text changes; exact: a real model's tokens in company, with drafts;
    experts: what steps read of a mixture, and experts in host memory; far: what priced drafts bring with a drafter
    elsewhere, in virtual time; follow: a drafter that learns, while GRPO moves its policy; invariance: rows alone and
    in company, on every path that a CPU takes; kv: KV blocks in use at so many tokens per second; moves: running
    requests move to a verifier that joins, or stay; multi: several drafters' trees in one; objectives: what drafters
    trained to lower each loss are served at; poison: how soon broken weights are taken back; policy: how much to
    draft, over recorded acceptance; pricing: what deciding that costs a step; rollouts: samples of the same prompts,
    epoch after epoch; router: what its decisions cost; step: a running server's load from 1 to many streams and back;
    survival: a learned chance of acceptance beside today's; tidar: a model that drafts for itself by masks; turns: a
    chat's next turn with its beginning computed ahead; updates: answers after new weights; usual: what a small machine
    should draft with; vllm-pool: vLLM with drafts from a pool, and without.
    """


for command in STUDIES:
    study.add_command(command)

if __name__ == "__main__":
    study()
