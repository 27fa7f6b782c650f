"""Committed tokens have the target's law with drafters that guess all positions in one pass, rejection sampling.

Three tokens over 8 ids (512 cells, the rare ones pooled) against the exact joint law, by dense forwards of the target;
alpha 1e-4, seeds fixed. The first token has no draft, the others are a draft's first and second. A drafter that reports
rows other than those it drew from is caught by the same comparison. So is the best of several drafts of one pass, where
each is verified as if it were alone (SpecDiff-2's self-selection, arXiv 2511.00606); their tree keeps the law.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3Config

from exactness import law
from exactness.references import verify_by_rejection, verify_tree
from exactness.small_engines import load
from fakes.scripted import random_laws, sparse_row
from outrider.drafter_service.engine.drafter import DraftEngineConfig, Drafter
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.heads.dflash import DFlashConfig, DFlashHead
from outrider.drafter_service.models.dflash_drafter import DFlashModel
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.verifier_service.drafting.coordinator import CoordinatorConfig, DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, DrafterEvent, VerifierMessage
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from tiny.drafters import one_pass_drafter, parallel_drafter
from tiny.heads import randomised
from tiny.models import full_logits, make_model

VOCAB_SIZE, MASK_ID, ALPHA = 8, 7, 1e-4
NUM_DRAWS, NUM_DEFECT_DRAWS = 4000, 1500
PROMPT, TEMPERATURE, DRAFT_LENGTH = (3, 5, 4, 6), 6.0, 3
SIZES = {"vocab_size": VOCAB_SIZE, "eos_token_id": None, "pad_token_id": None, "bos_token_id": None}


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_model("llama", **SIZES)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    config = ModelConfig(
        path=str(folder), num_kv_blocks=512, block_size=4, device="cpu", check_logits=False, state_taps=(1,)
    )
    return ModelRunner(config, TensorParallelGroup.single())


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> np.ndarray:
    """The joint law of the next three tokens: [VOCAB_SIZE] * 3."""
    joint = torch.empty((VOCAB_SIZE,) * 3, dtype=torch.float64)
    for first, second in itertools.product(range(VOCAB_SIZE), repeat=2):
        logits = full_logits(model, [*PROMPT, first, second])[-3:].detach()
        laws = (logits / TEMPERATURE).softmax(dim=1).double()  # [3, VOCAB_SIZE]
        joint[first, second] = laws[0, first] * laws[1, second] * laws[2]
    return joint.numpy()


def masked_drafter(folder: Path) -> Drafter:
    draft_model = load(make_model("llama", seed=1, **SIZES), folder)
    return parallel_drafter(draft_model, torch.Generator().manual_seed(3), mask_token_id=MASK_ID)


def diffusing_drafter(folder: Path) -> Drafter:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 64}
    layer = Qwen3Config(**SIZES, **sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    shape = {"taps": (1,), "draft_vocab_size": VOCAB_SIZE, "target_hidden_size": 64, "block_size": DRAFT_LENGTH + 1}
    head = DFlashHead(DFlashConfig(layer=layer, mask_token_id=MASK_ID, **shape))
    randomised(head, 3)
    model = DFlashModel(head, num_blocks=512, block_size=4, max_model_len=64)
    return one_pass_drafter(model, torch.Generator().manual_seed(3))


class Drafts:
    """A drafter in this process, whose drafts may be altered on their way."""

    def __init__(self, drafter: Drafter, alter: Callable[[Draft], Draft]) -> None:
        config = DraftEngineConfig(max_draft_length=DRAFT_LENGTH, max_num_batched_tokens=2048)
        self._engine, self._alter = DraftEngine(drafter, clock=lambda: 0.0, config=config), alter
        self._client = LocalDraftClient(self._engine)

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self._client.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        return list(map(self._altered, self._client.poll()))

    def _altered(self, event: DrafterEvent) -> DrafterEvent:
        if not isinstance(event.message, Draft):
            return event
        return dataclasses.replace(event, message=self._alter(event.message))


def counts_of(target: ModelRunner, drafts: Drafts, num_draws: int) -> tuple[np.ndarray, int, int]:
    """Return how often any three tokens came, and how many tokens were drafted and accepted."""
    sizes = {"max_model_len": target.max_model_len, "vocab_size": VOCAB_SIZE}
    engine = VerifierEngine(
        target,
        Scheduler(
            SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=100, **sizes), BlockPool(512, target.block_size)
        ),
        DraftCoordinator(drafts, CoordinatorConfig(**sizes), target.states),
        clock=lambda: 0.0,
        generator=torch.Generator().manual_seed(11),
    )
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=DRAFT_LENGTH + 1, ignore_eos=True)
    plan = SpeculationPlan(draft_length=DRAFT_LENGTH)
    tokens: dict[str, list[int]] = {str(index): [] for index in range(num_draws)}
    for name in tokens:
        request = GenerationRequest(request_id=name, prompt_token_ids=PROMPT, sampling=sampling, plan=plan)
        assert engine.add(request) is None
    num_drafted = num_accepted = 0
    while engine.has_work():
        for output in engine.step() or []:
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                num_drafted += output.speculation.num_draft_tokens
                num_accepted += output.speculation.num_accepted_tokens
    counts = np.zeros((VOCAB_SIZE,) * 3)
    np.add.at(counts, tuple(np.array([own[:3] for own in tokens.values()]).T), 1)
    return counts, num_drafted, num_accepted


def claiming_a_shift(draft: Draft) -> Draft:
    """Report each row under the weights of its neighbours, where the drawn token is still in it."""
    if draft.draft_probs is None:
        return draft
    rows = [dataclasses.replace(row, weights=(*row.weights[1:], row.weights[0])) for row in draft.draft_probs]
    return dataclasses.replace(draft, draft_probs=tuple(rows))


@pytest.mark.parametrize("make", [masked_drafter, diffusing_drafter])
def test_committed_tokens_have_the_targets_law(
    target: ModelRunner, expected: np.ndarray, make: Callable[[Path], Drafter], tmp_path: Path
) -> None:
    counts, num_drafted, num_accepted = counts_of(target, Drafts(make(tmp_path), lambda draft: draft), NUM_DRAWS)
    assert counts.sum() == NUM_DRAWS
    assert 0.1 < num_accepted / num_drafted < 0.9
    law.assert_law(counts, expected, ALPHA)


@pytest.mark.parametrize("make", [masked_drafter, diffusing_drafter])
def test_rows_that_were_not_drawn_from_are_detected(
    target: ModelRunner, expected: np.ndarray, make: Callable[[Path], Drafter], tmp_path: Path
) -> None:
    counts, _, _ = counts_of(target, Drafts(make(tmp_path), claiming_a_shift), NUM_DEFECT_DRAWS)
    assert law.rejects_law(counts, expected, ALPHA)


# --- several drafts of one pass ---

NUM_IDS, LAST = 4, 0
LAWS = random_laws(NUM_IDS, seed=5)[2][0]  # of the next token by the last one: [NUM_IDS, NUM_IDS]
# one pass' rows of two positions: the second does not see the first's guess
PASS = [sparse_row(0.5 * LAWS[LAST] + 0.5 / NUM_IDS, NUM_IDS), sparse_row(LAWS.mean(0), NUM_IDS)]
Verify = Callable[[np.random.Generator], list[int]]


def drawn(position: int, rng: np.random.Generator, count: int = 1) -> list[int]:
    row = PASS[position]
    return rng.choice(row.token_ids, size=count, replace=False, p=np.array(row.weights) / DRAFT_PROB_SCALE).tolist()


def laws_after(token_ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(LAWS[[LAST, *token_ids]])


def one_chain(rng: np.random.Generator) -> list[int]:
    """Verify one draft of the pass."""
    token_ids = (*drawn(0, rng), *drawn(1, rng))
    draft = Draft(request_id="r", round_id=0, position=1, token_ids=token_ids, draft_probs=tuple(PASS))
    return verify_by_rejection(laws_after(token_ids), draft, rng.random)


def tree_of_two(rng: np.random.Generator) -> list[int]:
    """Verify two drafts of the pass as a tree: the first tokens are drawn without replacement and tried in order."""
    token_ids = (*drawn(0, rng, 2), *drawn(1, rng), *drawn(1, rng))
    rows = (PASS[0], PASS[1], PASS[1])
    draft = Draft(
        request_id="r", round_id=0, position=1, token_ids=token_ids, draft_probs=rows, parents=(ROOT, ROOT, 0, 1)
    )
    return verify_tree(laws_after(token_ids), draft, rng.random).token_ids


def best_of_two(rng: np.random.Generator) -> list[int]:
    """Mistake: verify two drafts, each as if it were the only one, and keep what came further."""
    return max((one_chain(rng) for _ in range(2)), key=len)


def pair_counts(verify: Verify) -> np.ndarray:
    """Return how often any two tokens came: [NUM_IDS, NUM_IDS]; a second that is missing is the target's."""
    rng = np.random.default_rng(0)
    committed = [verify(rng) for _ in range(NUM_DRAWS)]
    pairs = [own[:2] if len(own) > 1 else [*own, rng.choice(NUM_IDS, p=LAWS[own[0]])] for own in committed]
    return law.joint_counts(pairs, NUM_IDS)


@pytest.mark.parametrize("verify", [one_chain, tree_of_two])
def test_a_draft_of_the_pass_and_a_tree_of_its_drafts_keep_the_law(verify: Verify) -> None:
    law.assert_law(pair_counts(verify), law.joint_law(LAWS[LAST], LAWS, 2), ALPHA)


def test_keeping_the_best_of_several_drafts_by_outcome_is_detected() -> None:
    assert law.rejects_law(pair_counts(best_of_two), law.joint_law(LAWS[LAST], LAWS, 2), ALPHA)
