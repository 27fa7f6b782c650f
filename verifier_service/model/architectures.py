"""Which model architectures the engine serves, and why it refuses the others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.gguf import local_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DESCRIPTION_PATTERNS = ["*.json", "tokenizer*", "*.model", "*.txt"]  # of files that a model hub has
CHECKPOINT_PATTERNS = ["*.safetensors", *DESCRIPTION_PATTERNS]


class UnsupportedModelError(ValueError):
    """A model that the engine would serve wrongly, or not at all; the text names architecture and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one `model_type` is loaded and sliced."""

    tensor_parallel: bool = False  # its plan slices it rightly
    is_tested: bool = True  # False: served if the check at start finds no difference from the library
    aliases: tuple[tuple[str, str], ...] = ()  # (pattern, replacement): the model's tensor names into the checkpoint's


CHECKPOINT_ALIASES = ((r"^(model|transformer|gpt_neox)\.", ""),)  # a checkpoint of the model without its head
_MIXTRAL_NAMES = ((r"\.mlp\.", ".block_sparse_moe."),)
IGNORED_TENSORS = (
    r"rotary_emb\.inv_freq$",  # buffers that old checkpoints carry
    r"\.attn\.(masked_)?bias$",
    r"\.attention\.(masked_)?bias$",
    r"^(model\.)?(vision_tower|multi_modal_projector)\.",  # of a multimodal model whose text part is served
)
_TEXT_PART = ((r"^model\.", "language_model.model."), (r"^model\.", "model.language_model."))

_PLAIN = Architecture()
_UNLISTED = Architecture(is_tested=False)
_SHARDED = Architecture(tensor_parallel=True)

# each one is compared with the library in tests/verifier_service/model/test_runner.py, the sharded ones also in
# test_tensor_parallel.py
ARCHITECTURES: dict[str, Architecture] = {
    "cohere": _PLAIN,
    "gemma": _SHARDED,
    "gemma2": _SHARDED,
    "gemma3_text": Architecture(tensor_parallel=True, aliases=_TEXT_PART),
    "glm4": _PLAIN,
    "gpt2": _PLAIN,
    "gpt_neox": Architecture(tensor_parallel=True, aliases=((r"^lm_head\.", "embed_out."),)),
    "granite": _SHARDED,
    "llama": _SHARDED,
    "ministral": _SHARDED,
    "mistral": _SHARDED,
    "mixtral": Architecture(tensor_parallel=True, aliases=_MIXTRAL_NAMES),
    "olmo": _PLAIN,
    "olmo2": _PLAIN,
    "olmoe": _PLAIN,
    "opt": _PLAIN,
    "phi": _PLAIN,
    "phi3": _PLAIN,
    "qwen2": _SHARDED,
    "qwen2_moe": _PLAIN,
    "qwen3": _SHARDED,
    "qwen3_moe": _SHARDED,
    "smollm3": _SHARDED,
    "stablelm": _PLAIN,
    "starcoder2": _SHARDED,
}

_TEXT_PART_SERVED = ("gemma3",)  # multimodal models of which the language model is served alone

# known to go wrong silently in a packed batch, so that the refusal can say why
_REASONS = {
    "qwen3_next": "its linear attention keeps recurrent state outside of the KV blocks",
    "llama4_text": "its chunked attention and temperature tuning depend on the packed batch's positions",
    "gptj": "its attention does not go through the library's attention interface",
    "codegen": "its attention does not go through the library's attention interface",
    "gpt_oss": "its checkpoints are quantised",
    "mamba": "it keeps recurrent state outside of the KV blocks",
    "mamba2": "it keeps recurrent state outside of the KV blocks",
}
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def resolve_folder(config: ModelConfig) -> Path:
    """Return the checkpoint's folder: converting it where `path` is a GGUF file, downloading it where it is an id.

    Raises `FileNotFoundError` for a path that is none of these.
    """
    return _resolve(config, CHECKPOINT_PATTERNS)


def resolve_description(config: ModelConfig) -> Path:
    """Return a folder with config.json and what else is small, for those who read no tensor: no weights are downloaded.

    Raises like `resolve_folder`.
    """
    return _resolve(config, DESCRIPTION_PATTERNS)


def _resolve(config: ModelConfig, patterns: list[str]) -> Path:
    folder = Path(local_path(config.path)).expanduser()
    if folder.is_dir():
        return folder
    # only those who download pay for the import
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(config.path)
    except HFValidationError as error:
        raise FileNotFoundError(f"model: there is no folder {config.path}, nor can a model hub have it") from error
    return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=patterns))


def load_model_description(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    """Read config.json and refuse what our engine cannot serve; raises `UnsupportedModelError`."""
    whole = _read_whole(folder, config)
    _require_plain_weights(whole)  # which says it of all parts together
    description = whole.get_text_config() if whole.model_type in _TEXT_PART_SERVED else whole
    require_supported(description, config.tensor_parallel_size)
    return description


def read_description(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    """Read config.json, of a model with other parts the text model's; whether our engine can serve it is not asked."""
    return _read_whole(folder, config).get_text_config()


def _read_whole(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    from transformers import AutoConfig  # most of those who know the configuration read no model

    return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)


def _require_plain_weights(description: PreTrainedConfig) -> None:
    if getattr(description, "quantization_config", None) is not None:
        raise UnsupportedModelError(f"{description.model_type}: quantised checkpoints are not read")


def require_supported(description: PreTrainedConfig, tensor_parallel_size: int) -> Architecture:
    """Return the architecture's entry, or raise `UnsupportedModelError` naming architecture and reason.

    One that nobody listed has an entry, too: whether it is served turns out when it is loaded.
    """
    name = description.model_type
    if name in _REASONS:
        raise UnsupportedModelError(f"{name}: {_REASONS[name]}")
    architecture = ARCHITECTURES.get(name, _UNLISTED)
    rope_type = batch_dependent_rope(getattr(description, "rope_parameters", None))
    if rope_type is not None:
        raise UnsupportedModelError(f"{name}: rope type {rope_type!r} depends on the longest position of the batch")
    if tensor_parallel_size > 1 and not architecture.tensor_parallel:
        raise UnsupportedModelError(f"{name}: not served with tensor_parallel_size > 1")
    return architecture


def expert_shape(description: PreTrainedConfig) -> ExpertShape | None:
    """Return the shape of a mixture of experts; None of a dense model.

    `num_experts` is the library's name for what some checkpoints spell differently (its `attribute_map`).
    """
    num_experts = getattr(description, "num_experts", None)
    if not num_experts:  # 0: a family of mixtures also has dense models
        return None
    return ExpertShape(num_experts=num_experts, num_active=description.num_experts_per_tok)


def batch_dependent_rope(parameters: Any) -> str | None:
    """Find a rope type that reads the whole batch's maximum position, also in per-layer-type parameters."""
    if not isinstance(parameters, dict):
        return None
    if (rope_type := parameters.get("rope_type")) in _BATCH_DEPENDENT_ROPE:
        return rope_type
    return next((found for nested in parameters.values() if (found := batch_dependent_rope(nested))), None)


def read_eos_token_ids(folder: Path, description: PreTrainedConfig) -> tuple[int, ...]:
    """Read the end-of-sequence ids; generation_config.json knows more than config.json where both speak."""
    path = folder / "generation_config.json"
    found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = description.eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)
