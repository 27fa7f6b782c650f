"""Which parts of a loaded model give a row other bits in other company: with other rows beside it in the step.

Where there are none, a token that is decoded, verified as a draft, or computed behind a cached prefix has the same
logits, so that tokens are the same with drafts and without, alone and among others ("batch invariance": He et al.,
2025, Defeating Nondeterminism in LLM Inference). docs/results/exact.md has the table by processor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.verifier_service.cpu.kernels import load_kernels
from outrider.verifier_service.model.decoder import Decoder, Experts, OffloadedExperts
from outrider.verifier_service.model.packed_linear import Int8Linear, PackedLinear, PlainLinear

if TYPE_CHECKING:
    from outrider.verifier_service.model.runner import PackedModel

MAX_ORDERLESS_RANKS = 2  # a + b = b + a; of three, a ring adds each part of a row in another order


def batch_dependent(model: PackedModel, num_ranks: int = 1) -> tuple[str, ...]:
    """Return the parts of a model, as an operator may read them, whose numbers may depend on the batch; none: ()."""
    if model.device.type != "cpu":
        return ("products on a GPU",)
    kinds = {type(module) for module in model.modules()} if isinstance(model, Decoder) else set()
    found = {
        "torch's operators": load_kernels(model.dtype) is None,
        "the transformers library's layers": not isinstance(model, Decoder),
        "linear layers by oneDNN": PackedLinear in kinds or PlainLinear in kinds or Int8Linear in kinds,
        "experts": Experts in kinds or OffloadedExperts in kinds,
        f"sums over {num_ranks} ranks": num_ranks > MAX_ORDERLESS_RANKS,
    }
    return tuple(part for part, is_there in found.items() if is_there)
