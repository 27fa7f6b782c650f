"""Unseeded sampling under a grammar has the target's law restricted to what the grammar allows, whatever drafts.

The same holds where the grammar begins behind a thought, whose end may lie anywhere in a draft.

The law is the joint one of three output tokens over 5 ids (125 cells), masked by brute force. A drafter that knows no
grammar draws two tokens, some of them against it; one verification commits one to three, and what is missing is drawn
plainly. Leaving out drafts that break the grammar, as tempting as it is, shows. Pearson's chi-square over 60,000 draws
at alpha 1e-6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from exactness.law import assert_law, draw_rows, joint_counts, many_small_objects, power, rejects_law, shifted
from fakes.byte_tokens import UNFORCED, ByteTokens, allowed_ids, matches
from fakes.scripted import softmax, sparse_row
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft
from outrider.verifier_service.messages.request import SamplingParams, StructuredKind, StructuredOutput
from outrider.verifier_service.messages.thought import Thought
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.grammar import GrammarCompiler, GrammarState
from outrider.verifier_service.sampling.logits_processors import LogitEdits, LogitsProcessor
from outrider.verifier_service.sampling.thoughts import ThoughtState
from tiny.verified import target_probs, verify

TOKENS = (b"<eos>", b"a", b"b", b"ab", b"ca")
EOS, VOCAB_SIZE = 0, len(TOKENS)
NUM_DRAWS = 60_000
NUM_DEFECT_DRAWS = 20_000
PROMPT = (2,)
GRAMMAR = StructuredOutput(kind=StructuredKind.GRAMMAR, text=UNFORCED + 'start: ("ab" | "ca" | "a")+')
THOUGHT = Thought(opening="<", closing="b", is_open=True, max_tokens=2)
SAMPLING = SamplingParams(temperature=0.9, structured=GRAMMAR)
GRAMMARS = GrammarCompiler(ByteTokens(TOKENS).load)
LOGITS = 1.2 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))  # after each token
DRAFT_LAWS = softmax(np.random.default_rng(1).normal(size=(VOCAB_SIZE + 1, VOCAB_SIZE + 1)))  # one id of padding
TREE = ((1, 4, 2, 3, 0, 2, 1), (ROOT, ROOT, 0, 0, 0, 1, 3))  # token ids and parents

in_form = functools.partial(
    allowed_ids, tokens=TOKENS, ends=(EOS,), is_whole=matches(b"(ab|ca|a)+"), is_prefix=matches(b"(ab|ca|a)*(c?)")
)


def after_thought(output: Sequence[int]) -> set[int] | None:
    """Return what may follow: two tokens of thought at most, unless they have the mark, then the form."""
    num_thought = next((index for index, id_ in enumerate(output) if TOKENS[id_].endswith(b"b")), None)
    if num_thought is not None:
        return in_form(output[num_thought + 1 :]) if num_thought <= 2 and EOS not in output[:num_thought] else None
    if EOS in output or len(output) > 2:
        return None
    return {*range(1, VOCAB_SIZE)} if len(output) < 2 else {TOKENS.index(b"b")}


class Case:
    """A mask by brute force, and the law of three tokens under it."""

    def __init__(self, may_follow: Callable[[Sequence[int]], set[int] | None], thought: Thought | None) -> None:
        self.may_follow = may_follow
        self.sampling = replace(SAMPLING, thought=thought)
        self.first = self.law_after()
        self.second = np.array([self.law_after(a) for a in IDS])
        self.third = np.array([[self.law_after(a, b) for b in IDS] for a in IDS])
        self.law = self.first[:, None, None] * self.second[:, :, None] * self.third

    def law_after(self, *output: int) -> np.ndarray:
        """Return the next token's law, also after what never comes: [VOCAB_SIZE]."""
        allowed = self.may_follow(output) or {EOS}
        barred = torch.tensor(sorted({*range(VOCAB_SIZE)} - allowed), dtype=torch.int64)
        row = LOGITS[(*PROMPT, *output)[-1]].index_fill(0, barred, -torch.inf)
        return target_probs(row[None], [self.sampling])[0].double().numpy()

    def mask(self) -> GrammarState | ThoughtState:
        if self.sampling.thought is None:
            return GRAMMARS.open(GRAMMAR, (EOS,))
        return GRAMMARS.open_after(self.sampling.thought, GRAMMAR, (EOS,))


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    with many_small_objects():
        yield


IDS = range(VOCAB_SIZE)
PLAIN, AFTER_THOUGHT = Case(in_form, None), Case(after_thought, THOUGHT)


def sampled_chains(num_draws: int) -> list[Draft]:
    rows = [sparse_row(law, VOCAB_SIZE + 1) for law in DRAFT_LAWS]
    weights = np.zeros_like(DRAFT_LAWS)
    for law, row in zip(weights, rows, strict=True):
        law[list(row.token_ids)] = np.array(row.weights) / DRAFT_PROB_SCALE
    rng = np.random.default_rng(2)
    first = draw_rows(np.tile(weights[PROMPT[-1]], (num_draws, 1)), rng)
    second = draw_rows(weights[first], rng)
    return [
        Draft(request_id="r", round_id=1, position=1, token_ids=(a, b), draft_probs=(rows[PROMPT[-1]], rows[a]))
        for a, b in zip(first.tolist(), second.tolist(), strict=True)
    ]


def point_mass_trees(num_draws: int) -> list[Draft]:
    return [Draft(request_id="r", round_id=1, position=1, token_ids=TREE[0], parents=TREE[1])] * num_draws


def cut_where_invalid(draft: Draft) -> Draft:
    """Mistake: a drawn token that the grammar does not allow is not verified."""
    num_fitting = next((n for n in (0, 1) if in_form(draft.token_ids[: n + 1]) is None), 2)
    assert draft.draft_probs is not None
    return replace(draft, token_ids=draft.token_ids[:num_fitting], draft_probs=draft.draft_probs[:num_fitting])


@functools.cache
def edits_of(case: Case, token_ids: tuple[int, ...], parents: tuple[int, ...] | None) -> LogitEdits:
    processor = LogitsProcessor(
        case.sampling, num_prompt_tokens=len(PROMPT), stop_token_ids=(EOS,), vocab_size=VOCAB_SIZE, mask=case.mask()
    )
    edits = processor.edits(PROMPT, token_ids, parents)
    assert edits is not None
    return edits


def counts_of(case: Case, drafts: list[Draft]) -> np.ndarray:
    entries = [
        VerificationEntry(
            sampling=case.sampling, draft=draft, position=1, edits=edits_of(case, draft.token_ids, draft.parents)
        )
        for draft in drafts
    ]
    last = [min(token_id, VOCAB_SIZE - 1) for draft in drafts for token_id in (PROMPT[-1], *draft.token_ids)]
    verified = verify(LOGITS[torch.tensor(last)], entries, torch.Generator().manual_seed(3))
    tokens = np.array([[*result.token_ids, -1, -1][:3] for result in verified])
    rng = np.random.default_rng(4)
    for column in (1, 2):
        laws = case.second[tokens[:, 0]] if column == 1 else case.third[tokens[:, 0], tokens[:, 1]]
        tokens[:, column] = np.where(tokens[:, column] < 0, draw_rows(laws, rng), tokens[:, column])
    return joint_counts(tokens, VOCAB_SIZE)


@pytest.mark.parametrize("case", [PLAIN, AFTER_THOUGHT], ids=["plain", "after a thought"])
@pytest.mark.parametrize("drafts_of", [sampled_chains, point_mass_trees])
def test_the_law_is_the_targets_within_the_grammar(drafts_of: Callable[[int], list[Draft]], case: Case) -> None:
    num_draws = NUM_DRAWS if drafts_of is sampled_chains else NUM_DEFECT_DRAWS  # a tree costs three times as much
    assert_law(counts_of(case, drafts_of(num_draws)), case.law)


def test_cutting_drawn_tokens_that_break_the_grammar_is_detected() -> None:
    drafts = [cut_where_invalid(draft) for draft in sampled_chains(NUM_DEFECT_DRAWS)]
    assert sum(len(draft.token_ids) < 2 for draft in drafts) > NUM_DEFECT_DRAWS // 4
    assert rejects_law(counts_of(PLAIN, drafts), PLAIN.law)


def test_a_grammar_that_begins_before_the_thought_has_ended_is_detected() -> None:
    assert rejects_law(counts_of(PLAIN, sampled_chains(NUM_DEFECT_DRAWS)), AFTER_THOUGHT.law)


def test_the_test_can_fail() -> None:
    for case in (PLAIN, AFTER_THOUGHT):
        assert power(case.law, shifted(case.law, 0.03), NUM_DRAWS) > 0.99
        assert (case.law == 0.0).sum() > 40 < (case.law > 0.0).sum(), "the grammar does nothing, or everything"
