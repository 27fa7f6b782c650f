"""Every way to draft, over something small whose law is known: what the contract of drafters is held against."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from fakes.drafter_play import GREEDY, ask_of, key, paths_of
from fakes.plugin_drafters import FakeDrafter
from fakes.runner import NoisyRunner, noisy_row
from outrider.drafter_service.engine.draft_sampler import launch_children, read_children
from outrider.drafter_service.engine.drafter import Ask, Drafter
from outrider.drafter_service.engine.tree_growth import Growth, TreeConfig, start_growth
from outrider.drafter_service.head_drafters.head_runner import HeadRunner
from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
from outrider.drafter_service.head_drafters.mlp_drafter import MlpDrafter
from outrider.drafter_service.heads.head_layer import DraftHead
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.drafter_service.heads.mlp_speculator import MlpSpeculator
from outrider.drafter_service.heads.switched import SwitchedHeads
from outrider.drafter_service.lookup.lookahead_drafter import LookaheadConfig, LookaheadDrafter
from outrider.drafter_service.lookup.ngram_drafter import NgramDrafter
from outrider.drafter_service.lookup.suffix_drafter import SuffixConfig, SuffixDrafter
from outrider.drafter_service.models.dflash_drafter import DFlashModel
from outrider.drafter_service.models.translated_drafter import IntersectionDrafter, TextDrafter
from outrider.drafter_service.models.vocabulary_map import VocabularyMap
from outrider.drafter_service.plugin import PluginContext
from outrider.drafter_service.service.hybrid_drafter import HybridDrafter
from outrider.drafter_service.service.plugin_drafter import PluginDrafter
from outrider.drafter_service.target.early_exit_drafter import early_exit_drafter
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft
from outrider.verifier_service.sampling.sparse_rows import quantised_rows
from tiny.dflash import dflash_head, slow_block
from tiny.drafters import eagle_drafter, model_drafter, one_pass_drafter, parallel_drafter
from tiny.drafting.self_drafting import EXIT_LAYER, TinyTarget
from tiny.heads import SlowDrafting, eagle3_head, eagle_head, mtp_head, states_of
from tiny.models import full_logits
from tiny.verified import target_probs

PROMPTS = ([1, 2, 3, 4, 1, 2], [5, 1, 2, 1, 2], [6, 5, 4, 6], [2, 2])
TOP_N = 8
WIDE = TreeConfig(branching=3)
MASK_ID = 12  # of the model with 13 tokens
HIDDEN_SIZE, NUM_GUESSES = 8, 3

Law = Callable[[Ask, Sequence[int]], torch.Tensor]
States = Callable[[Sequence[int]], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to draft. `make` takes num_blocks, vocab_size and trees, and leaves out what means nothing to it."""

    make: Callable[..., Drafter]
    law: Law | None = None  # logits [vocab_size] after the ask's tokens and a drafted path; None: point masses
    states: States | None = None  # of the target, for an ask's tokens
    num_guesses: int = 99  # at most in a chain
    has_pool: bool = False  # its KV has `num_blocks` of four tokens
    top_n: int = TOP_N  # of its rows
    branching: int = 3  # of WIDE trees
    draws_trees: bool = False
    drafts_trees: bool = True
    keeps_sessions: bool = True
    prompts: Callable[[], Sequence[Sequence[int]]] = lambda: PROMPTS

    def ask(self, tokens: Sequence[int], name: int = 0, **fields: Any) -> Ask:
        """Ask after `tokens` with all the states that there are."""
        states = None if self.states is None else self.states(tokens)
        return ask_of(list(tokens), **{"key": key(str(name)), "ask_id": 1 + name, "states": states, **fields})

    def asks(self, **fields: Any) -> list[Ask]:
        return [self.ask(tokens, name, **fields) for name, tokens in enumerate(self.prompts())]


def probs_after(case: Case, ask: Ask, path: Sequence[int], vocab_size: int) -> torch.Tensor:
    """Return what a method says of the token after a drafted path: float32 [vocab_size]."""
    assert case.law is not None
    logits = case.law(ask, path)[:vocab_size]
    return logits.softmax(dim=0) if ask.sampling is GREEDY else target_probs(logits[None], [ask.sampling])[0]


def require_rows(case: Case, ask: Ask, draft: Draft, vocab_size: int) -> None:
    """Every row is the law after its path, and the tokens after it are in it; a forced token's is that token."""
    paths = [(), *map(tuple, paths_of(draft))]
    parents = range(ROOT, len(paths) - 2) if draft.parents is None else draft.parents
    assert draft.draft_probs is not None
    for parent, row in zip(dict.fromkeys(parents), draft.draft_probs, strict=True):
        path = paths[parent + 1]
        found = dict(zip(row.token_ids, row.weights, strict=True))
        children = [token for token, of_node in zip(draft.token_ids, parents, strict=True) if of_node == parent]
        assert set(children) <= found.keys()
        if len(path) < len(ask.forced_ids):
            assert found == {ask.forced_ids[len(path)]: DRAFT_PROB_SCALE}
            continue
        ids, weights = quantised_rows(probs_after(case, ask, path, vocab_size)[None], case.top_n)
        law = {id_: weight for id_, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True) if weight}
        assert found == pytest.approx(law, abs=12)


def grown_by_hand(
    ask: Ask,
    trees: TreeConfig,
    logits_of: Callable[[list[int]], torch.Tensor],
    vocab_size: int,
) -> Growth:
    """Grow the same draft with a model that computes every path from its beginning, one node at a time."""
    growth = start_growth(ask, trees, vocab_size=vocab_size)
    while growth.frontier:
        found = []
        for node in growth.frontier:
            context = [*ask.token_ids, *growth.tree.path(node)]
            launched = launch_children(
                logits_of(context)[None],
                [ask.sampling],
                [len(context)],
                _rng(),
                vocab_size=vocab_size,
                num_children=growth.num_children,
                sampled=growth.is_drawn,
            )
            found += read_children(launched)
        growth.grow(found)
    return growth


def _rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# --- models ---


def _noisy(num_blocks: int = 64) -> NoisyRunner:
    return NoisyRunner(vocab_size=13, num_blocks=num_blocks, max_model_len=64)


def _model(*, num_blocks: int = 64, **options: Any) -> Drafter:
    return model_drafter(_noisy(num_blocks), _rng(), top_n=TOP_N, **options)


def _model_law(ask: Ask, path: Sequence[int]) -> torch.Tensor:
    return noisy_row([*ask.token_ids, *path], 13)


def _masked(*, num_blocks: int = 64, **options: Any) -> Drafter:
    return parallel_drafter(_noisy(num_blocks), _rng(), mask_token_id=MASK_ID, top_n=TOP_N, **options)


def _masked_law(ask: Ask, path: Sequence[int]) -> torch.Tensor:
    forced = ask.forced_ids[: len(path)]
    return noisy_row([*ask.token_ids, *forced, *[MASK_ID] * (len(path) - len(forced))], 13)


class Letters:
    """A tokenizer of one character for each id."""

    def __init__(self, letters: str) -> None:
        self._letters = letters

    def encode(self, text: str) -> list[int]:
        return [self._letters.index(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._letters[token_id] for token_id in token_ids)


TARGET_LETTERS, DRAFT_LETTERS = Letters("abcdefghijklmn"), Letters("mlkhgfedcbain")  # one has a j, too
SHARED = VocabularyMap(draft_ids=(10, 9, 8, 7, 6, 5, 4, 3, 11, -1, 2, 1, 0, 12))


def _in_text(*, num_blocks: int = 64, vocab_size: int = 14, **options: Any) -> Drafter:
    tokenizers = {"target_tokenizer": TARGET_LETTERS, "draft_tokenizer": DRAFT_LETTERS}
    return TextDrafter(model_drafter(_noisy(num_blocks), _rng()), target_vocab_size=vocab_size, **tokenizers)


def _intersection(*, num_blocks: int = 64, **options: Any) -> Drafter:
    tokenizers = {"target_tokenizer": TARGET_LETTERS, "draft_tokenizer": DRAFT_LETTERS}
    return IntersectionDrafter(_noisy(num_blocks), _rng(), vocabulary=SHARED, top_n=TOP_N, **tokenizers, **options)


def _shared_law(ask: Ask, path: Sequence[int]) -> torch.Tensor:
    row = noisy_row([SHARED.draft_ids[token_id] for token_id in (*ask.token_ids, *path)], 13)
    ids = torch.tensor(SHARED.draft_ids)
    return row[ids].masked_fill(ids < 0, -torch.inf)


# --- heads ---


def _head_case(*heads: DraftHead) -> Case:
    def make(*, num_blocks: int = 64, **options: Any) -> Drafter:
        runner = HeadRunner(SwitchedHeads(heads), num_blocks=num_blocks, block_size=4, max_model_len=64)
        return eagle_drafter(runner, _rng(), top_n=TOP_N, **options)

    known: dict[tuple[int, ...], SlowDrafting] = {}  # after the paths of the last ask
    asked: list[Ask] = []

    def after(ask: Ask, path: tuple[int, ...]) -> SlowDrafting:
        if not asked or asked[0] is not ask:
            known.clear()
            asked[:] = [ask]
        if path not in known:
            if path:
                drafting = after(ask, path[:-1]).copy()
                place = len(ask.token_ids) - 2 + len(path)
                drafting.step(path[-1], drafting.feedback, place, len(path))
            else:
                assert ask.states is not None
                drafting = SlowDrafting(heads, ask.token_ids, ask.states)
            known[path] = drafting
        return known[path]

    def law(ask: Ask, path: Sequence[int]) -> torch.Tensor:
        return after(ask, tuple(path)).logits

    return Case(
        make=make,
        law=law,
        states=lambda tokens: states_of(tokens, heads[0]),
        has_pool=True,
        draws_trees=len(heads) == 1,
        drafts_trees=len(heads) == 1,
    )


def last_state(tokens: Sequence[int]) -> torch.Tensor:
    """Return the last token's state behind one that is not to be read: [2, HIDDEN_SIZE]."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) & 0xFFFF_FFFF)
    return 3 * torch.randn(2, HIDDEN_SIZE, generator=generator)


@functools.cache
def medusa_heads(vocab_size: int = 13) -> MedusaHeads:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MedusaHeads(hidden_size=HIDDEN_SIZE, vocab_size=vocab_size, num_heads=NUM_GUESSES).eval()


@torch.no_grad()
def _medusa_law(ask: Ask, path: Sequence[int]) -> torch.Tensor:
    assert ask.states is not None
    return medusa_heads()(ask.states[-1])[len(path)]


def _medusa(*, num_blocks: int = 0, trees: TreeConfig | None = None, vocab_size: int = 13) -> Drafter:
    branching = {} if trees is None else {"branching": trees.branching}
    return MedusaDrafter(medusa_heads(), vocab_size=vocab_size, max_model_len=64, rng=_rng(), top_n=TOP_N, **branching)


@functools.cache
def mlp_speculator() -> MlpSpeculator:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        speculator = MlpSpeculator(emb_dim=HIDDEN_SIZE, inner_dim=6, vocab_size=13, n_predict=NUM_GUESSES)
        for head in speculator.head:
            head.weight.mul_(3)
        return speculator.eval()


@torch.no_grad()
def _mlp_law(ask: Ask, path: Sequence[int]) -> torch.Tensor:
    assert ask.states is not None
    state = mlp_speculator().start(ask.states[-1])
    for index, token_id in enumerate((ask.token_ids[-1], *path)):
        logits, state = mlp_speculator().step(index, state, torch.tensor(token_id))
    return logits


def _mlp(*, num_blocks: int = 0, trees: TreeConfig | None = None, vocab_size: int = 13) -> Drafter:
    branching = {} if trees is None else {"branching": trees.branching}
    return MlpDrafter(mlp_speculator(), vocab_size=vocab_size, max_model_len=64, rng=_rng(), top_n=TOP_N, **branching)


def _dflash_case(*, is_anchored: bool) -> Case:
    head = dflash_head(sample_from_anchor=is_anchored)

    def make(*, num_blocks: int = 64, **options: Any) -> Drafter:
        model = DFlashModel(head, num_blocks=num_blocks, block_size=4, max_model_len=64)
        return one_pass_drafter(model, _rng(), top_n=TOP_N, **options)

    def law(ask: Ask, path: Sequence[int]) -> torch.Tensor:
        assert ask.states is not None
        rows = slow_block(head, ask.token_ids, ask.states, ask.forced_ids)
        return rows[len(path) + (not is_anchored)]

    return Case(
        make=make,
        law=law,
        states=lambda tokens: states_of(tokens, head),
        num_guesses=head.config.block_size - (not is_anchored),
        branching=10,
        has_pool=True,
        draws_trees=True,
    )


# --- the target itself ---


@functools.cache
def tiny_target() -> TinyTarget:
    with TemporaryDirectory() as folder:
        return TinyTarget.of(Path(folder))


def _early_exit(*, num_blocks: int = 0, **options: Any) -> Drafter:
    _, drafter = tiny_target().started(lambda view: early_exit_drafter(view, _rng(), exit_layer=EXIT_LAYER, **options))
    return drafter


def _early_exit_law(ask: Ask, path: Sequence[int]) -> torch.Tensor:
    return full_logits(tiny_target().shortened, [*ask.token_ids, *path])[-1]


# --- look-ups, and what is made of others ---


def _ngram(*, num_blocks: int = 0, **options: Any) -> Drafter:
    return NgramDrafter(vocab_size=13, prompt_lookup_min=1, prompt_lookup_max=3)


def _suffix(*, num_blocks: int = 0, **options: Any) -> Drafter:
    return SuffixDrafter(vocab_size=13, config=SuffixConfig(min_token_prob=0.0))


def _lookahead(*, num_blocks: int = 0, **options: Any) -> Drafter:
    return LookaheadDrafter(vocab_size=13, rng=random.Random(0), config=LookaheadConfig())


def _hybrid(**options: Any) -> Drafter:
    return HybridDrafter({"suffix": _suffix()}, {"draft_model": _model(**options)})


def _plugin(*, num_blocks: int = 0, **options: Any) -> Drafter:
    sizes = {"vocab_size": 13, "max_model_len": 64, "num_speculative_tokens": 8, "num_tree_nodes": 0}
    context = PluginContext(name="fake", options={}, seed=0, device="cpu", target="", **sizes)
    return PluginDrafter("fake", FakeDrafter(context))


CASES: Mapping[str, Case] = {
    "draft_model": Case(make=_model, law=_model_law, has_pool=True, draws_trees=True),
    "draft_model in shared tokens": Case(make=_intersection, law=_shared_law, has_pool=True, draws_trees=True),
    "draft_model by text": Case(make=_in_text, drafts_trees=False),
    "parallel_draft": Case(make=_masked, law=_masked_law, branching=10, has_pool=True, draws_trees=True),
    "eagle": _head_case(eagle_head()),
    "eagle3": _head_case(eagle3_head()),
    "eagle3 variants": _head_case(eagle3_head(norm_before_residual=True, fc_norm=True, norm_output=True)),
    "eagle3 switched": _head_case(*(eagle3_head(seed) for seed in (1, 2, 3))),
    "mtp": _head_case(mtp_head()),
    "dflash": _dflash_case(is_anchored=False),
    "dflash from its anchor": _dflash_case(is_anchored=True),
    "medusa": Case(make=_medusa, law=_medusa_law, states=last_state, num_guesses=NUM_GUESSES, keeps_sessions=False),
    "mlp_speculator": Case(make=_mlp, law=_mlp_law, states=last_state, num_guesses=NUM_GUESSES, keeps_sessions=False),
    "early_exit": Case(
        make=_early_exit,
        law=_early_exit_law,
        top_n=32,
        draws_trees=True,
        keeps_sessions=False,
        prompts=lambda: tiny_target().prompts,
    ),
    "ngram": Case(make=_ngram),
    "suffix": Case(make=_suffix),
    "lookahead": Case(make=_lookahead),
    "hybrid": Case(make=_hybrid, draws_trees=True),
    "plugin": Case(make=_plugin, drafts_trees=False, keeps_sessions=False),
}
