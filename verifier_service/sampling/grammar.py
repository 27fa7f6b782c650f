"""Structured output under speculation: which tokens the target may choose after a prefix and after each draft token.

The grammar masks the target's rows and nothing else. A draft token that breaks it has target probability 0, so it is
verified and rejected like any other (never cut: see docs/exactness.md, "The trap"). The state after the committed
tokens is kept; a draft, chain or tree, is walked depth first and undone.

llguidance parses the bytes of the tokens (https://github.com/guidance-ai/llguidance) and compiles in milliseconds.
Where a text is forced, it allows the tokenizer's own way to write it alone.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import llguidance.hf
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from transformers import PreTrainedTokenizerFast

from outrider.verifier_service.messages.draft import ROOT
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, StructuredOutput
from outrider.verifier_service.messages.structured_output import LIMITS, grammar_text, invalid, left_out
from outrider.verifier_service.messages.thought import Thought
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import load_tokenizer
from outrider.verifier_service.sampling.thoughts import ThoughtMarks, ThoughtState, TokenBytes
from outrider.verifier_service.sampling.token_rows import ALL_TOKENS, row_of

logger = logging.getLogger(__name__)

MAX_CACHED_GRAMMARS = 64
MAX_CACHED_MARKS = 8  # of thoughts; a model has one pair
MAX_FORCED_TOKENS = 32  # more than any draft is long


def load_grammar_tokenizer(model: ModelConfig, *, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Load what a grammar must know of a model's tokens; takes seconds where there are many.

    Raises `ValueError` naming `structured` where the model came without a tokenizer that can be used for it.
    """
    if not eos_token_ids:
        raise ValueError("structured: the model has no end-of-sequence token to end an output with")
    try:  # code that came with the model is never run for this
        tokenizer = load_tokenizer(replace(model, trust_remote_code=False))
    except (OSError, ValueError) as error:
        raise ValueError(f"structured: the model's tokenizer cannot be loaded: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError("structured: the model's tokenizer is not a fast one")
    num_tokens = max(vocab_size, len(tokenizer))  # either may be padded
    return llguidance.hf.from_tokenizer(tokenizer, n_vocab=num_tokens, eos_token=list(eos_token_ids))


class GrammarCompiler:
    """One model's compiled grammars, the most recently used kept. May be called from several threads."""

    def __init__(self, load_tokenizer: Callable[[], LLTokenizer], *, capacity: int = MAX_CACHED_GRAMMARS) -> None:
        """`load_tokenizer` is called once, for the first grammar."""
        self._load_tokenizer = load_tokenizer
        self._capacity = capacity
        self._tokenizer: LLTokenizer | None = None
        self._loading = threading.Lock()
        self._compiled: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._marks: OrderedDict[tuple[str, str], ThoughtMarks] = OrderedDict()
        self._tokens: TokenBytes | None = None
        self._lock = threading.Lock()  # of the above; never held while anything is compiled

    @classmethod
    def of_model(cls, model: ModelConfig, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
        return cls(lambda: load_grammar_tokenizer(model, vocab_size=vocab_size, eos_token_ids=eos_token_ids))

    def compile(self, structured: StructuredOutput) -> LLMatcher:
        """Return a matcher at its start, to be copied; raises `ValueError` naming `structured`."""
        with self._lock:
            if structured in self._compiled:
                self._compiled.move_to_end(structured)
                return self._compiled[structured]
        matcher = LLMatcher(self.tokenizer(), grammar_text(structured), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise invalid(structured.kind, matcher.get_error())
        left_out(structured.kind, matcher.get_grammar_warnings())
        with self._lock:
            self._compiled[structured] = matcher
            while len(self._compiled) > self._capacity:
                self._compiled.popitem(last=False)
        return matcher

    def tokenizer(self) -> LLTokenizer:
        """Return the model's tokens, loaded at the first call."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_tokenizer()
            return self._tokenizer

    def marks(self, thought: Thought) -> ThoughtMarks:
        """Return what tokens mean between the marks of thoughts; takes tenths of a second at the first call."""
        key = (thought.opening, thought.closing)
        with self._lock:
            if key in self._marks:
                self._marks.move_to_end(key)
                return self._marks[key]
            tokens = self._tokens
        tokens = tokens or TokenBytes(self.tokenizer())
        marks = ThoughtMarks(tokens, *key)
        with self._lock:
            self._tokens, self._marks[key] = tokens, marks
            while len(self._marks) > MAX_CACHED_MARKS:
                self._marks.popitem(last=False)
        return marks

    def prepare(self, sampling: SamplingParams) -> None:
        """Load the tokens, which beams that end by texts need alone, and compile what a request asks for.

        Raises `ValueError` naming `structured`.
        """
        if sampling.structured is not None:
            self.compile(sampling.structured)
        if sampling.thought is not None:
            self.marks(sampling.thought)
        self.tokenizer()

    def open_after(
        self, thought: Thought, structured: StructuredOutput | None, end_token_ids: Sequence[int]
    ) -> ThoughtState:
        """Return the state of a new output that may begin with a thought; raises `ValueError` naming `structured`."""
        open_form = None if structured is None else partial(self.open, structured, end_token_ids)
        return ThoughtState(thought, self.marks(thought), open_form, end_token_ids)

    def open(self, structured: StructuredOutput, end_token_ids: Iterable[int]) -> GrammarState:
        """Return the state of a new output; raises `ValueError` naming `structured`."""
        start = self.compile(structured)
        return GrammarState(start, num_tokens=self.tokenizer().vocab_size, end_token_ids=end_token_ids)


class _Fit(enum.Enum):
    """What a token is where it stands."""

    INSIDE = enum.auto()  # the matcher has consumed it
    END = enum.auto()  # the text was complete
    NONE = enum.auto()  # the grammar does not allow it


class GrammarState:
    """How far one output has come in its grammar.

    It is shown the whole output, so a request that was preempted or goes on elsewhere needs no more. Wherever the text
    may end, `end_token_ids` are allowed; after one of them nothing else is.
    """

    def __init__(self, start: LLMatcher, *, num_tokens: int, end_token_ids: Iterable[int]) -> None:
        """`start` is copied; `num_tokens` are the matcher's own, which may be more than the model has logits for."""
        self._start = start
        self._matcher = start.deep_copy()
        self._num_tokens = num_tokens
        self._num_words = -(-num_tokens // 32)
        self._end_token_ids = frozenset(id_ for id_ in end_token_ids if 0 <= id_ < num_tokens)
        self._end_row = row_of(self._end_token_ids, self._num_words)
        self._num_seen = 0  # output tokens
        self._last = _Fit.INSIDE  # what the last of them was
        self._own_row: np.ndarray | None = None  # after them; None: not known yet
        self.error: str | None = None  # why the output cannot go on; its rows mean nothing then

    @property
    def may_be_empty(self) -> bool:
        """Whether an output without tokens has the form."""
        return bool(self._start.is_accepting())

    def allowed(
        self, output_token_ids: Sequence[int], draft_token_ids: Sequence[int], parents: Sequence[int]
    ) -> np.ndarray:
        """Return which tokens may follow the output and each draft token: uint8 [num_rows, num_bytes], low bit first.

        `parents` as in `Draft`. After a draft token that may not stand where it does, everything is allowed: that token
        is never accepted, so nothing is chosen from the row.
        """
        self._see(output_token_ids)
        rows = np.full((len(draft_token_ids) + 1, self._num_words), ALL_TOKENS, dtype=np.int32)
        rows[0] = self._row()
        if self.error is not None:
            return rows.view(np.uint8)
        fits = [_Fit.NONE] * len(draft_token_ids)
        path: list[int] = []  # the nodes that the matcher has consumed
        for node in _depth_first(parents):
            parent, token_id = parents[node], draft_token_ids[node]
            before = self._last if parent == ROOT else fits[parent]
            if before is _Fit.INSIDE:
                self._rewind(path, parent)
            fits[node] = self._consume(token_id, before)
            if fits[node] is _Fit.INSIDE:
                path.append(node)
            if fits[node] is not _Fit.NONE:
                rows[node + 1] = self._filled(fits[node])
            if self._matcher.is_error():
                fits[node] = _Fit.NONE
                path = [index for index in path if index != node]
                self._restart([*output_token_ids, *(draft_token_ids[index] for index in path)])
        self._rewind(path, ROOT)
        return rows.view(np.uint8)

    def forced_ids(self, output_token_ids: Sequence[int], max_tokens: int = MAX_FORCED_TOKENS) -> tuple[int, ...]:
        """Return the tokens that must follow the output, one after another, as far as there is only one each time."""
        self._see(output_token_ids)
        forced: list[int] = []
        row = self._row()
        fit = self._last
        while fit is _Fit.INSIDE and len(forced) < max_tokens and (only := _only_token(row)) is not None:
            fit = self._consume(only, fit)
            forced.append(only)
            row = self._filled(fit)
        if self.error is None and self._matcher.is_error():
            self._restart(output_token_ids)
        elif forced:
            self._undo(len(forced) - (fit is not _Fit.INSIDE))
        return tuple(forced)

    def _see(self, output_token_ids: Sequence[int]) -> None:
        """Take in what was committed since the last call."""
        for index in range(self._num_seen, len(output_token_ids)):
            self._last = self._consume(output_token_ids[index], self._last)
            if self._last is _Fit.NONE and self.error is None:
                reason = " ".join(self._matcher.get_error().split())
                self.error = f"output token {index} does not fit the grammar {reason}".rstrip()
            self._own_row = None
        self._num_seen = len(output_token_ids)

    def _restart(self, token_ids: Sequence[int]) -> None:
        """Replace a matcher that looked ahead and gave up: it never goes on after that."""
        self._matcher = self._start.deep_copy()
        self._matcher.consume_tokens(list(token_ids))

    def _consume(self, token_id: int, before: _Fit) -> _Fit:
        """Move the matcher over a token, unless the text ends with it or it does not fit."""
        if before is _Fit.INSIDE and self._matcher.is_accepting() and token_id in self._end_token_ids:
            return _Fit.END
        if before is _Fit.END and token_id in self._end_token_ids:
            return _Fit.END  # of a request that ignores ends
        if before is not _Fit.INSIDE or not 0 <= token_id < self._num_tokens:
            return _Fit.NONE
        return _Fit.INSIDE if self._matcher.try_consume_tokens([token_id]) == 1 else _Fit.NONE

    def _row(self) -> np.ndarray:
        """Return what may follow the output; sets `error` where nothing can."""
        if self._own_row is None:
            self._own_row = self._filled(self._last)
            if self._matcher.is_error():
                self._last = _Fit.NONE
                reason = " ".join(self._matcher.get_error().split())
                self.error = self.error or f"the grammar cannot be followed: {reason}"
        return self._own_row

    def _filled(self, last: _Fit) -> np.ndarray:
        """Return what may follow the token that the matcher stands behind, given what it was: int32 [num_words].

        It is everything where the matcher gives up: no token fits, or finding out costs too much.
        """
        if last is not _Fit.INSIDE:
            return self._end_row
        rows = np.zeros((1, self._num_words), dtype=np.int32)
        fill_next_token_bitmask(self._matcher, rows)
        if self._matcher.is_accepting():
            rows |= self._end_row
        if self._matcher.is_error():
            rows[:] = ALL_TOKENS
        row: np.ndarray = rows[0]
        return row

    def _rewind(self, path: list[int], node: int) -> None:
        """Undo the end of a path behind `node`, which is on it; ROOT: all of it."""
        num_kept = 0 if node == ROOT else path.index(node) + 1
        self._undo(len(path) - num_kept)
        del path[num_kept:]

    def _undo(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self._matcher.rollback(num_tokens)


def _depth_first(parents: Sequence[int]) -> Iterator[int]:
    """Yield each node of a tree before its descendants, and these before its next sibling."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    open_nodes = children.get(ROOT, [])[::-1]
    while open_nodes:
        node = open_nodes.pop()
        yield node
        open_nodes.extend(reversed(children.get(node, ())))


def _only_token(row: np.ndarray) -> int | None:
    """Return the one token that a row allows; None: there are several, or none."""
    (words,) = np.nonzero(row)
    if len(words) != 1:
        return None
    bits = int(row[words[0]]) & 0xFFFFFFFF
    return int(words[0]) * 32 + bits.bit_length() - 1 if bits.bit_count() == 1 else None


def _text_of(error: BaseException | None) -> str | None:
    if error is None or isinstance(error, ValueError):
        return None if error is None else str(error)
    logger.error("a grammar was not compiled", exc_info=error)
    return "structured: the grammar was not compiled"


class GrammarQueue:
    """Requests whose grammar is being compiled, on a thread of its own: the step loop does not wait for one."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")  # started when needed
        self._waiting: list[tuple[GenerationRequest, Future[None]]] = []

    def put(self, message: GenerationRequest) -> None:
        """Begin to compile what a request with a mask asks for."""
        compiled = self._threads.submit(self._compiler.prepare, message.sampling)
        self._waiting.append((message, compiled))

    def drop(self, request_id: str) -> None:
        """Forget a cancelled request; unknown ids are no error."""
        self._waiting = [waiting for waiting in self._waiting if waiting[0].request_id != request_id]

    def take_ready(self) -> list[tuple[GenerationRequest, str | None]]:
        """Return the requests whose grammar is known by now, each with why there is none that can be followed."""
        is_ready = [compiled.done() for _, compiled in self._waiting]
        ready = [waiting for waiting, is_done in zip(self._waiting, is_ready, strict=True) if is_done]
        self._waiting = [waiting for waiting, is_done in zip(self._waiting, is_ready, strict=True) if not is_done]
        return [(message, _text_of(compiled.exception())) for message, compiled in ready]

    def take_all(self) -> list[GenerationRequest]:
        """Return all requests, and forget them."""
        waiting, self._waiting = self._waiting, []
        return [message for message, _ in waiting]

    def __len__(self) -> int:
        return len(self._waiting)
