"""Masks against brute force over a vocabulary of a few tokens; the compiler, its cache and its thread."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from llguidance import LLTokenizer
from transformers import AutoTokenizer

from fakes.byte_tokens import UNFORCED, ByteTokens, allowed_ids, matches, path_to
from outrider.drafter_service import embedded
from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.request import (
    GenerationRequest,
    SamplingParams,
    StructuredKind,
    StructuredOutput,
)
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.sampling.grammar import (
    GrammarCompiler,
    GrammarQueue,
    GrammarState,
    load_grammar_tokenizer,
)

TOKENS = (b"<eos>", b"a", b"b", b"c", b"ab", b"bc", b"abc", b"ba", b"cab", b"\xc3", b"\xa9", b"<stop>")
EOS, STOP = 0, 11
ENDS = (EOS, STOP)
CHOICES = ("a", "ab", "abcab", "bca", "caba", "b", "é", "éa")
CHOICE = StructuredOutput(
    kind=StructuredKind.GRAMMAR, text=UNFORCED + "start: " + " | ".join(f'"{choice}"' for choice in CHOICES)
)
REPEATED = StructuredOutput(kind=StructuredKind.GRAMMAR, text=UNFORCED + 'start: ("ab" | "c")+')


tiny_tokenizer = ByteTokens(TOKENS, ENDS).load


def opened(structured: StructuredOutput) -> GrammarState:
    return GrammarCompiler(tiny_tokenizer).open(structured, ENDS)


def expected(structured: StructuredOutput, prefix: Sequence[int]) -> set[int] | None:
    texts = [choice.encode() for choice in CHOICES]
    if structured is REPEATED:
        is_whole, is_prefix = matches(b"(ab|c)+"), matches(b"(ab|c)*a?")
    else:
        is_whole, is_prefix = texts.__contains__, lambda text: any(choice.startswith(text) for choice in texts)
    return allowed_ids(prefix, TOKENS, ENDS, is_whole=is_whole, is_prefix=is_prefix)


def ids_of(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row, bitorder="little")[: len(TOKENS)]).tolist())


def random_tree(rng: random.Random, num_nodes: int) -> list[int]:
    return [rng.randrange(ROOT, node) for node in range(num_nodes)]


def likely_draft(rng: random.Random, structured: StructuredOutput, output: list[int], parents: list[int]) -> list[int]:
    """Draft tokens of which most fit where they stand, and some are no tokens at all."""
    draft: list[int] = []
    for node, parent in enumerate(parents):
        allowed = expected(structured, [*output, *(draft[i] for i in path_to(parent, parents))]) or set()
        fits = allowed and rng.random() < 0.75
        draft.append(rng.choice(sorted(allowed)) if fits else rng.choice((*range(len(TOKENS)), -1, 99)))
        assert len(draft) == node + 1
    return draft


@pytest.mark.parametrize("structured", [CHOICE, REPEATED], ids=["choice", "repeated"])
@pytest.mark.parametrize("seed", range(3))
def test_rows_of_chains_and_trees_are_those_of_brute_force(structured, seed):
    rng = random.Random(seed)
    num_ends = num_misfits = 0
    for _ in range(25):
        state, output = opened(structured), []
        for _ in range(5):
            num_nodes = rng.randrange(9)
            parents = list(range(-1, num_nodes - 1)) if rng.random() < 0.4 else random_tree(rng, num_nodes)
            draft = likely_draft(rng, structured, output, parents)
            rows = state.allowed(output, draft, parents)
            assert len(rows) == num_nodes + 1
            assert ids_of(rows[0]) == expected(structured, output)
            for node in range(num_nodes):
                allowed = expected(structured, [*output, *(draft[i] for i in path_to(node, parents))])
                assert ids_of(rows[node + 1]) == (set(range(len(TOKENS))) if allowed is None else allowed)
                num_misfits += allowed is None
                num_ends += draft[node] in ENDS and allowed is not None
            for _ in range(rng.randrange(3)):
                output.append(rng.choice(sorted(expected(structured, output))))
            assert state.error is None
            if len(output) > 4:
                break
    assert num_ends > 20 < num_misfits


def test_a_state_shown_the_whole_output_is_one_that_followed_it():
    output = [4, 3, 4, 3]  # ab c ab c
    grown = opened(REPEATED)
    for length in range(len(output)):
        grown.allowed(output[:length], [1, 2, 3], [ROOT, 0, 1])
        grown.forced_ids(output[:length])
    fresh = opened(REPEATED)
    rows = [state.allowed(output, [4, 3, EOS], range(-1, 2)) for state in (grown, fresh, fresh)]
    assert np.array_equal(rows[0], rows[1])
    assert np.array_equal(rows[0], rows[2])


def test_after_its_end_an_output_holds_nothing_but_ends():
    state = opened(CHOICE)
    rows = state.allowed([1, EOS], [STOP, EOS, 1], [ROOT, 0, 1])
    assert [ids_of(row) for row in rows] == [{EOS, STOP}] * 3 + [set(range(len(TOKENS)))]
    assert state.error is None


def test_what_does_not_fit_is_an_error():
    for output in ([1, 3], [2, EOS, 1], [99], [EOS]):
        state = opened(CHOICE)
        assert state.allowed(output, [1], [ROOT]).any(axis=1).all(), "a row of nothing would have no law"
        assert f"output token {len(output) - 1} does not fit" in state.error


def test_where_no_token_fits_is_an_error_of_the_output_alone():
    state = opened(StructuredOutput(kind=StructuredKind.CHOICE, choices=("az", "a!", "cab")))
    for _ in range(2):
        rows = state.allowed([], [1, 3, 1, 2], [ROOT, ROOT, 1, 2])
        assert [ids_of(row) for row in rows] == [{1, 3, 8}, set(range(len(TOKENS))), {4}, {2}, set(ENDS)]
        assert state.error is None, "the draft is not the output"
    for _ in range(2):
        rows = state.allowed([1], [2, 3], [ROOT, 0])
        assert rows.any(axis=1).all(), "a row of nothing would have no law"
        assert "cannot be followed" in state.error
        assert state.forced_ids([1]) == ()


def test_forced_tokens_lead_up_to_where_no_token_fits():
    state = opened(StructuredOutput(kind=StructuredKind.GRAMMAR, text=UNFORCED + 'start: "ccz"'))
    assert state.forced_ids([]) == (3, 3)
    assert state.error is None
    assert ids_of(state.allowed([3], [], [])[0]) == {3}


def test_forced_tokens_are_those_that_have_no_alternative():
    state = opened(StructuredOutput(kind=StructuredKind.CHOICE, choices=("cc", "cca")))
    assert state.forced_ids([], max_tokens=1) == (3,)
    assert state.forced_ids([]) == (3, 3), "cca may follow, or the end"
    assert state.forced_ids([3]) == (3,)
    assert state.forced_ids([3, 3]) == ()
    assert state.forced_ids([3, 3, 1]) == (), "two ways to end"
    assert ids_of(state.allowed([3, 3, 1], [], [])[0]) == set(ENDS), "looking ahead has left no trace"


def test_the_one_end_is_forced_too():
    state = GrammarCompiler(tiny_tokenizer).open(StructuredOutput(kind=StructuredKind.CHOICE, choices=("cc",)), (EOS,))
    assert state.forced_ids([]) == (3, 3, EOS)
    assert state.forced_ids([3]) == (3, EOS)
    assert ids_of(state.allowed([3], [3, EOS], [ROOT, 0])[1]) == {EOS}
    assert state.forced_ids([3, 3, EOS]) == ()
    assert ids_of(state.allowed([3, 3, EOS], [], [])[0]) == {EOS}
    assert state.error is None


# --- a real tokenizer ---


@pytest.fixture(scope="module")
def model() -> ModelConfig:
    return ModelConfig(path=str(embedded.target_path()))


def test_forced_text_is_written_as_the_tokenizer_would(model):
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    compiler = GrammarCompiler.of_model(model, vocab_size=2048, eos_token_ids=(0,))
    schema = StructuredOutput(kind=StructuredKind.REGEX, text=r'\{"the_name": [0-9]\}')
    state = compiler.open(schema, (0,))
    forced = tokenizer.encode('{"the_name":', add_special_tokens=False)  # a token may be a space and a digit
    assert list(state.forced_ids([])) == forced
    assert len(forced) > 3


def test_a_vocabulary_padded_by_either_side_is_masked(model):
    for vocab_size in (2000, 2500):
        compiler = GrammarCompiler.of_model(model, vocab_size=vocab_size, eos_token_ids=(0,))
        (row,) = compiler.open(REPEATED, (0,)).allowed([], [], [])
        bits = np.unpackbits(row, bitorder="little")
        assert len(bits) >= vocab_size
        assert 0 < bits.sum() < 20
        assert not bits[2048:].any()


@pytest.mark.parametrize(
    ("path", "eos_token_ids", "reason"),
    [(None, (), "no end-of-sequence token"), ("/nowhere", (0,), "tokenizer cannot be loaded")],
)
def test_a_model_that_cannot_be_served_so_says_why(model, path, eos_token_ids, reason):
    config = model if path is None else ModelConfig(path=path)
    with pytest.raises(ValueError, match=f"structured: .*{reason}"):
        load_grammar_tokenizer(config, vocab_size=2048, eos_token_ids=eos_token_ids)


# --- compiling ---


def test_compiled_grammars_are_kept_the_tokenizer_is_loaded_once():
    loads = []
    compiler = GrammarCompiler(lambda: loads.append(1) or tiny_tokenizer(), capacity=2)
    regexes = [StructuredOutput(kind=StructuredKind.REGEX, text=text) for text in ("a+", "b+", "c+")]
    first = compiler.compile(regexes[0])
    assert compiler.compile(StructuredOutput(kind=StructuredKind.REGEX, text="a+")) is first
    second = compiler.compile(regexes[1])
    assert compiler.compile(regexes[0]) is first, "used again: the other is the oldest now"
    compiler.compile(regexes[2])
    assert compiler.compile(regexes[0]) is first
    assert compiler.compile(regexes[1]) is not second
    assert len(loads) == 1


def test_what_only_a_tokenizer_shows_to_be_wrong_is_an_error_too():
    grammar = StructuredOutput(kind=StructuredKind.GRAMMAR, text="start: <|nothing|>")
    with pytest.raises(ValueError, match=r"structured must be a grammar that can be followed: .*unknown special token"):
        GrammarCompiler(tiny_tokenizer).open(grammar, ENDS)


def test_a_schema_that_is_followed_but_for_a_reference_is_an_error_too():
    schema = StructuredOutput(kind=StructuredKind.JSON_SCHEMA, text='{"$dynamicRef": "#a"}')
    with pytest.raises(ValueError, match=r"structured must be a json_schema that can be followed: .*dynamicRef"):
        GrammarCompiler(tiny_tokenizer).open(schema, ENDS)


def message(request_id: str, structured: StructuredOutput) -> GenerationRequest:
    sampling = SamplingParams(structured=structured)
    return GenerationRequest(request_id=request_id, prompt_token_ids=(1,), sampling=sampling)


def until(values: Iterator[bool]) -> None:
    assert any(itertools.islice(values, 5000))


def test_the_queue_compiles_on_a_thread_of_its_own():
    may_load, threads = threading.Event(), []

    def load() -> LLTokenizer:
        threads.append(threading.current_thread())
        assert may_load.wait(10)
        return tiny_tokenizer()

    compiler = GrammarCompiler(load)
    queue = GrammarQueue(compiler)
    wrong = StructuredOutput(kind=StructuredKind.REGEX, text="((")
    messages = [message("a", REPEATED), message("gone", CHOICE), message("wrong", wrong)]
    for request in messages:
        queue.put(request)
    queue.drop("gone")
    queue.drop("never known")
    assert (queue.take_ready(), len(queue)) == ([], 2)
    may_load.set()
    ready: list[tuple[GenerationRequest, str | None]] = []
    pause = threading.Event()
    until(ready.extend(queue.take_ready()) or pause.wait(0.001) or len(queue) == 0 for _ in itertools.count())
    (first, nothing), (last, problem) = ready
    assert (first, nothing, last) == (messages[0], None, messages[2])
    assert problem is not None
    assert problem.startswith("structured")
    assert threads != [threading.current_thread()]
    assert len(threads) == 1
    queue.put(messages[0])
    assert (queue.take_all(), len(queue)) == ([messages[0]], 0)
