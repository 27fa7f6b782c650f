"""Each processor by hand, all of them against a reference that counts from scratch, and what leaves no trace."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from fakes.processed import processed_row
from outrider.verifier_service.messages.request import LogitBias, SamplingParams, StructuredKind, StructuredOutput
from outrider.verifier_service.sampling.logits_processors import LogitsProcessor
from tiny.verified import apply_edits

INF = float("inf")
VOCAB_SIZE = 11
PROMPT = [0, 1]


def make_processor(
    sampling: SamplingParams,
    *,
    prompt: Sequence[int] = PROMPT,
    stop_token_ids: Sequence[int] = (),
    vocab_size: int = VOCAB_SIZE,
) -> LogitsProcessor:
    assert LogitsProcessor.is_needed(sampling)
    return LogitsProcessor(
        sampling, num_prompt_tokens=len(prompt), stop_token_ids=stop_token_ids, vocab_size=vocab_size
    )


def processed(
    rows: Sequence[Sequence[float]],
    *,
    output: Sequence[int] = (),
    draft: Sequence[int] = (),
    stop_token_ids: Sequence[int] = (),
    **sampling: object,
) -> list[list[float]]:
    """Process the rows after `output` and each draft token, over a vocabulary of four."""
    processor = make_processor(SamplingParams(**sampling), stop_token_ids=stop_token_ids, vocab_size=4)
    edits = processor.edits([*PROMPT, *output], draft)
    assert edits is not None
    return apply_edits(torch.tensor(rows), [(0, edits)]).tolist()


BIASES = (LogitBias(token_id=3, bias=2.5), LogitBias(token_id=0, bias=-100.0), LogitBias(token_id=3, bias=0.5))
ALL_OF_THEM = {
    "logit_bias": (LogitBias(token_id=2, bias=4.0),),
    "repetition_penalty": 2.0,
    "frequency_penalty": 0.25,
    "presence_penalty": 0.5,
}


@pytest.mark.parametrize(
    ("sampling", "output", "draft", "rows"),
    [
        ({"presence_penalty": 0.5}, (2, 2), (3,), [[1.0, -2.0, 2.5, -4.0], [1.0, -2.0, 2.5, -4.5]]),
        (
            {"frequency_penalty": 0.5},
            (2, 2),
            (3, 2),
            [[1.0, -2.0, 2.0, y] for y in (-4.0, -4.5)] + [[1.0, -2.0, 1.5, -4.5]],
        ),
        ({"presence_penalty": -1.0, "frequency_penalty": -0.5}, (2, 2), (), [[1.0, -2.0, 5.0, -4.0]]),
        ({"repetition_penalty": 2.0}, (), (3,), [[0.5, -4.0, 3.0, -4.0], [0.5, -4.0, 3.0, -8.0]]),  # 0, 1: the prompt
        ({"logit_bias": BIASES}, (), (1,), [[-99.0, -2.0, 3.0, -1.0]] * 2),
        (ALL_OF_THEM, (2, 2), (), [[0.5, -4.0, (3.0 + 4.0) / 2 - 0.5 - 0.5, -4.0]]),  # bias, repetition, the others
    ],
)
def test_rows_by_hand(sampling: dict, output, draft, rows: list[list[float]]):
    assert processed([[1.0, -2.0, 3.0, -4.0]] * len(rows), output=output, draft=draft, **sampling) == rows


def test_stop_tokens_are_impossible_until_the_output_is_long_enough_position_by_position():
    row = [1.0, 2.0, 3.0, -4.0]
    barred = [1.0, -INF, 3.0, -INF]
    options = {"stop_token_ids": (1, 3, 9, -1), "min_tokens": 3}
    assert processed([row] * 4, draft=(2, 2, 2), **options) == [barred, barred, barred, row]
    assert processed([row] * 3, output=(2,), draft=(2, 2), **options) == [barred, barred, row]
    long_enough = make_processor(SamplingParams(min_tokens=3), stop_token_ids=(1, 3))
    assert long_enough.edits([*PROMPT, 2, 2, 2], [1]) is None, "nothing is copied for it any more"


def test_a_barred_token_stays_barred_under_every_penalty():
    rows = processed(
        [[1.0, 1.0, 1.0, 1.0]],
        stop_token_ids=(1,),
        min_tokens=1,
        repetition_penalty=0.5,
        presence_penalty=-2.0,
        logit_bias=(LogitBias(token_id=1, bias=100.0),),
    )
    assert rows[0][1] == -INF


def test_repetition_is_that_of_transformers():
    tokens, draft = [3, 5, 3, 7], [5, 9]
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    processor = make_processor(SamplingParams(repetition_penalty=1.3), prompt=tokens[:2])
    found = apply_edits(logits, [(0, processor.edits(tokens, draft))])
    library = RepetitionPenaltyLogitsProcessor(1.3)
    for row in range(3):
        expected = library(torch.tensor([[*tokens, *draft[:row]]]), logits[row : row + 1].clone())
        torch.testing.assert_close(found[row], expected[0], rtol=0.0, atol=1e-6)


# --- trees ---


@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_a_tree_is_the_last_of_its_paths_chain(seed: int):
    rng = random.Random(seed)
    for _ in range(20):
        sampling = dataclasses.replace(random_sampling(rng), repetition_penalty=1.7)
        parents = [rng.randrange(-1, node) for node in range(6)]
        draft = [rng.randrange(VOCAB_SIZE + 2) for _ in parents]
        logits = torch.randn(1, VOCAB_SIZE).expand(7, -1)
        processor = make_processor(sampling, stop_token_ids=(4,))
        tree = apply_edits(logits, [(0, processor.edits([*PROMPT, 3], draft, parents))])
        for node in range(6):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            edits = make_processor(sampling, stop_token_ids=(4,)).edits([*PROMPT, 3], [draft[i] for i in path])
            chain = apply_edits(logits[: len(path) + 1], [(0, edits)])
            assert torch.equal(tree[node + 1], chain[-1])


# --- masks ---


class FixedMask:
    """Allows the same tokens after each prefix, and notes what it is shown."""

    def __init__(self, *token_ids: int) -> None:
        self._bits = np.isin(np.arange(16), token_ids)
        self.seen: list[tuple[list[int], list[int], list[int]]] = []

    def allowed(self, output: Sequence[int], draft: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        self.seen.append((list(output), list(draft), list(parents)))
        return np.tile(np.packbits(self._bits, bitorder="little"), (len(draft) + 1, 1))


STRUCTURED = StructuredOutput(kind=StructuredKind.JSON_OBJECT)


def masked(mask: FixedMask, *, draft: Sequence[int] = (), parents: Sequence[int] | None = None, **sampling: object):
    processor = LogitsProcessor(
        SamplingParams(structured=STRUCTURED, **sampling),
        num_prompt_tokens=len(PROMPT),
        stop_token_ids=(1,),
        vocab_size=VOCAB_SIZE,
        mask=mask,
    )
    return processor.edits([*PROMPT, 7], draft, parents)


def test_a_mask_comes_after_all_else():
    logits = torch.arange(float(VOCAB_SIZE)).repeat(2, 1)
    mask = FixedMask(1, 7, 9)
    edits = masked(mask, draft=[9], presence_penalty=2.0, logit_bias=(LogitBias(token_id=3, bias=100.0),))
    rows = apply_edits(logits, [(0, edits)])
    kept = torch.full((2, VOCAB_SIZE), -INF)
    kept[:, 1], kept[:, 7], kept[0, 9], kept[1, 9] = 1.0, 5.0, 9.0, 7.0
    assert torch.equal(rows, kept)
    assert mask.seen == [([7], [9], [-1])]


def test_where_min_tokens_bars_all_that_a_mask_allows_it_gives_way():
    logits = torch.zeros(3, VOCAB_SIZE)
    first = masked(FixedMask(1), min_tokens=5)
    other = masked(FixedMask(1, 4), min_tokens=5, logit_bias=(LogitBias(token_id=4, bias=-3.0),))
    rows = apply_edits(logits, [(2, other), (0, first)])
    assert (rows[0] == 0.0).nonzero().flatten().tolist() == [1]
    assert rows[2].isfinite().nonzero().flatten().tolist() == [4]
    assert rows[2, 4] == -3.0
    assert torch.equal(rows[1], logits[1]), "a row of somebody else's"


# --- against the reference ---


def random_sampling(rng: random.Random) -> SamplingParams:
    biased = rng.sample(range(VOCAB_SIZE), rng.choice((0, 0, 3)))
    return SamplingParams(
        presence_penalty=rng.choice((0.0, 1.5, -0.7)),
        frequency_penalty=rng.choice((0.0, 0.4, -0.3)),
        repetition_penalty=rng.choice((1.0, 1.7, 0.6)),
        logit_bias=tuple(LogitBias(token_id=token_id, bias=rng.uniform(-5, 5)) for token_id in biased),
        min_tokens=rng.choice((0, 0, 4)),
        bad_words=tuple(
            tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 2, 3)))) for _ in range(rng.choice((0, 5)))
        ),
    )


class Growing:
    """A request whose output grows by random steps; what it is drafted is mostly thrown away."""

    def __init__(self, rng: random.Random, sampling: SamplingParams) -> None:
        self.rng, self.sampling = rng, sampling
        self.prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 6))]
        self.stop_token_ids = (4, 8, VOCAB_SIZE + 2)
        self.output: list[int] = []
        self.draft: list[int] = []
        self.processor = None
        if LogitsProcessor.is_needed(self.sampling):
            self.processor = make_processor(self.sampling, prompt=self.prompt, stop_token_ids=self.stop_token_ids)

    def redraft(self) -> None:
        self.draft = [self.rng.randrange(VOCAB_SIZE + 3) for _ in range(self.rng.randrange(4))]

    def expected(self, logits: torch.Tensor) -> torch.Tensor:
        """Rows after a draft id beyond the vocabulary do not matter: that id counts for nothing."""
        rows = [
            processed_row(
                logits[row],
                self.sampling,
                prompt=self.prompt,
                output=[*self.output, *self.draft[:row]],
                stop_token_ids=self.stop_token_ids,
            )
            for row in range(len(self.draft) + 1)
        ]
        return torch.stack(rows)

    def grow(self) -> None:
        self.output += [self.rng.randrange(VOCAB_SIZE) for _ in range(self.rng.choice((0, 1, 3)))]


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_many_requests_is_the_references(seed: int):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    requests = [Growing(rng, random_sampling(rng) if index % 4 else SamplingParams()) for index in range(12)]
    for _ in range(6):
        edits, expected, first_row = [], [], 0
        logits = torch.randn(12 * 4, VOCAB_SIZE, generator=generator) * 3
        for request in requests:
            request.redraft()
            if request.processor is not None:
                edit = request.processor.edits([*request.prompt, *request.output], request.draft)
                edits += [] if edit is None else [(first_row, edit)]
            rows = request.expected(logits[first_row : first_row + len(request.draft) + 1])
            expected.append(rows)
            first_row += len(rows)
        before = logits.clone()
        found = apply_edits(logits[:first_row], edits)
        torch.testing.assert_close(found, torch.cat(expected), rtol=0.0, atol=1e-5)
        assert torch.equal(logits, before), "the model's own logits are wanted for logprobs"
        for request in requests:
            request.grow()


def test_what_is_counted_from_a_longer_start_is_the_same():
    """A request that goes on elsewhere, with its published tokens, counts them at once."""
    sampling = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.5, min_tokens=5)
    output, draft = [3, 4, 3], [5, 3]
    grown = make_processor(sampling, stop_token_ids=(7,))
    for length in range(len(output)):
        grown.edits([*PROMPT, *output[:length]], [9, 9, 4])
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    fresh = make_processor(sampling, stop_token_ids=(7,))
    edited = [
        apply_edits(logits, [(0, processor.edits([*PROMPT, *output], draft))])
        for processor in (grown, fresh)
        for _ in range(2)  # asked again, as after a preemption: nothing is counted twice
    ]
    assert all(torch.equal(rows, edited[0]) for rows in edited)


def test_what_changes_no_logits_needs_no_processor():
    assert not LogitsProcessor.is_needed(SamplingParams(temperature=0.5, top_k=3, stop_token_ids=(4,)))


class Allows:
    """A grammar that allows the same tokens everywhere, over more tokens than the model has."""

    def __init__(self, *token_ids: int) -> None:
        self.row = np.packbits(np.isin(np.arange(32), token_ids), bitorder="little")

    def allowed(self, output: Sequence[int], draft: Sequence[int], parents: Sequence[int]) -> np.ndarray:
        return np.tile(self.row, (len(draft) + 1, 1))


def test_only_allowed_tokens_may_come():
    row = [1.0, 2.0, 3.0, -4.0]
    assert processed([row] * 2, draft=(1,), allowed_token_ids=(0, 3)) == [[1.0, -INF, -INF, -4.0]] * 2
    bias = (LogitBias(token_id=3, bias=1.0),)
    assert processed([row], allowed_token_ids=(3,), logit_bias=bias) == [[-INF, -INF, -INF, -3.0]]


@pytest.mark.parametrize(
    ("by_grammar", "expected"), [((1, 2, 9), [-INF, 2.0, -INF, -INF]), ((2, 3), [-INF, -INF, 3.0, -4.0])]
)
def test_allowed_tokens_give_way_where_a_grammar_allows_none_of_them(by_grammar, expected):
    form = StructuredOutput(kind=StructuredKind.JSON_OBJECT)
    sampling = SamplingParams(allowed_token_ids=(0, 1), structured=form)
    made = LogitsProcessor(sampling, num_prompt_tokens=2, stop_token_ids=(), vocab_size=4, mask=Allows(*by_grammar))
    alone = make_processor(SamplingParams(allowed_token_ids=(0,)), vocab_size=4)
    edits = [(0, made.edits(PROMPT, ())), (1, alone.edits(PROMPT, ()))]
    rows = apply_edits(torch.tensor([[1.0, 2.0, 3.0, -4.0]] * 2), edits)
    assert rows.tolist() == [expected, [1.0, -INF, -INF, -INF]], "masks of both widths in one step"
