from collections import Counter

import torch

from exactness.law import rejects_law
from outrider.verifier_service.messages.draft import Draft, DraftSampling
from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.messages.seeds import derive_seed
from outrider.verifier_service.sampling.entries import VerificationEntry
from tiny.drafted import draft_tokens
from tiny.verified import verify

TARGET = torch.tensor([[0.5, 0.3, 0.2]])
DRAFT = torch.tensor([[0.2, 0.3, 0.5]])
NUM_DRAWS = 20_000


def test_roles_and_seeds_have_streams_of_their_own():
    seeds = {derive_seed(seed, role) for seed in range(10) for role in ("verifier", "drafter")}
    assert len(seeds) == 20
    assert derive_seed(3, "verifier") == derive_seed(3, "verifier")
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derive_seed(None, "verifier") != derive_seed(None, "verifier")


def first_tokens(verifier_seed: int, drafter_seed: int) -> torch.Tensor:
    """Draw first tokens with one stream for the target and one for the drafter; return how often each came."""
    judging, drawing = (torch.Generator().manual_seed(seed) for seed in (verifier_seed, drafter_seed))
    counts: Counter[int] = Counter()
    sampling = SamplingParams(temperature=1.0)
    for _ in range(NUM_DRAWS // 100):
        drawn = draft_tokens(
            DRAFT.log().expand(100, 3), [DraftSampling(temperature=1.0)] * 100, [0] * 100, drawing, vocab_size=3
        )
        entries = [
            VerificationEntry(
                sampling=sampling,
                draft=Draft(request_id="r", round_id=1, position=1, token_ids=(token_id,), draft_probs=(row,)),
                position=1,
            )
            for token_id, row in drawn
        ]
        counts.update(tokens.token_ids[0] for tokens in verify(TARGET.log().expand(200, 3), entries, judging))
    return torch.tensor([counts[token_id] for token_id in range(3)])


def test_law_holds_when_both_sides_are_configured_with_one_seed():
    counts = first_tokens(derive_seed(0, "verifier"), derive_seed(0, "drafter"))
    assert not rejects_law(counts.numpy(), TARGET[0].numpy(), alpha=1e-4)
