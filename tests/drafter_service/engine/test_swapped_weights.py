"""New weights between two steps: nothing that the old ones computed is answered or gone on from."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch

from fakes.runner import FakeRunner, closed, continuation
from outrider.drafter_service.engine.drafter import DraftEngineConfig
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import Close, Commit, Draft, DraftSampling, Open
from tiny.drafters import model_drafter

GREEDY = DraftSampling(temperature=0.0)
PROMPT = (4, 8, 15)
VOCAB_SIZE = 97


class VersionedRunner(FakeRunner):
    """A model whose weights have a number: its tokens differ by it, and it goes on from no KV of other weights."""

    version = 0

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self._versions = [-1] * len(self._kv)  # of the weights that computed a slot's KV

    def execute(self, batch: ScheduledBatch, chosen: torch.Tensor | None = None) -> torch.Tensor:
        size = self.block_size
        copied = [self._versions[source * size :][:size] for source in batch.copy_sources]
        for target, block in zip(batch.copy_targets, copied, strict=True):
            self._versions[target * size : (target + 1) * size] = block
        for slot in batch.slot_mapping:
            self._versions[slot] = self.version
        for context, table in zip(batch.context_lengths, batch.block_tables, strict=True):
            versions = {self._versions[table[place // size] * size + place % size] for place in range(context)}
            assert versions == {self.version}, f"KV of {versions} before weights {self.version}"
        return super().execute(closed(batch, chosen), None).roll(self.version, dims=1)


class Served:
    """A draft engine over weights that are swapped as `UpdateDraftWeights` does."""

    def __init__(self, num_ahead_branches: int = 8, *, budget: int = 64, forgets: bool = True) -> None:
        self.runner = VersionedRunner(num_blocks=256)
        rng = torch.Generator().manual_seed(0)
        self.drafter = model_drafter(self.runner, rng, num_ahead_branches=num_ahead_branches)
        config = DraftEngineConfig(max_num_batched_tokens=budget, max_tree_nodes=6)
        ahead = self.drafter if num_ahead_branches else None
        self.engine = DraftEngine(self.drafter, clock=lambda: 0.0, config=config, ahead=ahead, has_weights=True)
        self._forgets = forgets

    def swap(self) -> None:
        self.runner.version += 1
        if self._forgets:
            self.engine.take_version(f"v{self.runner.version}")

    def ask(self, position: int, new: tuple[int, ...] = (), **fields: Any) -> None:
        values: dict[str, Any] = {"request_id": "r", "round_id": 1, "max_length": 3, **fields}
        self.engine.handle("v", Commit(position=position, token_ids=new, **values))

    def answers(self) -> list[Draft]:
        drafts: list[Any] = []
        while self.engine.has_work():
            drafts += [message for _, message in self.engine.step()]
            self.engine.check_integrity()
        return drafts

    def run_ahead(self) -> None:
        while self.engine.has_spare_work():
            self.engine.run_ahead()
            self.engine.check_integrity()


def drafted(text: tuple[int, ...], version: int, length: int = 3) -> tuple[int, ...]:
    """Return the greedy draft of some weights."""
    tokens = list(text)
    for _ in range(length):
        tokens.append((continuation(tokens, 1, VOCAB_SIZE)[0] + version) % VOCAB_SIZE)
    return tuple(tokens[len(text) :])


def begin(served: Served) -> tuple[int, ...]:
    """Let a draft be answered, and its outcomes be prepared; return it with the likeliest token after it."""
    served.engine.handle("v", Open(request_id="r", sampling=GREEDY, token_ids=PROMPT))
    served.ask(3)
    (answer,) = served.answers()
    assert answer.token_ids == drafted(PROMPT, 0)
    served.run_ahead()
    return drafted(PROMPT, 0, 4)


def test_what_was_prepared_by_old_weights_is_not_answered():
    kept, swapped = Served(), Served()
    for served in (kept, swapped):
        new = begin(served)
    kept.ask(3, new)
    assert kept.engine.flush(), "without a swap, the answer is there at once"
    swapped.swap()
    assert not swapped.engine.has_spare_work()
    swapped.ask(3, new)
    assert swapped.engine.flush() == []
    (answer,) = swapped.answers()
    assert answer.token_ids == drafted(PROMPT + new, 1)
    assert (swapped.engine.counters.num_cache_hits, kept.engine.counters.num_cache_hits) == (0, 1)


def test_a_swap_that_forgets_nothing_is_noticed():
    served = Served(forgets=False)
    new = begin(served)
    served.swap()
    served.ask(3, new)
    (_, answer), *_ = served.engine.flush()
    assert isinstance(answer, Draft)
    assert answer.token_ids == drafted(PROMPT + new, 0), "an old draft under the new weights"
    served = Served(0, forgets=False)
    new = begin(served)
    served.swap()
    served.ask(3, new)
    with pytest.raises(AssertionError, match="KV of"):
        served.answers()


@pytest.mark.parametrize("max_nodes", [0, 6])
def test_a_draft_in_the_making_begins_again(max_nodes: int):
    served = Served(0, budget=4)
    served.engine.handle("v", Open(request_id="r", sampling=GREEDY, token_ids=PROMPT * 3))
    served.ask(9, max_nodes=max_nodes)
    for _ in range(2):
        assert served.engine.step() == []
    served.swap()
    (answer,) = served.answers()
    chain = drafted(PROMPT * 3, 1)
    assert answer.token_ids[:1] == chain[:1]
    assert max_nodes or answer.token_ids == chain


@pytest.mark.parametrize("seed", range(8))
def test_no_draft_mixes_weights_whenever_they_are_swapped(seed: int):
    """The runner asserts it of every forward."""
    random, served = Random(seed), Served(4, budget=16)
    texts: dict[str, list[int]] = {}
    for round_id in range(150):
        name = random.choice("abc")
        match random.randrange(8):
            case 0:
                served.swap()
            case 1 if name in texts:
                served.engine.handle("v", Close(request_id=name))
                del texts[name]
            case 2 | 3:
                served.engine.run_ahead()
            case 4:
                served.engine.step()
            case _:
                if name not in texts or len(texts[name]) > 40:
                    texts[name] = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 9))]
                    served.engine.handle("v", Open(request_id=name, sampling=GREEDY, token_ids=tuple(texts[name])))
                text = texts[name]
                right = drafted(tuple(text), served.runner.version, random.randint(0, 4))
                fields = {"request_id": name, "round_id": round_id, "max_nodes": random.choice((0, 0, 6))}
                served.ask(len(text), right, **fields)
                text += right
        served.engine.check_integrity()
