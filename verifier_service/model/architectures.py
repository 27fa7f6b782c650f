"""The model architectures that the engine serves, and why it refuses others."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.verifier_service.formats.gguf import local_path
from outrider.verifier_service.formats.stated import stated_config
from outrider.verifier_service.messages.expert_shape import ExpertShape
from outrider.verifier_service.messages.request import SamplingParams
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import end_token_id

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DESCRIPTION_PATTERNS = ["*.json", "tokenizer*", "*.model", "*.tiktoken", "*.txt", "*.jinja"]  # of a model hub's files
CHECKPOINT_PATTERNS = ["*.safetensors", *DESCRIPTION_PATTERNS]
CODE_PATTERNS = ["*.py"]  # with trust_remote_code: of models and tokenizers


class UnsupportedModelError(ValueError):
    """The engine cannot serve a model, or would serve it wrongly; the text names architecture and reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one `model_type` is loaded and sliced."""

    tensor_parallel: bool = False  # the library's sharding plan is correct for our engine
    is_tested: bool = True  # False: served only if the start check finds the library's logits
    aliases: tuple[tuple[str, str], ...] = ()  # (pattern, replacement): from the model's tensor names to checkpoints'
    uncaptured: str | None = None  # why no graph holds a step by the library's code; None: it can
    whole: str | None = None  # the multimodal model of a text part for which the library has no class alone


CHECKPOINT_ALIASES = (
    (r"^model\.", "model.language_model."),  # text parts of multimodal models
    (r"^model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^(model|transformer|gpt_neox)\.", ""),  # checkpoints of the base model without head
)
_MIXTRAL_NAMES = ((r"\.mlp\.", ".block_sparse_moe."),)
_HUNYUAN_NAMES = (
    (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
    (r"\.mlp\.gate\.", ".mlp.router.gate."),
    (r"\.shared_experts\.", ".shared_mlp."),
)
_LAGUNA_NAMES = (
    (r"\.mlp\.gate\.e_score", ".mlp.experts.e_score"),
    (r"\.shared_experts\.", ".shared_expert."),
)
_MINIMAX_NAMES = (
    (r"\.mlp\.(gate\.(?=e_score))?", ".block_sparse_moe."),
    (r"\.indexer\.(\w)_", r".index_\1_"),
)
_STEP_NAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.language_model(.*)\.mlp\.gate\.e_score_correction_bias$", r"model\1.moe.router_bias"),
    (r"^model\.language_model(.*)\.mlp\.shared_experts\.", r"model\1.share_expert."),
    (r"^model\.language_model(.*)\.mlp\.(experts\.)?", r"model\1.moe."),
)
IGNORED_TENSORS = (
    r"rotary_emb\.inv_freq$",  # buffers in old checkpoints
    r"\.attn\.(masked_)?bias$",
    r"\.attention\.(masked_)?bias$",
    # multimodal models, of which the text part is served
    r"^(model\.)?(vision|visual|audio|embed_vision|embed_audio|multi_modal_|mm_|vit_|patch_merge_)\w*\.",
)

_READS_BACK = "reads_back"  # its code waits for the device in every step, or brings it something
_PLAIN = Architecture()
UNLISTED = Architecture(is_tested=False, uncaptured="unlisted")
_SHARDED = Architecture(tensor_parallel=True)

# each one is compared with the library in tests/verifier_service/model/test_runner.py, sharded ones also in
# test_tensor_parallel.py
ARCHITECTURES: dict[str, Architecture] = {
    "cohere": _PLAIN,
    "gemma": _SHARDED,
    "gemma2": _SHARDED,
    "deepseek_v3": _SHARDED,
    "deepseek_v32": _PLAIN,
    "dots3_note_text": _PLAIN,
    "ernie4_5_moe": Architecture(tensor_parallel=True, aliases=((r"\.gate\.moe_statics\.", ".moe_statics."),)),
    "gemma3_text": _SHARDED,
    "gemma4_text": _PLAIN,
    "gemma4_unified_text": _PLAIN,
    "glm4": _PLAIN,
    "glm4_moe": _SHARDED,
    "glm_moe_dsa": _PLAIN,
    "glm_ocr_text": Architecture(whole="glm_ocr"),
    "gpt2": Architecture(uncaptured=_READS_BACK),
    "gpt_neox": Architecture(tensor_parallel=True, aliases=((r"^lm_head\.", "embed_out."),)),
    "gpt_oss": _PLAIN,
    "granite": _SHARDED,
    "hy_v3": Architecture(tensor_parallel=True, aliases=_HUNYUAN_NAMES),
    "laguna": Architecture(tensor_parallel=True, aliases=_LAGUNA_NAMES),
    "llama": _SHARDED,
    "llama4_text": _PLAIN,
    "mimo_v2_flash": Architecture(aliases=((r"\.sinks$", ".attention_sink_bias"),)),
    "minimax_m2": Architecture(aliases=_MIXTRAL_NAMES),
    "minimax_m3_vl_text": Architecture(aliases=_MINIMAX_NAMES),
    "ministral": _SHARDED,
    "ministral3": _SHARDED,
    "mistral": _SHARDED,
    "mistral4": _SHARDED,
    "mixtral": Architecture(tensor_parallel=True, aliases=_MIXTRAL_NAMES),
    "muse_glimmer_text": Architecture(whole="muse_glimmer", uncaptured=_READS_BACK),
    "olmo": _PLAIN,
    "olmo2": _PLAIN,
    "olmoe": _PLAIN,
    "opt": Architecture(uncaptured="other_head"),  # it does not end where others do
    "phi": _PLAIN,
    "phi3": _PLAIN,
    "qwen2": _SHARDED,
    "qwen2_moe": _PLAIN,
    "qwen3": _SHARDED,
    "qwen3_moe": _SHARDED,
    "qwen3_vl_moe_text": Architecture(whole="qwen3_vl_moe"),
    "smollm3": _SHARDED,
    "stablelm": _PLAIN,
    "starcoder2": _SHARDED,
    "step3p5": Architecture(whole="step3p7", aliases=_STEP_NAMES, uncaptured=_READS_BACK),
}

# reasons for the refusal of architectures that would silently give wrong logits in a packed batch
_RECURRENT = "its linear attention keeps recurrent state outside of the KV blocks"
_REASONS = {
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid", "minimax"), _RECURRENT
    ),
    **dict.fromkeys(("mamba", "mamba2", "nemotron_h"), "it keeps recurrent state outside of the KV blocks"),
    "deepseek_v4": "its attention reads compressed tokens, which are outside of the KV blocks",
    "inkling_text": "its short convolutions keep state outside of the KV blocks",
    **dict.fromkeys(("gptj", "codegen"), "its attention does not go through the library's attention interface"),
}
_SPARSE = ("deepseek_v32", "dots3_note_text", "glm_moe_dsa")
_CHUNKED = "llama4_text"
_GENERATION_CONFIG = "generation_config.json"
_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "special_tokens_map.json")
_SAMPLING_DEFAULTS = {  # to fields of `SamplingParams`
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
_BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")


def resolve_folder(config: ModelConfig) -> Path:
    """Return the checkpoint's folder; convert a GGUF file, download a model id.

    Raises `FileNotFoundError` if `path` is no folder, GGUF file or model id.
    """
    return _resolve(config, CHECKPOINT_PATTERNS)


def resolve_description(config: ModelConfig) -> Path:
    """Return a folder with config.json and tokenizer, without downloading weights. Raises like `resolve_folder`."""
    return _resolve(config, DESCRIPTION_PATTERNS)


def _resolve(config: ModelConfig, patterns: list[str]) -> Path:
    folder = Path(local_path(config.path)).expanduser()
    if folder.is_dir():
        return folder
    # imported here: slow, and only needed for a download
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(config.path)
    except HFValidationError as error:
        raise FileNotFoundError(f"model: there is no folder {config.path}, nor can a model hub have it") from error
    allowed = [*patterns, *(CODE_PATTERNS if config.trust_remote_code else ())]
    return Path(snapshot_download(config.path, revision=config.revision, allow_patterns=allowed))


def load_model_description(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    """Read config.json and refuse what our engine cannot serve; raises `UnsupportedModelError`."""
    whole = _read_whole(folder, config)
    _require_readable_weights(folder, whole)
    description = whole.get_text_config()
    require_supported(description, config.tensor_parallel_size)
    limit = sparse_limit(description)
    if limit is not None and (config.max_model_len is None or config.max_model_len > limit):
        kind, beyond = (
            ("chunked", "our attention has no chunks, nor a temperature by position")
            if description.model_type == _CHUNKED
            else ("sparse", "the indexer that chooses among more keeps keys of its own outside of the KV blocks")
        )
        raise UnsupportedModelError(
            f"{description.model_type}: its {kind} attention is served with max_model_len up to {limit}, where it reads"
            f" every key: {beyond}"
        )
    return description


def sparse_limit(description: PreTrainedConfig) -> int | None:
    """Return up to how many tokens sparse or chunked attention reads every key; None: a model's is neither.

    Up to there a temperature that steps up every `floor_scale` tokens is 1, too.
    """
    if description.model_type == _CHUNKED:
        scale = description.floor_scale - 1 if description.attn_temperature_tuning else None
        return min(filter(None, (description.attention_chunk_size, scale)), default=None)
    if description.model_type == "minimax_m3_vl_text":
        return int(description.index_topk_blocks * description.index_block_size)
    return description.index_topk if description.model_type in _SPARSE else None


def read_description(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    """Read config.json (of a multimodal model, the text part) without checking that our engine can serve it."""
    return _read_whole(folder, config).get_text_config()


def _read_whole(folder: Path, config: ModelConfig) -> PreTrainedConfig:
    from transformers import AutoConfig  # imported here: most importers of this module read no model

    return AutoConfig.from_pretrained(folder, trust_remote_code=config.trust_remote_code)


def _require_readable_weights(folder: Path, description: PreTrainedConfig) -> None:
    if stated_config(folder) is None:
        return
    from outrider.verifier_service.formats.quantized import FormatError, read_format  # imported here: it needs torch

    try:
        read_format(folder)
    except FormatError as error:
        raise UnsupportedModelError(f"{description.model_type}: {error}") from error


def require_supported(description: PreTrainedConfig, tensor_parallel_size: int) -> Architecture:
    """Return the architecture's entry, or raise `UnsupportedModelError` naming architecture and reason.

    An unlisted architecture has an entry, too: the start check decides whether it is served.
    """
    name = description.model_type
    if name in _REASONS:
        raise UnsupportedModelError(f"{name}: {_REASONS[name]}")
    architecture = ARCHITECTURES.get(name, UNLISTED)
    rope_type = batch_dependent_rope(getattr(description, "rope_parameters", None))
    if rope_type is not None:
        raise UnsupportedModelError(f"{name}: rope type {rope_type!r} depends on the longest position of the batch")
    if tensor_parallel_size > 1 and not architecture.tensor_parallel:
        raise UnsupportedModelError(f"{name}: not served with tensor_parallel_size > 1")
    return architecture


def checkpoint_names(description: PreTrainedConfig) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Return how a model's checkpoint names its tensors: `aliases` and `ignored` as in `load_weights`.

    MTP layers are ignored: only a drafter reads them.
    """
    first, count = description.num_hidden_layers, getattr(description, "num_nextn_predict_layers", 0) or 0
    layers = (rf"(^|\.)layers\.{first + index}\." for index in range(count))
    aliases = ARCHITECTURES.get(description.model_type, UNLISTED).aliases
    return (*aliases, *CHECKPOINT_ALIASES), (*IGNORED_TENSORS, r"^(model\.)?mtp(_\w+)?\.", *layers)


def expert_shape(description: PreTrainedConfig) -> ExpertShape | None:
    """Return the shape of a mixture of experts; None for a dense model.

    The library's `attribute_map` gives `num_experts` for other spellings in checkpoints.
    """
    counts = (getattr(description, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    num_experts = next(filter(None, counts), None)
    if not num_experts:  # 0: a dense model of a family that also has mixtures
        return None
    num_active = getattr(description, "num_experts_per_tok", None) or description.top_k_experts
    return ExpertShape(num_experts=num_experts, num_active=num_active)


def batch_dependent_rope(parameters: Any) -> str | None:
    """Return a rope type that depends on the batch's largest position, also in parameters per layer type; else None."""
    if not isinstance(parameters, dict):
        return None
    if (rope_type := parameters.get("rope_type")) in _BATCH_DEPENDENT_ROPE:
        return rope_type
    return next((found for nested in parameters.values() if (found := batch_dependent_rope(nested))), None)


def read_eos_token_ids(folder: Path, description: PreTrainedConfig, config: ModelConfig) -> tuple[int, ...]:
    """Read the end-of-sequence ids of generation_config.json, of the tokenizer and of config.json, all of them.

    Each may lack the one that a chat template ends its messages with. If none names one, it is the architecture's.
    """
    model = json.loads((folder / "config.json").read_text())
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)  # where there is none, to try may fail
    own = end_token_id(config) if has_tokenizer else None
    parts = (_read_generation_config(folder), {"eos_token_id": own}, model, model.get("text_config"))
    found = list(itertools.chain.from_iterable(_as_list((part or {}).get("eos_token_id")) for part in parts))
    ids = dict.fromkeys(found or _as_list(description.eos_token_id))
    return tuple(id_ for id_ in ids if 0 <= id_ < description.vocab_size)


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return what generation_config.json says of sampling, as fields of `SamplingParams`; as vLLM reads it.

    Raises `ValueError` naming file and field.
    """
    generation = _read_generation_config(folder)
    found = {own: value for name, own in _SAMPLING_DEFAULTS.items() if (value := generation.get(name)) is not None}
    if found.get("top_k") == -1:
        found["top_k"] = 0  # off
    try:
        SamplingParams(**found)
    except (ValueError, TypeError) as error:
        message = f"{_GENERATION_CONFIG}: {error}; generation_config: vllm leaves its sampling unread"
        raise ValueError(message) from error
    return found


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / _GENERATION_CONFIG
    return json.loads(path.read_text()) if path.is_file() else {}


def _as_list(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]
