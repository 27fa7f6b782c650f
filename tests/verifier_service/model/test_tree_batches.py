"""A tree of drafted tokens in one forward: a node is as if its path stood alone, an accepted path's KV is in place."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.messages.tree import depths
from outrider.verifier_service.model.attention import tree_distances
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from tiny.models import full_logits, make_checkpoint, random_sequences, relative_difference

BLOCK_SIZE = 4
PARENTS = [-1, -1, 0, 0, 1, 2, 4]  # two children of the root; node 5's path is 0, 2, 5
EXACT, WRONG = 1e-5, 2e-2  # relative difference of logits: numerical noise, a mistake
MODEL_TYPES = ("llama", "gemma2", "mistral", "gpt2")  # windows, soft caps, learned positions
TAPS = (0, FINAL_TAP)


@pytest.fixture(scope="module", params=MODEL_TYPES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, PreTrainedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_checkpoint(folder, request.param)
    return make_runner(folder), model


def make_runner(folder: Path) -> ModelRunner:
    config = ModelConfig(path=str(folder), num_kv_blocks=32, block_size=BLOCK_SIZE, device="cpu", state_taps=TAPS)
    return ModelRunner(config, TensorParallelGroup.single())


def prompt_and_nodes() -> tuple[list[int], list[int]]:
    prompt, nodes = random_sequences((13, len(PARENTS)))
    return prompt, nodes


def batch_of(
    tokens: list[int], positions: list[int], first_place: int, table: list[int], parents: list[int]
) -> ScheduledBatch:
    places = range(first_place, first_place + len(tokens))
    return ScheduledBatch(
        token_ids=tokens,
        positions=positions,
        slot_mapping=[table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE for place in places],
        query_lengths=[len(tokens)],
        context_lengths=[places.stop],
        block_tables=[table[: -(-places.stop // BLOCK_SIZE)]],
        logits_indices=list(range(len(tokens))),
        tree_parents=[parents],
    )


TABLE = [7, 2, 9, 4, 11, 1, 5]


def tree_batch(prompt: list[int], nodes: list[int]) -> ScheduledBatch:
    """The last prompt token and the tree after it, the rest of the prompt being computed."""
    first = len(prompt) - 1
    positions = [first, *(len(prompt) + depth for depth in depths(PARENTS))]
    return batch_of([prompt[-1], *nodes], positions, first, TABLE, PARENTS)


def run_tree(runner: ModelRunner, change=lambda batch: batch) -> torch.Tensor:
    prompt, nodes = prompt_and_nodes()
    runner.execute(batch_of(prompt[:-1], list(range(len(prompt) - 1)), 0, TABLE, []))
    return runner.execute(change(tree_batch(prompt, nodes)))


def path_to(node: int) -> list[int]:
    return [*(path_to(PARENTS[node]) if PARENTS[node] >= 0 else []), node]


def expected_rows(model: PreTrainedModel) -> torch.Tensor:
    prompt, nodes = prompt_and_nodes()
    rows = [full_logits(model, prompt)[-1]]
    rows += [full_logits(model, [*prompt, *(nodes[n] for n in path_to(node))])[-1] for node in range(len(nodes))]
    return torch.stack(rows)


def test_every_node_sees_its_own_path(served: tuple[ModelRunner, PreTrainedModel]):
    runner, model = served
    assert relative_difference(expected_rows(model), run_tree(runner)) < EXACT


def test_mistakes_show(served: tuple[ModelRunner, PreTrainedModel]):
    runner, model = served
    expected = expected_rows(model)

    def as_chain(batch: ScheduledBatch) -> ScheduledBatch:
        return dataclasses.replace(batch, tree_parents=[])

    def of_another_parent(batch: ScheduledBatch) -> ScheduledBatch:
        return dataclasses.replace(batch, tree_parents=[[-1, -1, 0, 1, 1, 2, 4]])

    def at_their_places(batch: ScheduledBatch) -> ScheduledBatch:
        return dataclasses.replace(batch, positions=list(range(batch.positions[0], batch.positions[0] + 8)))

    for mistake in (as_chain, of_another_parent, at_their_places):
        assert relative_difference(expected, run_tree(runner, mistake)) > WRONG, mistake.__name__


def test_chains_and_trees_share_a_batch(served: tuple[ModelRunner, PreTrainedModel]):
    runner, model = served
    prompt, nodes = prompt_and_nodes()
    other, other_table = random_sequences((6,), seed=4)[0], [3, 8]
    runner.execute(batch_of(prompt[:-1], list(range(len(prompt) - 1)), 0, TABLE, []))
    tree, chain = tree_batch(prompt, nodes), batch_of(other, list(range(6)), 0, other_table, [])
    joined = {field.name: getattr(tree, field.name) for field in dataclasses.fields(ScheduledBatch)}
    for name in ("token_ids", "positions", "slot_mapping", "query_lengths", "context_lengths", "block_tables"):
        joined[name] = getattr(chain, name) + getattr(tree, name)
    joined |= {"tree_parents": [[], PARENTS], "logits_indices": list(range(len(chain.token_ids) + len(tree.token_ids)))}
    rows = runner.execute(ScheduledBatch(**joined))
    assert relative_difference(full_logits(model, other), rows[:6]) < EXACT
    assert relative_difference(expected_rows(model), rows[6:]) < EXACT


def test_the_accepted_path_is_moved_with_its_states(served: tuple[ModelRunner, PreTrainedModel]):
    """Accept the path 0, 2, 5, then go on after it: KV and states are those of the tokens in a row."""
    runner, model = served
    assert runner.states is not None
    prompt, nodes = prompt_and_nodes()
    run_tree(runner)
    path, first = path_to(5), len(prompt)

    def slot(place: int) -> int:
        return TABLE[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE

    sources, targets = [slot(first + node) for node in path], [slot(first + depth) for depth in range(len(path))]
    runner.states.move_slots(sources, targets)
    tokens = [*prompt, *(nodes[node] for node in path), 17]
    after = batch_of([17], [len(tokens) - 1], len(tokens) - 1, TABLE, [])
    row = runner.execute(dataclasses.replace(after, move_sources=sources, move_targets=targets))
    assert relative_difference(full_logits(model, tokens)[-1:], row) < EXACT
    states = runner.states.read(TABLE, 0, len(tokens))
    hidden = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    expected = torch.cat([hidden[0][0], hidden[-1][0]], dim=1)
    assert (states - expected).abs().max() < 1e-4 * expected.abs().max()


def test_distances_in_a_tree():
    assert tree_distances([]) == []
    assert tree_distances([-1, 0, 1]) == [[0, -1, -1], [1, 0, -1], [2, 1, 0]]
    assert tree_distances([-1, -1, 0]) == [[0, -1, -1], [-1, 0, -1], [1, -1, 0]]
    assert tree_distances([-1, 0, 1], [1, 3, 3]) == [[0, -1, -1], [1, 0, 0], [2, 1, 0]]


def test_masks_see_all_of_their_block_and_nothing_else_of_the_others(tmp_path: Path):
    """A draft of two tokens and a block of three masks after each of its prefixes, beside the library's own mask."""
    model = make_checkpoint(tmp_path)
    prompt, (*drafted, mask) = random_sequences((13, 3))
    blocks = [[*prompt, *drafted[:count]] for count in range(3)]
    parents = [-1, 0, *itertools.chain.from_iterable((count - 1, 3 * count + 2, 3 * count + 3) for count in range(3))]
    ends = [1, 2, *(5 + 3 * count for count in range(3) for _ in range(3))]
    positions = [12, 13, 14, *(13 + count + place for count in range(3) for place in range(3))]
    runner = make_runner(tmp_path)
    runner.execute(batch_of(prompt[:-1], list(range(12)), 0, TABLE, []))
    batch = batch_of([prompt[-1], *drafted, *[mask] * 9], positions, 12, TABLE, parents)
    rows = runner.execute(dataclasses.replace(batch, tree_ends=[ends]))
    expected = torch.cat([block_logits(model, block, mask) for block in blocks])
    assert relative_difference(expected, rows[3:]) < EXACT
    assert relative_difference(full_logits(model, [*prompt, *drafted])[12:], rows[:3]) < EXACT
    causal = runner.execute(batch)
    assert relative_difference(expected, causal[3:]) > WRONG
    assert torch.equal(causal[:3], rows[:3])


def block_logits(model: PreTrainedModel, before: list[int], mask: int) -> torch.Tensor:
    """The library's rows of three masks that see each other and all before them: [3, vocab_size]."""
    size = len(before) + 3
    seen = torch.ones(size, size).tril().bool()
    seen[-3:, -3:] = True
    bias = torch.zeros(1, 1, size, size).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(input_ids=torch.tensor([[*before, *[mask] * 3]]), attention_mask=bias).logits[0, -3:].float()


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_leaving_early_is_what_the_library_does(tmp_path: Path, num_layers: int):
    """`assistant_early_exit` of transformers takes the final norm and output embedding after the first layers."""
    model = make_checkpoint(tmp_path, num_hidden_layers=4)
    runner = make_runner(tmp_path)
    assert runner.states is not None
    prompt, _ = prompt_and_nodes()
    whole = batch_of(prompt, list(range(len(prompt))), 0, TABLE, [])
    full = runner.execute(whole)
    states = runner.states.read(TABLE, 0, len(prompt))
    early = runner.execute(dataclasses.replace(whole, num_layers=num_layers))
    hidden = model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states[num_layers]
    expected = model.lm_head(model.model.norm(hidden))[0].float()
    assert relative_difference(expected, early) < EXACT
    assert relative_difference(full, early) > WRONG
    assert torch.equal(states, runner.states.read(TABLE, 0, len(prompt)))  # a draft's states are nobody's
    assert relative_difference(full, runner.execute(whole)) == 0.0
