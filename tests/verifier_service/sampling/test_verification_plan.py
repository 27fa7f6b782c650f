"""A whole step: the references' tokens, one copy back, and nothing that would wait before it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from exactness.references import verify_step
from outrider.verifier_service.messages.draft import DRAFT_PROB_SCALE, ROOT, Draft, SparseRow
from outrider.verifier_service.messages.draft_checks import check_draft
from outrider.verifier_service.messages.request import AcceptanceRule, SamplingParams, VerificationMode
from outrider.verifier_service.messages.tree import VerifiedTokens
from outrider.verifier_service.sampling import coupled_sampler
from outrider.verifier_service.sampling.coupled_sampler import gumbel_noise
from outrider.verifier_service.sampling.entries import VerificationEntry
from outrider.verifier_service.sampling.logits_processors import LogitEdits
from outrider.verifier_service.sampling.sampler import NUCLEUS_CANDIDATES, LawShapes
from outrider.verifier_service.sampling.verification import (
    DoneVerification,
    PendingVerification,
    begin,
    draw_uniforms,
)
from outrider.verifier_service.sampling.verification_plan import VerificationPlan
from tiny.played_graphs import HostReads, NotCapturable, PlayedCapture, num_launches, without_host

VOCAB_SIZE = 6
CPU = torch.device("cpu")
MODES = {
    VerificationMode.GREEDY: SamplingParams(temperature=0.0),
    VerificationMode.COUPLED: SamplingParams(seed=5),
    VerificationMode.REJECTION: SamplingParams(),
}


def random_row(rng: random.Random) -> SparseRow:
    """A law over some tokens, padding among them."""
    ids = rng.sample(range(VOCAB_SIZE + 2), rng.randint(3, 6))
    shares = np.random.default_rng(rng.randrange(1 << 30)).dirichlet([1.0] * len(ids))
    weights = np.maximum(1, (shares * DRAFT_PROB_SCALE).astype(int))
    weights[weights.argmax()] += DRAFT_PROB_SCALE - weights.sum()
    return SparseRow(token_ids=tuple(ids), weights=tuple(weights.tolist()))


def random_draft(rng: random.Random, *, may_be_sampled: bool) -> Draft | None:
    """A chain or a tree of point masses or of tokens that were drawn; or none."""
    if rng.random() < 0.15:
        return None
    is_tree = rng.random() < 0.6
    rows: dict[int, SparseRow] = {}
    nodes: list[tuple[int, int]] = []
    for index in range(rng.randint(0, 7)):
        parent = rng.randrange(ROOT, index) if is_tree else index - 1
        row = rows.setdefault(parent, random_row(rng))
        left = [token_id for token_id in row.token_ids if (parent, token_id) not in nodes]
        if not left:
            break
        nodes.append((parent, rng.choice(left)))
    parents = tuple(parent for parent, _ in nodes)
    is_sampled = may_be_sampled and rng.random() < 0.6
    draft = Draft(
        request_id="r",
        round_id=1,
        position=3,
        token_ids=tuple(token_id for _, token_id in nodes),
        parents=parents if is_tree else None,
        draft_probs=tuple(rows[parent] for parent in dict.fromkeys(parents)) if is_sampled else None,
    )
    assert check_draft(draft, draft_vocab_size=VOCAB_SIZE + 2, max_length=7, max_nodes=7) is None
    return draft


def random_sampling(rng: random.Random) -> SamplingParams:
    mode = rng.choice([*VerificationMode, VerificationMode.REJECTION])
    if mode is VerificationMode.GREEDY:
        return SamplingParams(temperature=0.0, acceptance=rng.choice(list(AcceptanceRule)))
    return SamplingParams(
        temperature=rng.choice([0.5, 1.0, 2.0]),
        top_k=rng.choice([0, 0, 3]),
        top_p=rng.choice([1.0, 0.8]),
        min_p=rng.choice([0.0, 0.1]),
        seed=rng.randrange(100) if mode is VerificationMode.COUPLED else None,
        acceptance=rng.choice(list(AcceptanceRule)),
    )


def random_edits(rng: random.Random, num_rows: int) -> LogitEdits:
    """Biases that may bar all that a mask allows."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    barred = numbers.random((num_rows, 4)) < 0.4
    return LogitEdits(
        token_ids=np.array(rng.sample(range(VOCAB_SIZE), 4), dtype=np.int64),
        biases=np.where(barred, -np.inf, numbers.normal(size=(num_rows, 4))).astype(np.float32),
        divisors=np.full((num_rows, 4), 1.3, np.float32),
        penalties=np.full((num_rows, 4), 0.2, np.float32),
        allowed=np.full((num_rows, 1), rng.choice([0b000011, 0b111111, 0b010000]), np.uint8),
    )


def random_step(rng: random.Random) -> list[VerificationEntry]:
    entries = []
    for _ in range(rng.randint(1, 8)):
        sampling = random_sampling(rng)
        draft = random_draft(rng, may_be_sampled=sampling.mode is VerificationMode.REJECTION)
        num_rows = 1 if draft is None else len(draft.token_ids) + 1
        edits = random_edits(rng, num_rows) if rng.random() < 0.2 else None
        entries.append(VerificationEntry(sampling=sampling, draft=draft, position=5, edits=edits))
    return entries


def random_logits(entries: Sequence[VerificationEntry], seed: int, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    num_rows = sum(entry.num_rows for entry in entries)
    return 1.5 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_step_commits_the_references_tokens() -> None:
    """All modes, rules and kinds of draft side by side, with the same random numbers."""
    rng = random.Random(0)
    lengths: dict[tuple[VerificationMode, AcceptanceRule, bool], set[int]] = {}
    for seed in range(400):
        entries = random_step(rng)
        logits = random_logits(entries, seed)
        kept = logits.clone()
        expected = verify_step(logits, entries, generator(seed))
        assert begin(logits, entries, generator(seed)).collect() == expected
        assert torch.equal(logits, kept)
        for entry, tokens in zip(entries, expected, strict=True):
            kind = (entry.sampling.mode, entry.rule, entry.draft is not None and entry.draft.parents is not None)
            lengths.setdefault(kind, set()).add(len(tokens.path))
    assert len(lengths) == 3 * (3 + 2)  # no tree is judged by blocks
    assert all({0, 1} <= found for found in lengths.values()), lengths


def test_the_short_cut_of_greedy_steps_commits_what_the_plan_commits() -> None:
    rng = random.Random(8)
    lengths = set()
    for seed in range(100):
        entries = [
            VerificationEntry(
                sampling=MODES[VerificationMode.GREEDY], draft=random_draft(rng, may_be_sampled=False), position=5
            )
            for _ in range(rng.randint(1, 8))
        ]
        logits = random_logits(entries, seed)
        done = begin(logits, entries, generator(seed))
        assert isinstance(done, DoneVerification)
        pending = PendingVerification(logits, entries, np.zeros(len(logits)))
        committed = pending.collect()
        assert done.collect() == committed == verify_step(logits, entries, generator(seed))
        for verification in (done, pending):
            chosen = verification.chosen.numbers[list(verification.chosen.places)].tolist()
            assert chosen == [tokens.token_ids[-1] for tokens in committed]
        lengths |= {len(tokens.path) for tokens in committed}
    assert lengths >= {0, 1, 2}


def test_a_generator_ends_where_the_references_does() -> None:
    entries = random_step(random.Random(1))
    logits, ours, theirs = random_logits(entries, 1), generator(1), generator(1)
    begin(logits, entries, ours).collect()
    verify_step(logits, entries, theirs)
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("mode", [*VerificationMode, None])
def test_a_plan_plays_as_one_captured_step(mode: VerificationMode | None) -> None:
    """It neither reads nor uploads nor has a shape that depends on a value: other logits give the same operators."""
    rng = random.Random(2)
    drawn = [entry for _ in range(10) for entry in random_step(rng)]
    entries = [entry for entry in drawn if mode is None or entry.sampling.mode is mode]
    plan = VerificationPlan(entries, draw_uniforms(entries, generator(0)), VOCAB_SIZE, CPU)
    logits, said = random_logits(entries, 0), []

    def step() -> None:
        said[:] = [plan.judge(logits)]

    replay = PlayedCapture()(step)
    first = said[0].clone()
    logits.copy_(random_logits(entries, 1))
    replay()
    assert not torch.equal(said[0], first)
    with pytest.raises(NotCapturable):  # the references could not be played
        without_host(lambda: verify_step(logits, entries, generator(0)))


@pytest.mark.parametrize("mode", [*VerificationMode, None])
def test_one_copy_comes_back(mode: VerificationMode | None) -> None:
    rng = random.Random(3)
    drawn = [entry for _ in range(10) for entry in random_step(rng)]
    entries = [entry for entry in drawn if mode is None or entry.sampling.mode is mode]
    logits = random_logits(entries, 0)
    pending = PendingVerification(logits, entries, draw_uniforms(entries, generator(0)))
    with HostReads() as reads:
        pending.collect()
    assert reads.names == ["tolist"]


def flat_entries(mode: VerificationMode) -> list[VerificationEntry]:
    """Rows that are too flat for a nucleus of few tokens, and rows that are not, which top_k's row stands beside."""
    seed = 3 if mode is VerificationMode.COUPLED else None
    shapes = [
        SamplingParams(temperature=0.1, top_p=0.5, seed=seed),
        SamplingParams(temperature=8.0, top_p=0.95, seed=seed),
        SamplingParams(top_k=3, seed=seed),
        SamplingParams(seed=seed),
    ]
    draft = Draft(request_id="r", round_id=1, position=3, token_ids=(1, 2))
    return [VerificationEntry(sampling=shape, draft=draft, position=5) for shape in shapes]


@pytest.mark.parametrize("mode", [VerificationMode.COUPLED, VerificationMode.REJECTION])
def test_a_nucleus_that_outgrows_its_candidates_is_judged_again(mode: VerificationMode) -> None:
    entries = [VerificationEntry(sampling=MODES[VerificationMode.GREEDY], draft=None, position=3), *flat_entries(mode)]
    logits = random_logits(entries, 0, 3 * NUCLEUS_CANDIDATES)
    pending = begin(logits, entries, generator(4))
    with HostReads() as reads:
        verified = pending.collect()
    assert reads.names.count("tolist") == 2
    assert verified == verify_step(logits, entries, generator(4))
    assert pending.corrected <= {2}
    samplings = [entry.sampling for entry in entries[1:] for _ in range(entry.num_rows)]
    _, is_right = LawShapes.of(samplings, logits.shape[1], CPU).probs(logits[1:])
    assert is_right is not None
    assert is_right.tolist() == [True] * 3 + [False] * 3 + [True] * 6
    _, is_right = LawShapes.of(samplings, logits.shape[1], CPU, ranks_all=True).probs(logits[1:])
    assert is_right is None


def test_an_unfinished_step_can_be_asked_later() -> None:
    """What the host does meanwhile changes nothing."""
    entries = random_step(random.Random(6))
    logits, rng = random_logits(entries, 6), generator(6)
    pending = begin(logits, entries, rng)
    torch.rand(100, generator=rng)
    expected: list[VerifiedTokens] = verify_step(logits, entries, generator(6))
    assert pending.collect() == expected


def test_a_devices_chunks_give_the_same_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = torch.tensor([3, 9, 11])
    expected = gumbel_noise(5, 0, positions, 40_000, "cpu")
    monkeypatch.setattr(coupled_sampler, "chunk_elements", lambda device: coupled_sampler.DEVICE_CHUNK_ELEMENTS)
    assert torch.equal(gumbel_noise(5, 0, positions, 40_000, "cpu"), expected)


CHAIN = Draft(request_id="r", round_id=1, position=3, token_ids=(1, 2, 3, 4))


@pytest.mark.parametrize(
    ("sampling", "draft", "most"),
    [
        (SamplingParams(temperature=0.0), CHAIN, 20),
        (SamplingParams(), CHAIN, 85),
        (SamplingParams(acceptance=AcceptanceRule.BLOCK), CHAIN, 150),
        (SamplingParams(), replace(CHAIN, parents=(ROOT, ROOT, ROOT, 0)), 150),
        (SamplingParams(temperature=0.0), None, 5),
        (SamplingParams(), None, 20),
    ],
    ids=["greedy", "chain", "blocks", "tree of three siblings", "greedy, no drafts", "sampled, no drafts"],
)
def test_a_step_takes_few_launches(sampling: SamplingParams, draft: Draft | None, most: int) -> None:
    """However many requests it has; docs/gpu.md has these bounds."""
    counts = set()
    for num_requests in (1, 4, 64):
        entry = VerificationEntry(sampling=sampling, draft=draft, position=3)
        entries = [entry] * num_requests
        plan = VerificationPlan(entries, draw_uniforms(entries, generator(0)), VOCAB_SIZE, CPU)
        logits = random_logits(entries, 0)
        counts.add(num_launches(lambda plan=plan, logits=logits: plan.judge(logits)))
    assert len(counts) == 1
    assert counts.pop() <= most


@pytest.mark.gpu
def test_a_gpu_judges_without_waiting_and_commits_the_references_tokens() -> None:
    """Laws of a GPU differ from a CPU's in the last bits, which no number of these steps is near."""
    rng = random.Random(7)
    for seed in range(50):
        entries = random_step(rng)
        logits = random_logits(entries, seed)
        on_gpu = logits.cuda()
        begin(on_gpu, entries, generator(seed)).collect()  # tables that are made once
        torch.cuda.set_sync_debug_mode("error")
        try:
            pending = begin(on_gpu, entries, generator(seed))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert pending.collect() == verify_step(logits, entries, generator(seed))
