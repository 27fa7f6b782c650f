"""Medusa's heads and the MLP speculator: what the contract of drafters does not know of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fakes.drafter_play import DRAWN, GREEDY, SEEDED, ask_of, draft_of, drafts_of, key
from outrider.drafter_service.engine.draft_sampler import Children
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.product_tree import best_of_product
from outrider.drafter_service.head_drafters.last_state import draft_depth, last_states
from outrider.drafter_service.head_drafters.medusa_drafter import MedusaDrafter
from outrider.drafter_service.head_drafters.mlp_drafter import MlpDrafter
from outrider.drafter_service.heads.medusa import MedusaHeads
from outrider.verifier_service.messages.draft import Commit, DraftSampling, Open, States
from tiny.drafting.methods import CASES, HIDDEN_SIZE, NUM_GUESSES, last_state, medusa_heads, mlp_speculator


def medusa(heads: MedusaHeads, **options: Any) -> MedusaDrafter:
    return MedusaDrafter(heads, **{"vocab_size": 9, "max_model_len": 64, "rng": torch.Generator(), **options})


def mlp(**options: Any) -> MlpDrafter:
    return MlpDrafter(mlp_speculator(), **{"vocab_size": 9, "max_model_len": 64, "rng": torch.Generator(), **options})


def ask(token_ids: Sequence[int] = (1, 2, 3), **fields: Any) -> Ask:
    return ask_of(token_ids, **{"states": last_state(token_ids), "length": NUM_GUESSES, **fields})


@pytest.mark.parametrize(
    ("num_guesses", "num_forced", "depth"), [(0, 0, 0), (3, 0, 3), (9, 0, 4), (0, 2, 2), (3, 9, 4), (3, 2, 3)]
)
def test_forced_tokens_may_go_further_than_guesses(num_guesses: int, num_forced: int, depth: int):
    assert draft_depth(ask(length=4, forced_ids=(5,) * num_forced), num_guesses) == depth


def test_last_states_take_the_parameters_dtype():
    asks = [ask(states=torch.tensor([[1.0], [2.0]])), ask(states=torch.tensor([[3.0]]))]
    stacked = last_states(asks, torch.ones(1, dtype=torch.bfloat16))
    assert stacked.dtype == torch.bfloat16
    assert stacked.tolist() == [[2.0], [3.0]]


def test_the_product_is_never_made():
    flat = Children(token_ids=tuple(range(1000)), probs=(0.001,) * 1000)
    sharp = Children(token_ids=tuple(range(1000)), probs=(0.9, *[0.1 / 999] * 999))
    chosen = best_of_product([sharp] * 20 + [flat] * 20, (), max_nodes=60)  # 1000^40 leaves
    assert len(chosen.token_ids) == 60
    assert chosen.token_ids[:20] == (0,) * 20


@pytest.mark.parametrize("max_nodes", [0, 30])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, DRAWN], ids=["greedy", "seeded", "drawn"])
def test_heads_of_another_vocabulary_propose_what_both_know(sampling: DraftSampling, max_nodes: int):
    mapped = MedusaHeads(hidden_size=HIDDEN_SIZE, vocab_size=20, num_heads=3, token_map=torch.tensor([3, 17, 5]))
    for heads in (medusa_heads(20), medusa_heads(5), mapped):
        draft = draft_of(medusa(heads), ask(sampling=sampling, max_nodes=max_nodes))
        assert draft.token_ids
        assert max(draft.token_ids) < heads.vocab_size
        assert heads is not mapped or set(draft.token_ids) <= {3, 5}


@pytest.mark.parametrize("max_nodes", [0, 4])
def test_a_token_that_a_speculator_does_not_know_is_not_read(max_nodes: int):
    drafter = mlp(vocab_size=30)
    unknown, forced, earlier = (
        ask(ask_id=number, key=key(str(number)), max_nodes=max_nodes, **fields)
        for number, fields in enumerate(({"token_ids": [1, 13]}, {"forced_ids": (14,)}, {"token_ids": [13, 1]}))
    )
    drafts = drafts_of(drafter, unknown, forced, earlier)
    assert [draft.token_ids for draft in drafts[:2]] == [(), (14,)]
    assert drafts[2].token_ids


def test_settings_that_make_no_sense_are_refused():
    mapped = MedusaHeads(hidden_size=HIDDEN_SIZE, vocab_size=20, num_heads=3, token_map=torch.tensor([3, 17, 5]))
    with pytest.raises(ValueError, match="no id of the heads' token_map is below 3"):
        medusa(mapped, vocab_size=3)
    with pytest.raises(ValueError, match="branching must be positive"):
        medusa(medusa_heads(), branching=0)
    with pytest.raises(ValueError, match="branching must be positive"):
        mlp(branching=0)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_the_budget_holds_back_younger_asks(method: str):
    case = CASES[method]
    asks = [case.ask([1, 2, 3], name, length=NUM_GUESSES) for name in range(4)]
    answered = [draft.round_id for draft in case.make().draft(asks, max_num_tokens=2 * NUM_GUESSES)]
    assert answered == [1, 2]


def test_the_first_head_guesses_the_token_after_the_last_committed_one():
    """A target that counts up, and heads that know it: head k adds k + 2 to the token whose state they read."""
    heads = MedusaHeads(hidden_size=12, vocab_size=12, num_heads=NUM_GUESSES, num_layers=0)
    with torch.no_grad():
        for index, lm_head in enumerate(heads.lm_heads):
            lm_head.weight.copy_(torch.eye(12).roll(index + 2, dims=0) * 9)
    engine = DraftEngine(medusa(heads, vocab_size=12), clock=lambda: 0.0, config=DraftEngineConfig())
    engine.handle("v", Open(request_id="r", sampling=GREEDY, token_ids=(3, 4, 5, 6)))
    data = torch.eye(12)[[5]].numpy().astype("<f4").tobytes()  # of token 5: the target has not computed token 6 yet
    engine.handle("v", States(request_id="r", position=2, dtype="float32", width=12, data=data))
    engine.handle("v", Commit(request_id="r", round_id=1, position=4, token_ids=(), max_length=NUM_GUESSES))
    ((_, draft),) = engine.step()
    assert draft.token_ids == (7, 8, 9)
    engine.check_integrity()
