from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel, Qwen3Config

from exactness.small_engines import Generated, generate
from outrider.drafter_service.engine.drafter import Ask, DraftEngineConfig, SessionKey
from outrider.drafter_service.engine.engine import DraftEngine
from outrider.drafter_service.engine.paged_drafter import PagedDrafter
from outrider.drafter_service.heads.dflash import DFlashConfig, DFlashHead
from outrider.drafter_service.models.dflash_drafter import DFlashModel, load_dflash_head
from outrider.drafter_service.service.drafter_spec import DrafterSpec, state_taps
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.local_client import LocalDraftClient
from outrider.drafter_service.service.speculative_config import Method, SpeculativeConfig
from outrider.verifier_service.drafting.coordinator import CoordinatorConfig, DraftCoordinator
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.draft import Draft, DrafterEvent, DraftSampling, VerifierMessage, check_draft
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.sampling.coupled_sampler import coupled_choice, gumbel_noise
from outrider.verifier_service.scheduling.kv_cache import BlockPool
from outrider.verifier_service.scheduling.scheduler import Scheduler, SchedulerConfig
from tiny.dflash import BLOCK_SIZE, MASK_ID, dflash_head, slow_block
from tiny.drafters import one_pass_drafter
from tiny.heads import VOCAB_SIZE, randomised, states_of
from tiny.models import make_checkpoint, make_model, random_sequences
from tiny.verified import target_probs

GREEDY = DraftSampling(temperature=0.0)
SAMPLED = DraftSampling(temperature=2.0)
SEEDED = DraftSampling(temperature=2.0, seed=5, choice_index=1)
PROMPT = [5, 17, 3, 40, 22, 9, 31]
LENGTH = BLOCK_SIZE - 1


def drafter_of(head: DFlashHead, *, num_blocks: int = 64, **options: Any) -> PagedDrafter[Any]:
    model = DFlashModel(head, num_blocks=num_blocks, block_size=4, max_model_len=128)
    return one_pass_drafter(model, torch.Generator().manual_seed(0), **options)


def ask_of(head: DFlashHead, tokens: Sequence[int], name: str = "r", ask_id: int = 1, **fields: Any) -> Ask:
    ask = Ask(
        key=SessionKey("v", name),
        ask_id=ask_id,
        token_ids=list(tokens),
        sampling=GREEDY,
        length=LENGTH,
        states=states_of(tokens, head),
    )
    return replace(ask, **fields)


def run(drafter: PagedDrafter[Any], *asks: Ask, budget: int = 64, max_steps: int = 200) -> list[Draft]:
    """Ask until all is answered, checking the books after every step; return the answers in the order of the asks."""
    waiting, results = list(asks), {}
    for _ in range(max_steps):
        for result in drafter.draft(waiting, max_num_tokens=budget):
            results[result.round_id] = result
        drafter.check_integrity([ask.key for ask in asks])
        waiting = [ask for ask in waiting if ask.ask_id not in results]
        if not waiting:
            return [results[ask.ask_id] for ask in asks]
    raise AssertionError("drafts do not become complete")


def greedy_chain(head: DFlashHead, tokens: Sequence[int], first: int = 0) -> list[int]:
    return slow_block(head, tokens, states_of(tokens, head, first))[1:].argmax(dim=1).tolist()


def prompt_of(length: int, start: int = 3) -> list[int]:
    return [(7 * i + start) % VOCAB_SIZE for i in range(length)]


# --- what is drafted ---


def test_it_asks_for_the_states_its_head_reads() -> None:
    needs = drafter_of(dflash_head()).needs
    assert (needs.taps, needs.last_state_only, needs.predictions) == ((1, 2), False, False)


@pytest.mark.parametrize("budget", [3, 7, 200])
def test_sessions_of_any_length_draft_together_as_alone(budget: int) -> None:
    head = dflash_head()
    prompts = [PROMPT, prompt_of(40), prompt_of(2), prompt_of(90, 11)]
    asks = [ask_of(head, prompt, str(index), index) for index, prompt in enumerate(prompts)]
    for result, prompt in zip(run(drafter_of(head, num_blocks=99), *asks, budget=budget), prompts, strict=True):
        assert list(result.token_ids) == greedy_chain(head, prompt)
        assert (result.draft_probs, result.parents) == (None, None)


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 5])
def test_each_round_adds_the_states_of_what_was_committed(num_accepted: int) -> None:
    head = dflash_head()
    drafter = drafter_of(head)
    (first,) = run(drafter, ask_of(head, PROMPT))
    grown = [*PROMPT, *first.token_ids[:num_accepted], 1]
    with_old_gone = states_of(grown, head)
    with_old_gone[: len(PROMPT) - 1] = 1e6  # what was taken in is not read again
    (second,) = run(drafter, ask_of(head, grown, ask_id=2, states=with_old_gone))
    assert list(second.token_ids) == greedy_chain(head, grown)
    (third,) = run(drafter, ask_of(head, [*PROMPT[:4], 2, 50], ask_id=3))  # another text
    assert list(third.token_ids) == greedy_chain(head, [*PROMPT[:4], 2, 50])


def test_a_context_begins_after_the_states_that_are_gone() -> None:
    head = dflash_head()
    tokens = prompt_of(30)
    drafter = drafter_of(head)
    (result,) = run(drafter, ask_of(head, tokens, states=states_of(tokens, head, 20)))
    assert list(result.token_ids) == greedy_chain(head, tokens, 20)
    assert result.token_ids != tuple(greedy_chain(head, tokens)), "or the gap could not show"
    (result,) = run(drafter, ask_of(head, [*tokens, 4], ask_id=2, states=states_of([*tokens, 4], head, 20)))
    assert list(result.token_ids) == greedy_chain(head, [*tokens, 4], 20)


def test_a_gap_that_a_context_would_grow_into_makes_it_begin_anew() -> None:
    head = dflash_head()
    tokens = prompt_of(30)
    drafter = drafter_of(head)
    run(drafter, ask_of(head, tokens[:8]))
    (result,) = run(drafter, ask_of(head, tokens, ask_id=2, states=states_of(tokens, head, 20)))
    assert list(result.token_ids) == greedy_chain(head, tokens, 20)
    (result,) = run(drafter, ask_of(head, tokens[:26], ask_id=3, states=states_of(tokens[:26], head, 4)))
    assert list(result.token_ids) == greedy_chain(head, tokens[:26], 20), "what is cached is used"


@pytest.mark.parametrize("states", [None, torch.zeros(6, 5), torch.full((6, 32), torch.nan), torch.zeros(0, 32)])
def test_without_usable_states_there_are_forced_tokens_alone(states: torch.Tensor | None) -> None:
    head = dflash_head()
    drafter = drafter_of(head)
    (result,) = run(drafter, ask_of(head, PROMPT, states=states))
    assert result.token_ids == ()
    (result,) = run(drafter, ask_of(head, PROMPT, ask_id=2, states=states, forced_ids=(8, 9)))
    assert result.token_ids == (8, 9)


def test_an_anchor_that_is_sampled_from_gives_one_token_more() -> None:
    head = dflash_head(sample_from_anchor=True)
    (result,) = run(drafter_of(head), ask_of(head, PROMPT, length=20))
    assert list(result.token_ids) == slow_block(head, PROMPT, states_of(PROMPT, head)).argmax(dim=1).tolist()
    head = dflash_head()
    (result,) = run(drafter_of(head), ask_of(head, PROMPT, length=20))
    assert len(result.token_ids) == BLOCK_SIZE - 1, "no longer than a block"
    (result,) = run(drafter_of(head), ask_of(head, PROMPT, length=2))
    assert list(result.token_ids) == greedy_chain(head, PROMPT)[:2], "shorter, from the same block"


@pytest.mark.parametrize("is_anchored", [False, True])
def test_forced_tokens_stand_in_the_place_of_masks(is_anchored: bool) -> None:
    head = dflash_head(sample_from_anchor=is_anchored)
    (result,) = run(drafter_of(head), ask_of(head, PROMPT, forced_ids=(8, 9)))
    rows = slow_block(head, PROMPT, states_of(PROMPT, head), (8, 9))
    assert list(result.token_ids) == [8, 9, *rows[2 if is_anchored else 3 :][: LENGTH - 2].argmax(dim=1).tolist()]


def test_only_tokens_of_its_vocabulary_are_drafted() -> None:
    head = dflash_head(num_ids=24)
    (result,) = run(drafter_of(head), ask_of(head, PROMPT))
    assert list(result.token_ids) == greedy_chain(head, PROMPT)
    assert all(token_id < 48 and token_id % 2 == 0 for token_id in result.token_ids)
    (result,) = run(drafter_of(head, vocab_size=10), ask_of(head, PROMPT, sampling=SAMPLED))
    assert result.draft_probs is not None
    assert max(max(row.token_ids) for row in result.draft_probs) < 10


@pytest.mark.parametrize(("sampling", "max_nodes"), [(SAMPLED, 0), (SEEDED, 0), (GREEDY, 12), (SAMPLED, 12)])
def test_drafts_may_be_verified(sampling: DraftSampling, max_nodes: int) -> None:
    head = dflash_head()
    (result,) = run(drafter_of(head), ask_of(head, PROMPT, sampling=sampling, max_nodes=max_nodes))
    draft = Draft(
        request_id="r",
        round_id=1,
        position=len(PROMPT),
        token_ids=result.token_ids,
        draft_probs=result.draft_probs,
        parents=result.parents,
        confidences=result.confidences,
    )
    assert check_draft(draft, draft_vocab_size=VOCAB_SIZE, max_length=LENGTH, max_nodes=max_nodes) is None
    assert len(result.token_ids) == (max_nodes or LENGTH)
    assert (result.draft_probs is not None) == (sampling is SAMPLED and not max_nodes)
    if sampling is SEEDED:
        probs = target_probs(slow_block(head, PROMPT, states_of(PROMPT, head))[1:], [SEEDED] * LENGTH)
        noise = gumbel_noise(5, 1, torch.arange(len(PROMPT), len(PROMPT) + LENGTH), VOCAB_SIZE, "cpu")
        assert list(result.token_ids) == coupled_choice(probs, noise).tolist()


# --- memory ---


def test_a_small_pool_is_shared_and_every_ask_is_answered() -> None:
    head = dflash_head()
    drafter = drafter_of(head, num_blocks=8)  # 32 slots
    prompts = [prompt_of(20, start) for start in range(3)]
    asks = [ask_of(head, prompt, str(index), index) for index, prompt in enumerate(prompts)]
    for result, prompt in zip(run(drafter, *asks, budget=30), prompts, strict=True):
        assert list(result.token_ids) == greedy_chain(head, prompt)
    tight = drafter_of(head, num_blocks=2)
    (result,) = run(tight, ask_of(head, prompt_of(9)))
    assert list(result.token_ids) == greedy_chain(head, prompt_of(9)), "a block takes no slots"
    (result,) = run(tight, ask_of(head, prompt_of(10), ask_id=2))
    assert result.token_ids == ()


# --- loading ---


def write(folder: Path, head: DFlashHead, *, without: Sequence[str] = ()) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        **head.description.to_diff_dict(),
        "model_type": "qwen3",
        "block_size": head.config.block_size,
        "dflash_config": {
            "mask_token_id": head.config.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in head.taps],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in head.state_dict().items() if name not in without}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_loaded_drafter_drafts_as_its_head(tmp_path: Path) -> None:
    head = dflash_head()
    target = tmp_path / "target"
    target.mkdir()
    shared = ("embed_tokens.weight", "lm_head.weight")
    save_file({name: head.state_dict()[name].contiguous() for name in shared}, target / "model.safetensors")
    folder = write(tmp_path / "head", head, without=shared)
    config = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=16, block_size=4, max_model_len=40)
    loaded = load_dflash_head(folder, config, target=target, num_target_layers=4)
    model = DFlashModel.sized_by(loaded, config)
    assert (model.num_blocks, model.block_size, model.max_model_len) == (16, 4, 40)
    (result,) = run(one_pass_drafter(model, torch.Generator()), ask_of(head, PROMPT))
    assert list(result.token_ids) == greedy_chain(head, PROMPT)
    with pytest.raises(ValueError, match=r"'embed_tokens\.weight' is missing"):
        load_dflash_head(folder, config)
    with pytest.raises(ValueError, match="tensor_parallel_size: 2"):
        load_dflash_head(folder, replace(config, tensor_parallel_size=2))


def test_it_is_built_from_a_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", dflash_head(), without=("lm_head.weight",))
    make_checkpoint(tmp_path / "target", vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=3)
    target = ModelConfig(path=str(tmp_path / "target"), device="cpu")
    head = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=16, block_size=4, max_model_len=40)
    spec = DrafterSpec(model=head, target=target, speculative=SpeculativeConfig(method=Method.DFLASH))
    assert state_taps(spec) == build_drafter(spec).needs.taps == (1, 2)
    assert not spec.loads_model
    make_checkpoint(tmp_path / "target", vocab_size=VOCAB_SIZE, hidden_size=16, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"target_layer_ids .* 2 layers"):
        state_taps(spec)


# --- through the engine ---

TARGET_PROMPTS = random_sequences((9, 23, 5))
NUM_NEW_TOKENS = 16


class DFlashDrafts:
    """A DFlash drafter in this process."""

    def __init__(self, head: DFlashHead) -> None:
        config = DraftEngineConfig(max_draft_length=8)
        self.engine = DraftEngine(drafter_of(head, num_blocks=128), clock=lambda: 0.0, config=config)
        self._client = LocalDraftClient(self.engine)

    def send(self, drafter_id: str, messages: Sequence[VerifierMessage]) -> None:
        self._client.send(drafter_id, messages)

    def poll(self) -> list[DrafterEvent]:
        return self._client.poll()

    def check_integrity(self) -> None:
        self.engine.check_integrity()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("target")
    model: PreTrainedModel = make_model("llama")
    model.save_pretrained(folder)
    config = ModelConfig(
        path=str(folder), num_kv_blocks=128, block_size=4, device="cpu", check_logits=False, state_taps=(1,)
    )
    return ModelRunner(config, TensorParallelGroup.single())


@pytest.fixture(scope="module")
def target_head() -> DFlashHead:
    """A drafter of the target's sizes: random, so that it is seldom right."""
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
    layer = Qwen3Config(**sizes, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = DFlashConfig(
        layer=layer,
        taps=(1,),
        draft_vocab_size=256,
        target_hidden_size=64,
        mask_token_id=MASK_ID,
        block_size=BLOCK_SIZE,
    )
    head = DFlashHead(config)
    randomised(head, 3)
    return head


def sampled(index: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **fields)


MODES: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": lambda index: sampled(index, temperature=0.0),
    "seeded": lambda index: sampled(index, temperature=6.0, seed=7 + index),
}


def generated_with(target: ModelRunner, head: DFlashHead, mode: str, draft_length: int) -> Generated:
    requests = [
        GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=MODES[mode](index),
            plan=SpeculationPlan(draft_length=draft_length),
        )
        for index, prompt in enumerate(TARGET_PROMPTS)
    ]
    drafts = DFlashDrafts(head)
    return generate(engine_over(target, drafts), drafts, requests)


def engine_over(target: ModelRunner, drafts: DFlashDrafts) -> VerifierEngine:
    """Make an engine that tells its drafter the target's states."""
    sizes = {"max_model_len": target.max_model_len, "vocab_size": target.vocab_size}
    return VerifierEngine(
        target,
        Scheduler(
            SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=8, **sizes),
            BlockPool(target.num_blocks, target.block_size),
        ),
        DraftCoordinator(drafts, CoordinatorConfig(**sizes), target.states),
        clock=lambda: 0.0,
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_without_drafts(target: ModelRunner, target_head: DFlashHead, mode: str) -> None:
    expected = generated_with(target, target_head, mode, 0)
    generated = generated_with(target, target_head, mode, 5)
    assert generated.token_ids == expected.token_ids
    assert expected.num_draft_tokens == 0
    assert generated.num_draft_tokens > 3 * NUM_NEW_TOKENS, "every round has its states"
