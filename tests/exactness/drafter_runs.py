"""Run the cells of the matrix on two targets: the embedded one for tokens, a tiny one of known laws for the law."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from exactness.drafter_cells import DRAFT_LENGTH, NUM_TREE_NODES, Bench, Cell, Checkpoints
from exactness.drafter_checkpoints import perturbed_draft_model, renumbered_draft_model
from exactness.small_engines import Generated
from outrider.drafter_service import embedded
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.messages.draft import DraftClient
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    GenerationRequest,
    SamplingParams,
    SpeculationPlan,
    VerificationMode,
)
from tiny.markov_target import VOCAB_SIZE, count_transitions, make_target, transition_p_value
from tiny.models import full_logits

ALPHA = 1e-5
NUM_NEW_TOKENS = 24
MAX_PROMPT_TOKENS = 64
NUM_LAW_REQUESTS = 250
NUM_TOKENS_PER_LAW_REQUEST = 48
NUM_LAW_TOKENS = NUM_LAW_REQUESTS * NUM_TOKENS_PER_LAW_REQUEST
EQUAL_MODES = (VerificationMode.GREEDY, VerificationMode.COUPLED)
LAW_PROMPT = (0, 1, 2, 3, 4, 0, 1)
SAMPLINGS: dict[VerificationMode, dict[str, Any]] = {
    VerificationMode.GREEDY: {"temperature": 0.0},
    VerificationMode.COUPLED: {"temperature": 0.8, "seed": 5},
    VerificationMode.REJECTION: {"temperature": 0.8},
}


@dataclass(slots=True)
class Run:
    """What one cell gave."""

    token_ids: dict[str, list[int]]
    num_draft_tokens: int
    num_accepted_tokens: int
    num_drafts: int
    counts: np.ndarray = field(default_factory=lambda: np.zeros((VOCAB_SIZE,) * 3))
    p_value: float = 0.0

    @classmethod
    def of(cls, generated: Generated) -> Run:
        last = [outputs[-1].speculation for outputs in generated.outputs.values()]
        num_drafts = sum(metrics.num_drafts for metrics in last)
        return cls(generated.token_ids, generated.num_draft_tokens, generated.num_accepted_tokens, num_drafts)

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted_tokens / self.num_draft_tokens

    @property
    def mean_draft_size(self) -> float:
        return self.num_draft_tokens / self.num_drafts

    def tokens(self, mode: VerificationMode) -> dict[str, list[int]]:
        return {name: tokens for name, tokens in self.token_ids.items() if name.startswith(mode.value)}


def request(name: str, prompt: Sequence[int], max_tokens: int, *, length: int, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling),
        plan=SpeculationPlan(draft_length=length),
    )


class EmbeddedRuns:
    """The embedded target with its own draft model, its trained heads where they are, else random ones."""

    def __init__(self, bench: Bench, root: Path) -> None:
        self._bench = bench
        shipped = embedded.drafter_paths()
        self.checkpoints = Checkpoints(
            root=root,
            target=embedded.target_path(),
            draft=embedded.draft_path(),
            renumbered=embedded.draft_path(),
            options={"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 25},
            trained={method: path for method, path in shipped.items() if (path / "config.json").is_file()},
        )
        tokenizer = AutoTokenizer.from_pretrained(embedded.target_path())
        prompts = [tokenizer.encode(prompt)[:MAX_PROMPT_TOKENS] for prompt in embedded.held_out_prompts()[:2]]
        self._prompts: list[list[int]] = prompts
        self._runs: dict[Cell, Run] = {}
        self.plain = Run.of(bench.run(self.checkpoints.plain_config(), self._requests("", length=0)))

    def _requests(self, cell: str, *, length: int = DRAFT_LENGTH) -> list[GenerationRequest]:
        """Greedy, seeded and unseeded requests of every prompt; a cell's are not another's sessions."""
        return [
            request(f"{mode.value}/{index}/{cell}", prompt, NUM_NEW_TOKENS, length=length, **sampling)
            for index, prompt in enumerate(self._prompts)
            for mode, sampling in SAMPLINGS.items()
        ]

    def run(self, cell: Cell) -> Run:
        """Run a cell, once; drafters in a pool have a process of their own."""
        if cell not in self._runs:
            config = self.checkpoints.config_of(cell)
            generated = self._bench.run(config, self._requests(cell.shape), self._bench.process)
            run = Run.of(generated)
            run.token_ids = {name.removesuffix(cell.shape): tokens for name, tokens in run.token_ids.items()}
            self._runs[cell] = run
        return self._runs[cell]


class MarkovRuns:
    """The tiny target of known laws, with a perturbed copy as draft model and random heads."""

    def __init__(self, bench: Bench, root: Path) -> None:
        self._bench = bench
        self.target = make_target(root / "target")
        draft = perturbed_draft_model(root, self.target.folder)
        self.checkpoints = Checkpoints(
            root=root,
            target=self.target.folder,
            draft=draft,
            renumbered=renumbered_draft_model(root, draft),
            options={"max_num_seqs": 512, "kv_cache_memory_bytes": 1 << 24, "block_size": 4},
        )
        self._runs: dict[tuple[Cell, AcceptanceRule], Run] = {}
        self.plain = self._counted(bench.run(self.checkpoints.plain_config(), law_requests(length=0)))

    def run(self, cell: Cell, acceptance: AcceptanceRule = AcceptanceRule.STANDARD) -> Run:
        """Run a cell, once; drafters in a pool are reached through encoded frames."""
        if (cell, acceptance) not in self._runs:
            requests = law_requests(acceptance=acceptance)
            generated = self._bench.run(self.checkpoints.config_of(cell), requests, self._bench.framed)
            self._runs[cell, acceptance] = self._counted(generated)
        return self._runs[cell, acceptance]

    def tree_engine(self, client: DraftClient) -> VerifierEngine:
        """Build an engine that takes trees from whatever drafts."""
        spec = replace(self.checkpoints.plain_config().verifier_spec, max_tree_nodes=NUM_TREE_NODES)
        return self._bench.verifier(spec, client)

    def _counted(self, generated: Generated) -> Run:
        run = Run.of(generated)
        run.counts = count_transitions(LAW_PROMPT, run.tokens(VerificationMode.REJECTION).values())
        run.p_value = transition_p_value(run.counts, self.target.laws)
        return run

    def require_two_tokens_of_context(self) -> None:
        """Raise `AssertionError` where what came earlier changes a law."""
        for pair in ((0, 3), (4, 1), (2, 2)):
            for before in ((1,), (4, 0, 3, 3)):
                law = full_logits(self.target.model, [*before, *pair])[-1].softmax(dim=-1)
                expected = torch.tensor(self.target.laws[pair]).float()
                assert torch.allclose(law, expected, atol=1e-5)


def law_requests(
    *,
    length: int = DRAFT_LENGTH,
    acceptance: AcceptanceRule = AcceptanceRule.STANDARD,
    num_requests: int = NUM_LAW_REQUESTS,
) -> list[GenerationRequest]:
    """Unseeded requests at temperature 1 for the law, and a few greedy and seeded ones among them."""
    drawn = [
        request(
            f"{VerificationMode.REJECTION.value}/{index}",
            LAW_PROMPT,
            NUM_TOKENS_PER_LAW_REQUEST,
            length=length,
            acceptance=acceptance,
        )
        for index in range(num_requests)
    ]
    others = [
        request(f"{mode.value}/{index}", LAW_PROMPT[:-index], NUM_TOKENS_PER_LAW_REQUEST, length=length, **sampling)
        for index in (1, 2, 3)
        for mode, sampling in (
            (VerificationMode.GREEDY, {"temperature": 0.0}),
            (VerificationMode.COUPLED, {"temperature": 1.0, "seed": index}),
        )
    ]
    return drawn + others
