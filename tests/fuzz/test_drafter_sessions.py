"""Every drafter against a verifier that says anything: no exception, and no draft but its own is another."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fakes.runner import FakeRunner
from fuzz.budget import examples
from fuzz.frames import values_of
from fuzz.tally import TALLY
from outrider.drafter_service.engine.drafter import DraftEngineConfig, Drafter
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.tree_growth import TreeConfig
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
from outrider.drafter_service.head_drafters.mlp_drafter import MlpDrafter
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.drafter_service.lookup.lookahead_drafter import LookaheadDrafter
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter
from outrider.drafter_service.lookup.suffix_drafter import SuffixDrafter
from outrider.drafter_service.models.dflash_drafter import DFlashModel
from outrider.drafter_service.models.translated_drafter import IntersectionDrafter, TextDrafter
from outrider.drafter_service.models.vocabulary_map import VocabularyMap
from outrider.drafter_service.service.hybrid_drafter import HybridDrafter
from outrider.verifier_service.messages.draft import (
    Close,
    Commit,
    Commits,
    Draft,
    DrafterMessage,
    DraftSampling,
    Open,
    Resync,
    Seed,
    States,
    VerifierMessage,
    each_draft,
)
from outrider.verifier_service.messages.draft_checks import check_draft
from outrider.verifier_service.messages.link import DRAFTER_MESSAGES, VERIFIER_MESSAGES
from outrider.verifier_service.messages.wire import decode, encode
from tiny.dflash import dflash_head
from tiny.drafters import eagle_drafter, model_drafter, one_pass_drafter, parallel_drafter
from tiny.heads import VOCAB_SIZE, eagle3_head, eagle_head

MAX_LENGTH, MAX_NODES = 5, 9
DRAWN = TreeConfig(method="sampled", branching=3)
GREEDY = DraftSampling(temperature=0.0)
SAMPLINGS = (GREEDY, DraftSampling(temperature=1.0), DraftSampling(temperature=1.0, seed=3))
PROMPT, NEW_IDS = (5, 17, 3, 40, 5, 17), (3, 5)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Letters:
    """A `TextTokenizer` whose tokens are letters; ids it does not know raise, as the library's do below 0."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 64 for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(64 + token_id) for token_id in token_ids)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def fake_runner() -> FakeRunner:
    return FakeRunner(vocab_size=VOCAB_SIZE, num_blocks=24)


def eagle(head: DraftHead) -> Drafter:
    runner = HeadRunner(SwitchedHeads([head]), num_blocks=24, block_size=4, max_model_len=64)
    return eagle_drafter(runner, rng(), trees=DRAWN)


def seeded(make: Callable[[], torch.nn.Module]) -> Any:
    torch.manual_seed(0)
    return make().eval()


def medusa() -> Drafter:
    heads = seeded(lambda: MedusaHeads(hidden_size=8, vocab_size=VOCAB_SIZE, num_heads=3))
    return MedusaDrafter(heads, vocab_size=VOCAB_SIZE, max_model_len=64, rng=rng())


def mlp() -> Drafter:
    speculator = seeded(lambda: MlpSpeculator(emb_dim=8, inner_dim=6, vocab_size=VOCAB_SIZE, n_predict=3))
    return MlpDrafter(speculator, vocab_size=VOCAB_SIZE, max_model_len=64, rng=rng())


def intersection() -> Drafter:
    vocabulary = VocabularyMap(draft_ids=tuple(id_ if id_ % 3 else -1 for id_ in range(VOCAB_SIZE)))
    letters = Letters()
    return IntersectionDrafter(
        fake_runner(), rng(), vocabulary=vocabulary, target_tokenizer=letters, draft_tokenizer=letters, trees=DRAWN
    )


def text() -> Drafter:
    inner, letters = model_drafter(fake_runner(), rng()), Letters()
    return TextDrafter(inner, target_tokenizer=letters, draft_tokenizer=letters, target_vocab_size=VOCAB_SIZE)


def ngram() -> Drafter:
    return NgramDrafter(vocab_size=VOCAB_SIZE, prompt_lookup_min=1)


@dataclass(frozen=True, slots=True)
class Kind:
    """How to build a drafter, the width of the states it reads, and whether others' outcomes move its drafts."""

    build: Callable[[], Drafter]
    width: int = 1
    learns: bool = False


KINDS = {
    "ngram": Kind(ngram, learns=True),
    "suffix": Kind(lambda: SuffixDrafter(vocab_size=VOCAB_SIZE), learns=True),
    "lookahead": Kind(lambda: LookaheadDrafter(vocab_size=VOCAB_SIZE, rng=random.Random(0)), learns=True),
    "hybrid": Kind(
        lambda: HybridDrafter({"ngram": ngram()}, {"eagle": eagle(eagle_head())}),
        width=eagle_head().state_size,
        learns=True,
    ),
    "model": Kind(lambda: model_drafter(fake_runner(), rng(), trees=DRAWN)),
    "intersection": Kind(intersection),
    "text": Kind(text),
    "parallel": Kind(lambda: parallel_drafter(fake_runner(), rng(), mask_token_id=60)),
    "medusa": Kind(medusa, width=8),
    "mlp_speculator": Kind(mlp, width=8),
    "eagle": Kind(lambda: eagle(eagle_head()), width=eagle_head().state_size),
    "eagle3": Kind(lambda: eagle(eagle3_head()), width=eagle3_head().state_size),
    "dflash": Kind(
        lambda: one_pass_drafter(DFlashModel(dflash_head(), num_blocks=24, block_size=4, max_model_len=64), rng()),
        width=dflash_head().state_size,
    ),
}


# --- the hostile verifier ---

NAMES = st.sampled_from("ab")
BAD_IDS = st.sampled_from((-1, -(1 << 62), VOCAB_SIZE, VOCAB_SIZE + 1, 1 << 62))
GOOD_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4).map(tuple)
IDS = GOOD_IDS | GOOD_IDS | st.lists(st.integers(0, VOCAB_SIZE - 1) | BAD_IDS, max_size=4).map(tuple)
VALUES = st.sampled_from((1.0, -2.0, 0.0, 1e9, -1e9, 3e38, math.inf, -math.inf, math.nan))


def bytes_of_states(num_tokens: int, width: int, values: list[float]) -> bytes:
    """Fill rows with a few values; the first is what most are."""
    flat = [values[0]] * (num_tokens * width)
    for index, value in enumerate(values[1:]):
        flat[(index * 7919) % len(flat)] = value
    return struct.pack(f"<{len(flat)}f", *flat)


def conversations(width: int) -> st.SearchStrategy[list[VerifierMessage]]:
    """Sessions that might nearly be honest, with anything in between."""

    @st.composite
    def session(draw: st.DrawFn) -> list[VerifierMessage]:
        name, tokens = draw(NAMES), draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9))
        sampling = draw(st.sampled_from(SAMPLINGS))
        messages: list[VerifierMessage] = [
            Open(request_id=name, sampling=sampling, token_ids=tuple(tokens), cache_salt=draw(st.sampled_from("st")))
        ]
        num_states = draw(st.sampled_from((len(tokens) - 1, len(tokens) - 1, 1, 12)))
        if num_states:
            data = bytes_of_states(num_states, width, draw(st.lists(VALUES, min_size=1, max_size=3)))
            messages.append(States(request_id=name, position=0, dtype="float32", width=width, data=data))
        messages.append(draw(commits(st.just(name), st.just(len(tokens)))))
        return messages

    def commits(names: st.SearchStrategy[str], positions: st.SearchStrategy[int]) -> st.SearchStrategy[Commit]:
        return st.builds(
            Commit,
            request_id=names,
            round_id=st.integers(0, 9),
            position=positions,
            token_ids=IDS,
            max_length=st.sampled_from((3, MAX_LENGTH, 1, 0, -1, 1 << 60)),
            max_nodes=st.sampled_from((0, 0, 7, MAX_NODES, 1, -1, 1 << 60)),
            predicted_ids=IDS,
            forced_ids=st.just(()) | IDS,
        )

    states = st.builds(
        States,
        request_id=NAMES,
        position=st.integers(-1, 8),
        dtype=st.sampled_from(("float32", "float16", "bfloat16", "float64", "int8", "")),
        width=st.sampled_from((width, width, 2 * width, 1, 0, -1, 1 << 40)),
        data=st.builds(bytes_of_states, st.integers(1, 4), st.just(width), st.lists(VALUES, min_size=1, max_size=2))
        | st.binary(max_size=9),
        tensor=st.sampled_from((0, 0, 1)),
    )
    alone: st.SearchStrategy[VerifierMessage] = (
        states
        | commits(NAMES, st.integers(-1, 12))
        | st.lists(commits(NAMES, st.integers(0, 9)), max_size=4, unique_by=lambda one: one.request_id).map(Commits.of)
        | values_of(Open)
        | values_of(Seed)
        | st.builds(Close, request_id=NAMES)
    )
    parts = st.lists(session() | alone.map(lambda message: [message]), max_size=5)
    return parts.map(lambda each: [message for part in each for message in part])


class Table:
    """One engine at which an honest peer and a hostile one sit."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        config = DraftEngineConfig(
            max_sessions=64,  # beyond it the honest one would be forgotten and asked to begin again, as it should be
            max_draft_length=MAX_LENGTH,
            max_tree_nodes=MAX_NODES,
            max_num_batched_tokens=16,
            max_state_bytes=1 << 20,
        )
        self.engine = DraftEngine(kind.build(), clock=lambda: 0.0, config=config)
        self.honest: list[Draft] = []
        self.drafts: list[Draft] = []

    def say(self, peer: str, message: VerifierMessage) -> None:
        """Say a message as it crosses the wire, and let the engine make a step."""
        self.engine.handle(peer, decode(encode(message), VERIFIER_MESSAGES))
        self.step()

    def step(self) -> None:
        for peer, answer in self.engine.step():
            answer = decode(encode(answer), DRAFTER_MESSAGES)
            TALLY.count("drafters: answers to hostile sessions", type(answer).__name__)
            for draft in () if isinstance(answer, Resync) else each_draft(answer):
                self._hear(peer, draft)
        self.engine.check_integrity()

    def _hear(self, peer: str, answer: DrafterMessage) -> None:
        assert isinstance(answer, Draft)
        vocab_size = self.engine.vocab_size
        problem = check_draft(answer, draft_vocab_size=vocab_size, max_length=MAX_LENGTH, max_nodes=MAX_NODES)
        assert problem is None or (problem.startswith("parents, where") and answer.parents is not None), problem
        (self.honest if peer == "good" else self.drafts).append(answer)

    def open(self) -> None:
        self.say("good", Open(request_id="a", sampling=GREEDY, token_ids=PROMPT, cache_salt="good"))
        self._say_states(0, len(PROMPT) - 1)

    def ask(self, round_id: int, position: int, token_ids: tuple[int, ...], max_nodes: int) -> None:
        """Ask for an honest draft, and wait for it."""
        if token_ids:
            self._say_states(position - 1, position + len(token_ids) - 1)
        self.say(
            "good",
            Commit(
                request_id="a",
                round_id=round_id,
                position=position,
                token_ids=token_ids,
                max_length=4,
                max_nodes=max_nodes,
            ),
        )

    def _say_states(self, start: int, stop: int) -> None:
        width = self._kind.width
        places = [(position, column) for position in range(start, stop) for column in range(width)]
        rows = [((position * 31 + column * 17) % 23 - 11) / 7 for position, column in places]
        data = struct.pack(f"<{len(rows)}f", *rows)
        self.say("good", States(request_id="a", position=start, dtype="float32", width=width, data=data))

    def finish(self) -> None:
        for _ in range(200):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("drafts do not become complete")


def honest_drafts(kind: Kind, hostile: list[VerifierMessage]) -> list[Draft]:
    table = Table(kind)
    table.open()
    half = len(hostile) // 2
    for message in hostile[:half]:
        table.say("bad", message)
    table.ask(1, len(PROMPT), (), 0)
    for message in hostile[half:]:
        table.say("bad", message)
    table.finish()
    table.ask(2, len(PROMPT), NEW_IDS, 7)
    table.finish()
    table.engine.forget_peer("bad")
    table.engine.forget_peer("good")
    table.engine.check_integrity()
    assert table.engine.load().num_sessions == 0
    return table.honest


@pytest.mark.parametrize("name", KINDS)
def test_a_hostile_session_harms_nobody_else(name: str) -> None:
    kind = KINDS[name]
    alone = honest_drafts(kind, [])
    assert [draft.round_id for draft in alone] == [1, 2]
    assert all(draft.token_ids for draft in alone), "there is something to harm"

    @examples(60)
    @given(conversations(kind.width))
    def play(hostile: list[VerifierMessage]) -> None:
        drafts = honest_drafts(kind, hostile)
        assert [draft.round_id for draft in drafts] == [1, 2]
        if not kind.learns:
            heard = [(draft.token_ids, draft.parents) for draft in drafts]
            assert heard == [(draft.token_ids, draft.parents) for draft in alone]

    play()
