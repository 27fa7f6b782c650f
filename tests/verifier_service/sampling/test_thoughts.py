"""Rows before, within and behind a thought, against a slow reading of the whole text after every token."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from fakes.byte_tokens import UNFORCED, ByteTokens, allowed_ids, matches, path_to
from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.request import StructuredKind, StructuredOutput
from outrider.verifier_service.messages.thought import Thought
from outrider.verifier_service.sampling.grammar import GrammarCompiler
from outrider.verifier_service.sampling.thoughts import ThoughtState

TOKENS = (
    *(b"<eos>", b"<t>", b"</t>", b"<", b"/", b"t", b">", b"</", b"t>", b"a", b"b", b"ab", b"\n"),
    *(b">a", b">\n", b"a<", b"<t>a", b"t>b"),
)
EOS = 0
ALL = set(range(len(TOKENS)))
FORM = StructuredOutput(kind=StructuredKind.GRAMMAR, text=UNFORCED + 'start: ("ab" | "b" | "<a")+')
TEXT = StructuredOutput(kind=StructuredKind.GRAMMAR, text=UNFORCED + r"start: /[ab<\/t>\n]*/")
COMPILER = GrammarCompiler(ByteTokens(TOKENS, (EOS,)).load)
PATTERNS = {FORM: (rb"(ab|b|<a)+", rb"(ab|b|<a)*(a|<)?"), TEXT: (rb"[ab</t>\n]*", rb"[ab</t>\n]*")}


def opened(structured: StructuredOutput | None, *, is_open: bool, budget: int | None = None) -> ThoughtState:
    thought = Thought(opening="<t>", closing="</t>", is_open=is_open, max_tokens=budget)
    return COMPILER.open_after(thought, structured, (EOS,))


def in_form(structured: StructuredOutput | None, output: Sequence[int]) -> set[int] | None:
    if structured is None:
        return ALL
    whole, prefix = PATTERNS[structured]
    return allowed_ids(output, TOKENS, (EOS,), is_whole=matches(whole), is_prefix=matches(prefix))


def text_of(output: Sequence[int]) -> bytes:
    return b"".join(TOKENS[id_] for id_ in output)


def stands(structured: StructuredOutput | None, output: Sequence[int], *, is_open: bool, budget: int | None) -> bool:
    """Say whether an output can be: each of its tokens may stand where it does."""
    return all(
        output[index] in (expected(structured, output[:index], is_open=is_open, budget=budget) or ())
        for index in range(len(output))
    )


def expected(
    structured: StructuredOutput | None, output: Sequence[int], *, is_open: bool, budget: int | None
) -> set[int] | None:
    """Return what may follow an output that can be; None: it is the form's, and does not fit it."""
    begin = 0  # output tokens up to the one that has the whole opening
    if not is_open:
        lengths = [n for n in range(len(output) + 1) if text_of(output[:n]).startswith(b"<t>")]
        if not lengths:
            form = in_form(structured, output)
            if not b"<t>".startswith(text_of(output)):
                return form
            rest = b"<t>"[len(text_of(output)) :]
            more = {i for i in ALL if TOKENS[i] and (rest.startswith(TOKENS[i]) or TOKENS[i].startswith(rest))}
            return (form or set()) | more
        begin = lengths[0]
    text = text_of(output) if is_open else text_of(output)[3:]
    if b"</t>" in text:
        end = next(n for n in range(len(output) + 1) if b"</t>" in text_of(output[:n])[0 if is_open else 3 :])
        return in_form(structured, output[end:])
    if budget is not None and len(output) - begin >= budget:
        written = next(n for n in (3, 2, 1, 0) if text.endswith(b"</t>"[:n]) or n == 0)
        rest = b"</t>"[written:]
        return {max((i for i in ALL if rest.startswith(TOKENS[i])), key=lambda i: len(TOKENS[i]))}
    fitting = {i for i in ALL if not (text + TOKENS[i]).partition(b"</t>")[2].strip()}
    return fitting - ({EOS} if structured is FORM else set())


def ids_of(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row, bitorder="little")[: len(TOKENS)]).tolist())


@pytest.mark.parametrize("budget", [None, 0, 3])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "not open"])
@pytest.mark.parametrize("structured", [FORM, TEXT, None], ids=["form", "text", "no form"])
def test_rows_of_chains_and_trees_are_those_of_a_slow_reading(structured, is_open, budget):
    rng = random.Random(f"{is_open} {budget}")
    how = {"is_open": is_open, "budget": budget}
    num_crossed = num_started = 0
    for _ in range(60):
        state, output = opened(structured, is_open=is_open, budget=budget), []
        for _ in range(6):
            parents = [rng.randrange(max(ROOT, node - 3), node) for node in range(rng.randrange(8))]
            draft: list[int] = []
            for node in range(len(parents)):
                before = [*output, *(draft[i] for i in path_to(parents[node], parents))]
                fitting = expected(structured, before, **how) if stands(structured, before, **how) else None
                likely = sorted((fitting or set()) & {1, 2, 3, 7, 8, 9, 10, 14}) or sorted(fitting or ALL)
                draft.append(rng.choice(likely if rng.random() < 0.8 else sorted(ALL)))
            rows = state.allowed(output, draft, parents)
            assert ids_of(rows[0]) == expected(structured, output, **how)
            for node in range(len(parents)):
                path = [*output, *(draft[i] for i in path_to(node, parents))]
                if stands(structured, path, **how):
                    assert ids_of(rows[node + 1]) == expected(structured, path, **how), (text_of(path), parents)
                    num_crossed += b"</t>" in text_of(path) and b"</t>" not in text_of(output)
            fresh = opened(structured, is_open=is_open, budget=budget)
            assert np.array_equal(fresh.allowed(output, draft, parents), rows)
            for _ in range(rng.randrange(3)):
                fitting = sorted(expected(structured, output, **how) or ())
                likely = [id_ for id_ in fitting if id_ in (1, 2, 3, 7, 8, 9, 10)] or fitting
                output.append(rng.choice(likely if rng.random() < 0.7 else fitting))
                if EOS in output:
                    break
            num_started += not is_open and text_of(output).startswith(b"<t>")
            if EOS in output:
                break
            assert state.error is None
    assert num_crossed > 20
    assert is_open or num_started > 5


def test_tokens_are_forced_only_once_the_form_has_begun():
    word = StructuredOutput(kind=StructuredKind.GRAMMAR, text='start: "ab"')
    state = opened(word, is_open=True)
    assert state.forced_ids([9]) == ()
    assert state.forced_ids([9, 2])[0] == TOKENS.index(b"ab")
    assert opened(None, is_open=True, budget=1).forced_ids([9, 2]) == ()


def test_an_output_that_breaks_the_form_is_an_error_and_one_that_thinks_is_none():
    state = opened(FORM, is_open=True)
    state.allowed([5, 5, 4], (), ())
    assert state.error is None
    state.allowed([5, 5, 4, 2, 5], (), ())
    assert state.error is not None
    never = opened(FORM, is_open=False)
    never.allowed([4], (), ())
    assert never.error is not None


@pytest.mark.parametrize("fields", [{"opening": ""}, {"closing": "x" * 300}, {"max_tokens": -1}])
def test_what_no_thought_can_be_is_refused(fields):
    with pytest.raises(ValueError, match=r"^(thought|thinking_token_budget) "):
        Thought(**({"opening": "<t>", "closing": "</t>", "is_open": True} | fields))


def test_a_mark_is_found_where_its_beginning_came_twice():
    thought = Thought(opening="<t>", closing="<</", is_open=True)
    state = COMPILER.open_after(thought, FORM, (EOS,))
    less, slash = TOKENS.index(b"<"), TOKENS.index(b"/")
    rows = state.allowed([less], [less, less, slash], range(ROOT, 2))
    assert ids_of(rows[-1]) == in_form(FORM, [])
