"""`make study NAME=multi`: the drafts of two drafters merged into one tree, at equal rows.

The embedded target's greedy answers to its held-out prompts are verified again: a draft is right as far as it equals
them. Arms, each with so many rows (draft tokens) per verification: *model*: a tree of the embedded draft model;
*look-up*: a suffix tree; *chosen*: one of both, by the rule of `HybridDrafter`: the look-up's expected tokens against
the model's recent mean; *merged*: the look-up's first nodes, at most half of the rows and only where it expects half a
token, and then as many of the model's nodes as fit; tokens that both name after the same path are one node. Greedy
drafts are point masses, so that the merged tree is verified exactly by the rule that verifies any tree.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from outrider.cluster import LLM, SamplingParams
from outrider.cluster.common.server_options import CONTEXT_SETTINGS
from outrider.cluster.common.terminal import console_of, markdown_table
from outrider.cluster.config.service_config import ServiceConfig
from outrider.drafter_service import embedded
from outrider.drafter_service.engine.drafter import Ask, Drafter, SessionKey
from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig, SuffixDrafter
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.hybrid_drafter import EXPLORE_EVERY, GAIN, PRIOR_TOKENS, expected_tokens
from outrider.lab.replay.traces import GREEDY, count_accepted
from outrider.verifier_service.messages.draft import ROOT, Draft
from outrider.verifier_service.messages.tree import parents_of
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup

PLAIN_WIDTH = 120
ROWS = (4, 8, 16)
DEPTH = 8
ARMS = ("model", "look-up", "chosen", "merged")
KV_BYTES = 100_000_000
MIN_EXPECTED = 0.5  # accepted tokens that a look-up must expect to get rows of the model's
NUM_DRAWS = 2000

Path = tuple[int, ...]
Text = tuple[list[int], list[int]]  # prompt and answer
Sums = list[tuple[int, int]]  # of each text: tokens, verifications


def answers(max_tokens: int) -> list[Text]:
    """Return the embedded target's greedy answers."""
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(speculation="off", kv_cache_memory_bytes=KV_BYTES) as llm:
        outputs = llm.generate(embedded.held_out_prompts(), sampling)
    return [(list(output.prompt_token_ids), list(output.outputs[0].token_ids)) for output in outputs]


@dataclass(slots=True)
class TreeModel:
    """The embedded draft model's trees, each drafted once."""

    drafter: Drafter
    _known: dict[tuple[int, int, int], Draft] = field(default_factory=dict)  # by text, place in it and rows

    @classmethod
    def load(cls) -> TreeModel:
        wanted = {"method": "draft_model", "num_tree_nodes": max(ROWS)}
        config = ServiceConfig(model="embedded", speculative_config=wanted, kv_cache_memory_bytes=KV_BYTES)
        (spec,) = config.drafter_specs
        assert spec.model is not None
        return cls(build_drafter(spec, runner=ParallelRunner(ModelRunner(spec.model, TensorParallelGroup.single()))))

    def draft(self, number: int, token_ids: Sequence[int], num_rows: int) -> Draft:
        place = (number, len(token_ids), num_rows)
        if place not in self._known:
            self._known[place] = _draft(self.drafter, SessionKey("model", str(number)), token_ids, num_rows)
        return self._known[place]


def _draft(drafter: Drafter, key: SessionKey, token_ids: Sequence[int], num_rows: int) -> Draft:
    ask = Ask(key=key, ask_id=len(token_ids), token_ids=token_ids, sampling=GREEDY, length=DEPTH, max_nodes=num_rows)
    while not (found := drafter.draft([ask], max_num_tokens=1 << 20)):
        pass
    return found[0]


def merged(first: Draft, num_first: int, second: Draft, num_rows: int) -> Draft:
    """Return a tree of the first nodes of one draft and as many of another as fit into so many rows."""
    index: dict[Path, int] = {(): ROOT}
    token_ids: list[int] = []
    parents: list[int] = []
    for draft, limit in ((first, num_first), (second, len(second.token_ids))):
        paths: list[Path] = []
        for token_id, parent in zip(draft.token_ids[:limit], parents_of(draft), strict=False):
            paths.append((*(() if parent == ROOT else paths[parent]), token_id))
            if paths[-1] not in index and paths[-1][:-1] in index and len(token_ids) < num_rows:
                parents.append(index[paths[-1][:-1]])
                index[paths[-1]] = len(token_ids)
                token_ids.append(token_id)
    return Draft(request_id="", round_id=0, position=0, token_ids=tuple(token_ids), parents=tuple(parents))


def replay(texts: Sequence[Text], model: TreeModel, arm: str, num_rows: int) -> Sums:
    """Verify every text, one after another."""
    lookup = SuffixDrafter(vocab_size=model.drafter.vocab_size, config=SuffixConfig())
    sums: Sums = []
    mean = PRIOR_TOKENS  # of the model's accepted tokens, over all requests, as a new request's prior
    for number, (prompt, answer) in enumerate(texts):
        key, at, num_verified, own = SessionKey(arm, str(number)), 0, 0, mean
        while at < len(answer):
            token_ids, coming = [*prompt, *answer[:at]], answer[at : at + DEPTH + 1]
            found, drafted = _draft(lookup, key, token_ids, num_rows), model.draft(number, token_ids, num_rows)
            expected = expected_tokens(found)
            num_verified += 1
            is_explored = num_verified % EXPLORE_EVERY == 0
            is_model = arm == "model" or (arm == "chosen" and (is_explored or expected <= own))
            if arm == "merged":
                num_first = num_rows // 2 if expected > MIN_EXPECTED else 0
                num_accepted = count_accepted(merged(found, num_first, drafted, num_rows), coming)
            else:
                num_accepted = count_accepted(drafted if is_model else found, coming)
            if is_model:
                own += GAIN * (num_accepted - own)
                mean += GAIN * (num_accepted - mean)
            at += num_accepted + 1
        lookup.release(key)
        sums.append((min(at, len(answer)), num_verified))
    return sums


def per_verification(sums: Sums) -> float:
    return sum(count for count, _ in sums) / sum(count for _, count in sums)


def ratio(own: Sums, other: Sums) -> str:
    """Return how many times another arm's tokens per verification one has, and the 95 % interval over texts."""
    rng, places = random.Random(0), range(len(own))
    ratios = []
    for _ in range(NUM_DRAWS):
        drawn = rng.choices(places, k=len(own))
        ratios.append(per_verification([own[i] for i in drawn]) / per_verification([other[i] for i in drawn]))
    ratios.sort()
    low, high = ratios[int(0.025 * NUM_DRAWS)], ratios[int(0.975 * NUM_DRAWS)]
    return f"{per_verification(own) / per_verification(other):.3f} ({low:.3f} … {high:.3f})"


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option("--max-tokens", type=click.IntRange(min=1), default=96, show_default=True, help="Of an answer.")
def multi(max_tokens: int) -> None:
    """Verify the embedded target's answers with one drafter's tree, with the better one's, and with both merged."""
    texts, model = answers(max_tokens), TreeModel.load()
    rows = []
    for num_rows in ROWS:
        sums = {arm: replay(texts, model, arm, num_rows) for arm in ARMS}
        figures = [f"{per_verification(own):.3f}" for own in sums.values()]
        rows.append([str(num_rows), *figures, *(ratio(sums["merged"], sums[arm]) for arm in ("model", "chosen"))])
    heads = ["rows", *ARMS, "merged / model (95 %)", "merged / chosen (95 %)"]
    console_of(PLAIN_WIDTH).print("\n".join(markdown_table(heads, rows)), highlight=False)
