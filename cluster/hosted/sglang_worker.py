"""A worker for SGLang: its NGRAM worker, with drafts from our pool; imports no SGLang.

SGLang's worker verifies, samples, and keeps the KV; `_prepare_draft_tokens`, the only method that looks for drafts, is
replaced. Written against SGLang's sources, which change often (docs/sglang.md says which); never run on a device.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from outrider.cluster.hosted.drafting import HostedConfig
from outrider.cluster.hosted.metrics import HostedMetrics
from outrider.cluster.hosted.options import PluginOptions
from outrider.cluster.hosted.plugin import Plugin, RankPlugin
from outrider.cluster.hosted.sglang_steps import DraftedBatches
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import fingerprint_of

OPTIONS_VARIABLE = "OUTRIDER_SGLANG"  # JSON of `PluginOptions`: SGLang has no option for plug-ins' own settings
HOOK = "_prepare_draft_tokens"
PARAMETERS = ("self", "batch")
RETURNS = ("tuple[np.ndarray, np.ndarray]", "tuple[numpy.ndarray, numpy.ndarray]")  # drafts and their tree masks


class UntriedSglangError(RuntimeError):
    """SGLang's NGRAM worker is not the one that this plug-in was written against."""


def refuse_other_worker(base: type) -> None:
    """Raise `UntriedSglangError` unless SGLang's NGRAM worker takes and returns what we replace."""
    method = getattr(base, HOOK, None)
    if method is None:
        raise UntriedSglangError(f"SGLang's {base.__name__} has no {HOOK}")
    signature = inspect.signature(method)
    if (found := tuple(signature.parameters)) != PARAMETERS:
        raise UntriedSglangError(f"SGLang's {HOOK} takes {found}, not {PARAMETERS}")
    annotation = signature.return_annotation
    returns = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    if returns not in RETURNS:
        raise UntriedSglangError(f"SGLang's {HOOK} returns {returns}, not {RETURNS[0]}")


def options_of(environment: Mapping[str, str]) -> PluginOptions:
    """Return the plug-in's options; raises `ValueError` naming a bad one."""
    text = environment.get(OPTIONS_VARIABLE)
    if text is None:
        raise ValueError(f'{OPTIONS_VARIABLE} must say where the pool is: {{"pool": "host:port"}}')
    try:
        options = TypeAdapter(PluginOptions).validate_json(text)
    except ValueError as error:
        raise ValueError(f"{OPTIONS_VARIABLE}: {error}") from error
    if options.state_taps:
        raise ValueError(f"{OPTIONS_VARIABLE}: state_taps: SGLang's NGRAM path gives out no hidden states")
    return options


def check_server_args(server_args: Any) -> None:
    """Raise `ValueError` naming an option of SGLang that drafts from a pool do not go with."""
    if not server_args.disable_overlap_schedule:
        raise ValueError("--disable-overlap-schedule is needed: a draft follows the tokens of the step before it")
    if server_args.pp_size > 1:
        raise ValueError(f"--pp-size {server_args.pp_size}: drafts from a pool go with one stage")
    if server_args.enable_dp_attention:
        raise ValueError("--enable-dp-attention: SGLang's NGRAM path has no such batches")


def plugin_of(server_args: Any, model: Any, options: PluginOptions, batches: DraftedBatches) -> Plugin:
    """Return the plug-in for SGLang's arguments and its model's configuration."""
    config = HostedConfig(
        vocab_size=model.vocab_size,
        max_model_len=model.context_len,
        num_speculative_tokens=server_args.speculative_num_draft_tokens - 1,
        is_pinned=options.speculation == "always",
        max_wait_s=options.max_wait_ms / 1000.0,
        learn=options.learn,
    )
    tokenizer = ModelConfig(
        path=server_args.tokenizer_path or server_args.model_path,
        revision=server_args.revision,
        trust_remote_code=server_args.trust_remote_code,
    )
    return Plugin(
        options,
        config,
        vocab_fingerprint=fingerprint_of(tokenizer),
        engine="sglang",
        known_ids=batches.request_ids,
        metrics=HostedMetrics(),
    )


def pool_worker(
    base: type,
    options: PluginOptions,
    *,
    group_of: Callable[[], Any],
    make: Callable[..., Plugin] = plugin_of,
    clock: Callable[[], float] = time.monotonic,
) -> type:
    """Return a subclass of SGLang's NGRAM worker whose drafts come from the pool; raises `UntriedSglangError`.

    `group_of` returns SGLang's tensor-parallel group once there is one; `make` makes the plug-in of its first rank.
    """
    refuse_other_worker(base)

    class PoolWorker(base):
        def __init__(self, server_args: Any, *arguments: Any, target_worker: Any, **named: Any) -> None:
            super().__init__(server_args, *arguments, target_worker=target_worker, **named)
            width = server_args.speculative_num_draft_tokens
            self._batches = DraftedBatches(width, draft_seeded=options.draft_seeded)
            model = target_worker.model_runner.model_config
            self._plugin = RankPlugin(group_of(), lambda: make(server_args, model, options, self._batches))
            self._began_s = self._last_began_s = clock()

        def clear_cache_pool(self) -> None:
            super().clear_cache_pool()
            self._batches.clear()

        def forward_batch_generation(self, *arguments: Any, **named: Any) -> Any:
            self._last_began_s, self._began_s = self._began_s, clock()
            return super().forward_batch_generation(*arguments, **named)

        def _prepare_draft_tokens(self, batch: Any) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
            return self._batches.draft(batch.reqs, self._last_began_s, self._plugin.propose)

        def _update_ngram_corpus(self, batch: Any) -> None:
            """Do nothing: drafters hear of new tokens with the next ask."""

    return PoolWorker
