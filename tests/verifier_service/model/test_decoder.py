"""The decoder and the library's code, side by side: taps, early exits, and shapes that follow from shapes alone.

That their logits agree over mixed schedules is `test_runner`'s, over several ranks `test_tensor_parallel`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers import PreTrainedModel

from outrider.verifier_service.cpu import kernels as cpu
from outrider.verifier_service.formats.checkpoint import StateDictSource
from outrider.verifier_service.gpu import kernels as gpu
from outrider.verifier_service.gpu.rows import RowKernels
from outrider.verifier_service.messages.batch import ScheduledBatch
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.architectures import UnsupportedModelError
from outrider.verifier_service.model.attention import AttentionContext, AttentionOptions, KVPool
from outrider.verifier_service.model.decoder import Decoder
from outrider.verifier_service.model.decoder_spec import FAMILIES, read_decoder_spec
from outrider.verifier_service.model.decoder_weights import load_decoder
from outrider.verifier_service.model.library_model import LibraryModel, finish, load_library_model
from outrider.verifier_service.model.runner import PackedModel, forward_packed
from outrider.verifier_service.model.start_check import require_equal_logits
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.model.weights import WeightReader
from tiny.models import TINY_ARCHITECTURES, decoder_of, make_model, without_kernels
from tiny.triton_kernels import interpreted

TOKEN_IDS = [5, 9, 200, 17, 3, 3, 44, 128, 7, 90, 11, 250]
BLOCK_SIZE = 4
CPU = torch.device("cpu")


def served(model: PreTrainedModel) -> PackedModel:
    """The way in which the engine runs it; the model itself is left as it is."""
    if model.config.model_type in FAMILIES:
        return decoder_of(model)
    return library_model_of(model)


def library_model_of(model: PreTrainedModel) -> LibraryModel:
    group, source = TensorParallelGroup.single(), StateDictSource(model.state_dict())
    own = load_library_model(model.config, source, group, aliases=(), ignored=(), dtype=torch.float32, device=CPU)
    return finish(own, group, model.config.vocab_size)


def whole_batch(num_layers: int | None = None) -> ScheduledBatch:
    count = len(TOKEN_IDS)
    return ScheduledBatch(
        token_ids=TOKEN_IDS,
        positions=list(range(count)),
        slot_mapping=list(range(count)),
        query_lengths=[count],
        context_lengths=[count],
        block_tables=[list(range(-(-count // BLOCK_SIZE)))],
        logits_indices=list(range(count)),
        num_layers=num_layers,
    )


@torch.inference_mode()
def run(
    model: PackedModel,
    *,
    num_layers: int | None = None,
    taps: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    pool = KVPool(model.kv_shapes, num_blocks=3, block_size=BLOCK_SIZE, dtype=dtype, device=CPU)
    batch = whole_batch(num_layers)
    return forward_packed(model, batch, AttentionContext.of(batch, pool), taps)


@pytest.mark.parametrize("name", sorted(TINY_ARCHITECTURES))
def test_taps_are_the_librarys_hidden_states(name: str) -> None:
    reference = make_model(name, num_hidden_layers=2)
    hidden = reference(input_ids=torch.tensor([TOKEN_IDS]), output_hidden_states=True).hidden_states
    model = served(reference)
    logits, states = run(model, taps=(1, FINAL_TAP, 0))
    assert states is not None
    expected = torch.cat([hidden[1][0], hidden[2][0], hidden[0][0]], dim=1)
    torch.testing.assert_close(states, expected, atol=2e-4, rtol=2e-4)
    plain, nothing = run(model)
    assert nothing is None
    torch.testing.assert_close(plain, logits)


@pytest.mark.parametrize("name", sorted(TINY_ARCHITECTURES))
def test_a_shortened_model_is_the_librarys_with_fewer_layers(name: str) -> None:
    whole = make_model(name)
    layer_types = TINY_ARCHITECTURES[name].get("layer_types")
    short = make_model(name, num_hidden_layers=1, **({"layer_types": layer_types[:1]} if layer_types else {}))
    short.load_state_dict(whole.state_dict(), strict=False)
    expected = short(input_ids=torch.tensor([TOKEN_IDS])).logits[0]
    got, _ = run(served(whole), num_layers=1)
    torch.testing.assert_close(got, expected.float(), atol=2e-4, rtol=2e-4)
    assert not torch.allclose(run(served(whole))[0], got, atol=1e-2)


class EmptyAttention:
    """Attends to nothing: what the operator over the block pool looks like from outside."""

    def attend(self, layer_index: int, query, key, value, options: AttentionOptions) -> torch.Tensor:
        return query.new_empty(*query.shape[:2], value.shape[2])


def fake_step(model: Decoder, mode: FakeTensorMode) -> torch.Tensor:
    """Run a step on tensors without values: whatever depends on one raises."""
    numbers = [mode.from_tensor(torch.zeros(size, dtype=torch.long)) for size in (7, 7, 3)]
    logits, _ = model(*numbers, EmptyAttention(), taps=(0,))
    return logits


@pytest.fixture
def as_on_an_accelerator() -> Iterator[None]:
    """Torch's operators know the shapes of tensors without memory."""
    with without_kernels():
        yield


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_no_shape_depends_on_a_value_and_nothing_is_read_back(name: str) -> None:
    model = decoder_of(make_model(name), torch.bfloat16)  # in float32 grouped products have no shape function
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert fake_step(model, mode).shape == (3, model.spec.vocab_size)


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("reads", [lambda hidden: hidden[0, 0].item(), lambda hidden: hidden.nonzero()])
def test_a_model_that_reads_back_is_found_out(reads) -> None:
    model = decoder_of(make_model())
    model.layers[0].register_forward_hook(lambda module, args, output: reads(output) and None)
    found = (DataDependentOutputException, DynamicOutputShapeException)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(found):
        fake_step(model, mode)


class NotingKernels:
    """Notes which kernels are called."""

    def __init__(self, own: RowKernels) -> None:
        self._own, self.called = own, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self._own, name)


@pytest.fixture
def noting() -> Iterator[NotingKernels]:
    """A CUDA device's kernels, interpreted; a decoder calls them once it is told that its tensors are there."""
    pytest.importorskip("triton", reason="needs the package triton")
    with interpreted("outrider.verifier_service.gpu.rows", "outrider.verifier_service.gpu.row_kernels") as module:
        yield NotingKernels(module.RowKernels())


CALLED = {
    "qwen3": {"rms_norm", "add_and_norm", "norm_and_rotate", "gated", "activations"},
    "olmo2": {"rms_norm", "rotate", "gated", "activations"},  # norms what is added
}


HALF = [(name, dtype) for name in ("qwen3", "gemma2") for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in sorted(FAMILIES)), *HALF])
def test_a_devices_kernels_leave_the_logits_as_they_are(noting, monkeypatch, name: str, dtype: torch.dtype) -> None:
    model = decoder_of(make_model(name), dtype)
    monkeypatch.setattr(cpu, "kernels_of", lambda rows: None)
    expected, states = run(model, taps=(1, FINAL_TAP), dtype=dtype)
    monkeypatch.setattr(gpu, "kernels_of", lambda rows: noting)
    got, own_states = run(model, taps=(1, FINAL_TAP), dtype=dtype)
    assert noting.called >= CALLED.get(name, {"rms_norm", "gated"})
    require_equal_logits(name, expected, got, dtype)
    assert states is not None
    assert own_states is not None
    require_equal_logits(name, states.float(), own_states.float(), dtype)


def test_half_precision_norms_with_an_offset_are_computed_in_full() -> None:
    model = make_model("gemma2")
    decoder = decoder_of(model.bfloat16(), torch.bfloat16)
    assert decoder.norm.weight.dtype == torch.float32
    assert torch.equal(decoder.norm.weight, model.model.norm.weight.float() + 1.0)


def test_a_size_that_ranks_cannot_share_is_refused_with_the_architectures_name() -> None:
    model = make_model("llama")
    spec = read_decoder_spec(model.config)
    assert spec is not None
    reader, third = WeightReader(StateDictSource(model.state_dict())), TensorParallelGroup(0, 3, None)
    with pytest.raises(UnsupportedModelError, match=r"^llama: num_attention_heads \(4\) is not divisible by 3$"):
        load_decoder(spec, reader, third, dtype=torch.float32, device=CPU)


def test_a_library_model_tells_the_shapes_that_a_decoder_has_by_its_spec() -> None:
    model = make_model("qwen3")
    assert library_model_of(model).kv_shapes == decoder_of(model).kv_shapes
