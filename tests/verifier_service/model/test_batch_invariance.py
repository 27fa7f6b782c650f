"""What a loaded model says of its own dependence on a batch; that it is so is tests/exactness' to show."""

from __future__ import annotations

import pytest
import torch

from outrider.verifier_service.cpu import kernels
from outrider.verifier_service.model.batch_invariance import batch_dependent
from outrider.verifier_service.model.library_model import LibraryModel
from outrider.verifier_service.model.packed_linear import PlainLinear
from tiny.models import decoder_of, make_model

SHARDED = "sums over 3 ranks"


@pytest.fixture
def _with_kernels():
    if kernels.load_kernels(torch.float32) is None:
        pytest.skip("needs a C++ compiler (g++ or clang++), there is none")


@pytest.mark.usefixtures("_with_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_our_decoder_by_our_kernels_depends_on_no_batch(dtype):
    assert batch_dependent(decoder_of(make_model("llama"), dtype)) == ()
    assert batch_dependent(decoder_of(make_model("llama"), dtype), num_ranks=2) == ()
    assert batch_dependent(decoder_of(make_model("llama"), dtype), num_ranks=3) == (SHARDED,)


@pytest.mark.usefixtures("_with_kernels")
def test_a_single_foreign_layer_is_named():
    model = decoder_of(make_model("llama"))
    model.head = PlainLinear(torch.zeros(8, 8))
    assert batch_dependent(model) == ("linear layers by oneDNN",)
    assert batch_dependent(decoder_of(make_model("mixtral"))) == ()
    library = make_model("llama")
    assert batch_dependent(LibraryModel(library)) == ("the transformers library's layers",)
