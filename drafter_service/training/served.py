"""Mean acceptance length of a drafter as it is served: the target's greedy text, drafted round by round.

Greedy verification commits the target's continuation with any drafter. So the continuation and its states are computed
once, and rounds are replayed over it. A model that drafts for itself is served instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.drafter_service.engine.drafter import GREEDY, Ask, Drafter, SessionKey
from outrider.drafter_service.service.colocated import open_local_drafter
from outrider.drafter_service.service.drafter_spec import DrafterSpec
from outrider.drafter_service.service.drafters import build_drafter
from outrider.drafter_service.service.speculative_config import Location, SpeculativeConfig
from outrider.drafter_service.service.speculative_config import Method as ServedMethod
from outrider.drafter_service.training.teacher import Teacher
from outrider.verifier_service.engine.factory import build_engine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.messages.draft import LOCAL_DRAFTER_ID
from outrider.verifier_service.messages.request import GenerationRequest, SamplingParams, SpeculationPlan
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup

MAX_NUM_TOKENS = 512  # of one step of the drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Counts of the verifications of some continuations."""

    num_rounds: int
    num_committed: int

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per verification, the bonus token included."""
        return self.num_committed / self.num_rounds

    def to_json(self) -> dict[str, object]:
        return asdict(self) | {"mean_acceptance_length": self.mean_acceptance_length}


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and the target's continuation."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int


def continue_greedily(
    teacher: Teacher, prompts: Iterable[Sequence[int]], *, num_new_tokens: int
) -> tuple[Continuation, ...]:
    """Return the target's greedy continuation of every prompt, which no drafter changes."""
    return tuple(Continuation(tuple(_continuation(teacher, prompt, num_new_tokens)), len(prompt)) for prompt in prompts)


def play_greedily(
    teacher: Teacher, drafter: Drafter, continuations: Iterable[Continuation], *, draft_length: int
) -> Rounds:
    """Draft the target's continuations in chains; the last round may be cut."""
    tapped = teacher.tapping(drafter.needs.taps)
    num_rounds = num_committed = 0
    for index, continuation in enumerate(continuations):
        key = SessionKey("verifier", f"prompt-{index}")
        tokens = list(continuation.token_ids)
        states = tapped.lesson(torch.tensor([tokens])).states[0]  # [num_tokens, width]
        position = continuation.num_prompt_tokens
        num_committed += len(tokens) - position
        while position < len(tokens):
            chain = _draft(drafter, key, num_rounds, tokens[:position], states, draft_length)
            position += _num_common(chain, tokens[position:]) + 1
            num_rounds += 1
        drafter.release(key)
    return Rounds(num_rounds=num_rounds, num_committed=num_committed)


def served_drafter(method: str, folder: Path, target: Path) -> Drafter:
    """Load a trained drafter, as served."""
    model = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=256)
    spec = DrafterSpec(
        model=model,
        target=ModelConfig(path=str(target), device="cpu"),
        speculative=SpeculativeConfig(method=ServedMethod(method.replace("-", "_")), location=Location.VERIFIER),
        sampling_seed=0,
    )
    runner = ParallelRunner(ModelRunner(model, TensorParallelGroup.single())) if spec.loads_model else None
    return build_drafter(spec, runner=runner)


def serve_greedily(folder: Path, prompts: Sequence[Sequence[int]], *, num_new_tokens: int, draft_length: int) -> Rounds:
    """Serve prompts with a taught model, past end-of-text tokens: a round is one forward."""
    model = ModelConfig(path=str(folder), device="cpu", num_kv_blocks=256)
    speculative = SpeculativeConfig(
        method=ServedMethod.TIDAR, location=Location.VERIFIER, num_speculative_tokens=draft_length
    )
    runner = ParallelRunner(ModelRunner(model, TensorParallelGroup.single()))
    client, show = open_local_drafter(DrafterSpec(model=None, target=model, speculative=speculative), runner, None)
    engine = build_engine(runner, VerifierSpec(model=model), client, has_grammars=False)
    show(engine)
    num_rounds = num_committed = 0
    for index, prompt in enumerate(prompts):  # one at a time: their contexts may fill the cache
        request = GenerationRequest(
            request_id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True),
            plan=SpeculationPlan(drafter_id=LOCAL_DRAFTER_ID, draft_length=draft_length),
        )
        failure = engine.add(request)
        assert failure is None, failure
        while engine.has_work():
            outputs = engine.step() or []
            num_rounds += len(outputs)
            num_committed += sum(len(output.token_ids) for output in outputs)
    return Rounds(num_rounds=num_rounds, num_committed=num_committed)


@torch.no_grad()
def _continuation(teacher: Teacher, prompt: Sequence[int], num_new_tokens: int) -> list[int]:
    """Return the prompt and the target's greedy continuation, past end-of-text tokens."""
    fresh, cache, tokens = torch.tensor([list(prompt)], device=teacher.device), None, list(prompt)
    for _ in range(num_new_tokens):
        output = teacher.model(input_ids=fresh, past_key_values=cache, use_cache=True)
        fresh, cache = output.logits[:, -1:].argmax(-1), output.past_key_values  # [1, 1]
        tokens.append(int(fresh))
    return tokens


def _draft(
    drafter: Drafter, key: SessionKey, ask_id: int, tokens: list[int], states: Tensor, length: int
) -> tuple[int, ...]:
    num_states = len(tokens) - 1
    known = states[num_states - 1 : num_states] if drafter.needs.last_state_only else states[:num_states]
    ask = Ask(
        key=key,
        ask_id=ask_id,
        token_ids=tokens,
        sampling=GREEDY,
        length=length,
        states=known if drafter.needs.taps else None,
    )
    while not (results := drafter.draft([ask], max_num_tokens=MAX_NUM_TOKENS)):
        pass
    return results[0].token_ids


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))
