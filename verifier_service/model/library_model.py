"""Models that run through the library's code with our attention, because `decoder_spec` does not describe them."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from outrider.verifier_service.formats.checkpoint import TensorSource
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.model.architectures import ARCHITECTURES, UNLISTED, UnsupportedModelError, expert_shape
from outrider.verifier_service.model.attention import AttentionHandler, LayerShape, ShapeRecorder, entered
from outrider.verifier_service.model.config import Quantization
from outrider.verifier_service.model.empty_model import build_empty_model
from outrider.verifier_service.model.latent_attention import keep_latents, read_every_key
from outrider.verifier_service.model.packed_linear import dequantized, pack_linears
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup, plan_shards, shrink, wrap_shards
from outrider.verifier_service.model.weights import load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class LibraryModel:
    """Runs packed batches through a model of the library; has the interface of `Decoder`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.dtype, self.device = model.dtype, model.device
        description = model.config.get_text_config()
        self.hidden_size: int = description.hidden_size
        self.num_layers: int = description.num_hidden_layers

    @property
    @torch.inference_mode()
    def kv_shapes(self) -> dict[int, LayerShape]:
        """Return the KV shape of each layer on this rank, recorded from a forward pass over one token."""
        recorder, first = ShapeRecorder(), torch.zeros(1, dtype=torch.long, device=self.device)
        self(first, first, first, recorder)
        if (found := len(recorder.shapes)) != self.num_layers:
            name = self.model.config.model_type
            raise UnsupportedModelError(f"{name}: {found} of {self.num_layers} layers attend through the KV blocks")
        return recorder.shapes

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        attend: AttentionHandler,
        *,
        num_layers: int | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return float32 logits [num_rows, vocab_size] and the concatenated tapped states [num_tokens, width]."""
        with entered(attend), shortened(self.model, num_layers), tapped(self.model, taps) as taken:
            output = self.model(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
            )
        states = torch.cat([taken[tap] for tap in taps], dim=1) if taps else None
        return output.logits[0].float(), states

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attend: AttentionHandler, *, taps: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the head's input [num_tokens, hidden_size] and the tapped states, for graphs: they end there."""
        with entered(attend), tapped(self.model, taps) as taken:
            output = self._parts[0](input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        states = torch.cat([taken[tap] for tap in taps], dim=1) if taps else None
        return output.last_hidden_state[0], states

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [num_rows, vocab_size] of rows of `hidden`."""
        return self._parts[1](inputs_embeds=rows[None], use_cache=False).logits[0].float()

    @functools.cached_property
    def _parts(self) -> tuple[torch.nn.Module, torch.nn.Module]:
        """The base, which has the layers, and the same model without it: the head and whatever is done around it."""
        layers, _ = decoder_layers(self.model)
        children = self.model.named_children()
        name, base = next((name, part) for name, part in children if any(each is layers for each in part.modules()))
        head = copy.copy(self.model)
        head._modules = {**self.model._modules, name: _Given()}
        return base, head

    @property
    def not_captured(self) -> str | None:
        """Why steps run eagerly on a GPU; None: they can be captured. As `Decoder.not_captured`."""
        description = self.model.config.get_text_config()
        if reason := ARCHITECTURES.get(description.model_type, UNLISTED).uncaptured:
            return reason
        is_looped = self.device.type == "cuda" and self.dtype is torch.float32
        return "float32_experts" if is_looped and expert_shape(description) is not None else None


class _Given(torch.nn.Module):
    """Stands where a causal model calls its base, and gives it the hidden states that its head is to read."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Output:
        return _Output(inputs_embeds)


class _Output:
    """What a base returns: hidden states, and nothing of whatever else is asked for."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state


def load_library_model(
    description: PreTrainedConfig,
    source: TensorSource,
    group: TensorParallelGroup,
    *,
    aliases: Sequence[tuple[str, str]],
    ignored: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Build this rank's part of the library's model and read its weights; call `finish` before serving it."""
    model = build_empty_model(description, dtype=dtype, device=device)
    shards = plan_shards(model, group)
    shrink(model, shards)
    load_weights(model, source, shards=shards, aliases=aliases, ignored=ignored, device=device, dtype=dtype)
    return model


def finish(model: PreTrainedModel, group: TensorParallelGroup, vocab_size: int) -> LibraryModel:
    """Have a loaded model attend through our KV blocks, add the collectives, and pack its linear layers."""
    keep_latents(model)
    read_every_key(model)
    wrap_shards(model, group, vocab_size)
    pack_linears(model, keep=[module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)])
    return LibraryModel(model)


def round_linears(model: PreTrainedModel, quantization: Quantization = "int8") -> None:
    """Round every linear layer's weight to a precision, for FP8 all but the head's; a tied embedding keeps its own."""
    head = model.get_output_embeddings() if quantization == "fp8" else None
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.weight = torch.nn.Parameter(dequantized(module.weight, quantization), requires_grad=False)


def decoder_layers(model: PreTrainedModel) -> tuple[torch.nn.Module, str]:
    """Return the module that holds a causal model's decoder layers, and the attribute's name."""
    num_layers = model.config.get_text_config().num_hidden_layers
    for parent in model.base_model.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ModuleList) and len(child) == num_layers:
                return parent, name
    raise UnsupportedModelError(f"{model.config.model_type}: its decoder layers were not found")


@contextlib.contextmanager
def shortened(model: PreTrainedModel, num_layers: int | None) -> Iterator[None]:
    """Within this context, the model has only its first `num_layers` decoder layers, final norm and head."""
    if num_layers is None:
        yield
        return
    parent, name = decoder_layers(model)
    layers = getattr(parent, name)
    setattr(parent, name, layers[:num_layers])
    try:
        yield
    finally:
        setattr(parent, name, layers)


@contextlib.contextmanager
def tapped(model: PreTrainedModel, taps: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """Record the inputs of these layers [num_tokens, hidden_size], and for `FINAL_TAP` the output of the final norm."""
    taken: dict[int, torch.Tensor] = {}
    if not taps:
        yield taken
        return
    parent, name = decoder_layers(model)
    layers = getattr(parent, name)

    def note(index: int, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        taken[index] = (args[0] if args else kwargs["hidden_states"])[0]

    def note_final(output: Any) -> None:
        taken[FINAL_TAP] = output.last_hidden_state[0]

    with contextlib.ExitStack() as hooks:
        for tap in set(taps) - {FINAL_TAP}:
            hook = layers[tap].register_forward_pre_hook(
                lambda module, args, kwargs, tap=tap: note(tap, args, kwargs), with_kwargs=True
            )
            hooks.callback(hook.remove)
        if FINAL_TAP in taps:
            hook = parent.register_forward_hook(lambda module, args, output: note_final(output))
            hooks.callback(hook.remove)
        yield taken
