"""Which tokens are barred after an output and each drafted token, by hand."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.sampling.bad_words import BadWords
from outrider.verifier_service.sampling.logits_processors import LogitsProcessor
from tiny.verified import apply_edits

PROMPT = [8, 9]
WORDS = ((7,), (1, 2), (1, 1, 3), (9, 5))  # after 9, 5 is barred, but not after the prompt's 9


def barred(output: list[int], draft: list[int], parents: list[int] | None = None) -> list[list[int]]:
    parents = list(range(-1, len(draft) - 1)) if parents is None else parents
    return BadWords(WORDS).barred([*PROMPT, *output], len(PROMPT), draft, parents)


@pytest.mark.parametrize(
    ("output", "draft", "rows"),
    [
        ([], [], [[7]]),
        ([], [1], [[7], [7, 2]]),
        ([1], [], [[7, 2]]),
        ([1], [1], [[7, 2], [7, 2, 3]]),  # the word began in the output and goes on in the draft
        ([1], [1, 3], [[7, 2], [7, 2, 3], [7]]),
        ([4, 1, 1], [1, 4], [[7, 2, 3], [7, 2, 3], [7]]),
        ([], [4, 9, 5], [[7], [7], [7, 5], [7]]),
        ([3, 1], [4, 1], [[7, 2], [7], [7, 2]]),
    ],
)
def test_rows_see_the_output_and_what_is_drafted(output: list[int], draft: list[int], rows: list[list[int]]) -> None:
    assert barred(output, draft) == rows


def test_rows_of_a_tree_see_their_own_path() -> None:
    #   1 ─┬─ 1 ── 1
    #      └─ 4
    #   9
    assert barred([], [1, 9, 1, 4, 1], [-1, -1, 0, 0, 2]) == [[7], [7, 2], [7, 5], [7, 2, 3], [7], [7, 2, 3]]


def test_the_edits_bar_them_and_nothing_else() -> None:
    sampling = SamplingParams(bad_words=((2,), (1, 3)))
    assert LogitsProcessor.is_needed(sampling)
    processor = LogitsProcessor(sampling, num_prompt_tokens=1, stop_token_ids=(), vocab_size=4)
    rows = torch.arange(12.0).reshape(3, 4)
    inf = float("inf")
    edits = processor.edits([0], [1, 0])
    assert edits is not None
    assert apply_edits(rows, [(0, edits)]).tolist() == [
        [0.0, 1.0, -inf, 3.0],
        [4.0, 5.0, -inf, -inf],
        [8.0, 9.0, -inf, 11.0],
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_row_is_that_of_the_output_with_its_path(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        words = BadWords([[rng.randrange(3) for _ in range(rng.randrange(1, 4))] for _ in range(6)])
        output = [rng.randrange(3) for _ in range(rng.randrange(4))]
        parents = [rng.randrange(-1, node) for node in range(6)]
        draft = [rng.randrange(3) for _ in parents]
        rows = words.barred([*PROMPT, *output], len(PROMPT), draft, parents)
        for node in range(6):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            plain = words.barred([*PROMPT, *output, *(draft[index] for index in path)], len(PROMPT), [], [])
            assert rows[node + 1] == plain[0]
