"""The plug-in's settings in vLLM's configuration and requests, and the tried vLLM versions; imports no vLLM.

Used by both entries: `vllm_drafts.py` for vLLM's V1 model runner, `vllm_worker.py` for V2.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from outrider.cluster.hosted.drafting import HostRequest
from outrider.cluster.hosted.options import PluginOptions
from outrider.verifier_service.messages.draft import FINAL_TAP
from outrider.verifier_service.messages.request import GREEDY_TEMPERATURE

OPTIONS_KEY = "outrider"  # of vLLM's --additional-config
CAP_KEY = "num_speculative_tokens"  # of a request's vllm_xargs: a cap on the draft length; 0: off
STORE_KEY = "store"  # of a request's vllm_xargs: whether a pool may learn from it
SALT_KEY = "cache_salt"  # of a request's vllm_xargs: only requests of the same one draft from one another's texts
TRIED_VERSIONS = ("0.32.",)
V2_METHOD = "ngram"  # the only V2 method without a model that is scheduled step by step
# with V2: drafts and states would be on different ranks
UNTRIED_PARALLELISM = ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size")


class UntriedVersionError(RuntimeError):
    """The plug-in was not tried with this vLLM version, or a method's parameters have changed."""


def refuse_untried(version: str, owner: type, parameters: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `UntriedVersionError` unless the version was tried and `owner`'s methods have the same parameters."""
    if not version.startswith(TRIED_VERSIONS):
        raise UntriedVersionError(f"vLLM {version}: the plug-in was tried with {', '.join(TRIED_VERSIONS)}x alone")
    for name, expected in parameters.items():
        method = getattr(owner, name, None)
        if method is None:
            raise UntriedVersionError(f"vLLM {version}: {owner.__name__} has no {name}")
        if (found := tuple(inspect.signature(method).parameters)) != expected:
            raise UntriedVersionError(f"vLLM {version}: {name} takes {found}, not {expected}")


def options_of(vllm_config: Any) -> PluginOptions:
    """Return the plug-in's options; raises `ValueError` naming a bad one in vLLM's configuration."""
    values = vllm_config.additional_config
    found = values.get(OPTIONS_KEY) if isinstance(values, dict) else None
    if not isinstance(found, dict):
        raise ValueError(
            f'--additional-config must say where the pool is: {{"{OPTIONS_KEY}": {{"pool": "host:port"}}}}'
        )
    try:
        return PluginOptions(**found)
    except ValueError as error:
        raise ValueError(f"--additional-config: {OPTIONS_KEY}: {error}") from error


def refuse_v2_configuration(vllm_config: Any) -> None:
    """Raise `ValueError` if our worker does not support vLLM's configuration."""
    if not vllm_config.use_v2_model_runner:
        raise ValueError(
            "--worker-cls: this vLLM runs its V1 model runner, which takes the pool by "
            '--speculative-config \'{"method": "custom_class", "model": "outrider.cluster.vllm.Drafts", ...}\' alone'
        )
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != V2_METHOD:
        found = "none" if speculative is None else repr(speculative.method)
        raise ValueError(
            f'--speculative-config must have "method": "{V2_METHOD}" and "num_speculative_tokens" beside our '
            f"--worker-cls, not {found}"
        )
    if vllm_config.scheduler_config.async_scheduling:
        raise ValueError("--async-scheduling verifies drafts of one length alone: leave it out")
    for name in UNTRIED_PARALLELISM:
        if (size := getattr(vllm_config.parallel_config, name)) > 1:
            raise ValueError(f"--{name.replace('_', '-')} {size}: drafts from a pool were not tried with that")


def request_of(sampling: Any, num_prompt_tokens: int, *, draft_seeded: bool) -> HostRequest:
    """Return the parameters of a request that concern its drafts, from vLLM's sampling parameters."""
    cap = _cap_of(sampling.extra_args)
    if sampling.seed is not None and sampling.temperature > GREEDY_TEMPERATURE and not draft_seeded:
        # drafts would change seeded tokens: V1's generator advances once per draft token, and V2 samples drafted and
        # plain tokens differently
        cap = 0
    # `all_stop_token_ids` has the EOS token even if it is ignored
    stop_token_ids = sampling.stop_token_ids if sampling.ignore_eos else sampling.all_stop_token_ids
    return HostRequest(
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=sampling.max_tokens or 1 << 30,
        num_speculative_tokens=cap,
        stop_token_ids=frozenset(stop_token_ids or ()),
        store=_store_of(sampling.extra_args),
        cache_salt=str((sampling.extra_args or {}).get(SALT_KEY, "")),
    )


def _store_of(extra_args: Mapping[str, Any] | None) -> bool | None:
    """Return what a client says of `store`; whatever is no clear yes counts as no. vLLM makes numbers of booleans."""
    said = (extra_args or {}).get(STORE_KEY)
    return None if said is None else str(said).lower() in ("true", "1", "1.0")


def _cap_of(extra_args: Mapping[str, Any] | None) -> int | None:
    """Return a client's cap; one that is no number counts as 0, since vLLM has already admitted the request."""
    cap = (extra_args or {}).get(CAP_KEY)
    if cap is None:
        return None
    try:
        return max(0, int(cap))
    except (TypeError, ValueError, OverflowError):
        return 0


def give_out_layers(runner: Any, state_taps: tuple[int, ...]) -> None:
    """Have a runner's model return the layer inputs that heads read; raises `ValueError` if it cannot."""
    layers = tuple(sorted({tap for tap in state_taps if tap != FINAL_TAP}))
    if not layers:
        return
    model = runner.get_model()
    if not hasattr(model, "set_aux_hidden_state_layers"):
        raise ValueError(f"state_taps: vLLM's {type(model).__name__} does not give out its layers' inputs")
    runner.use_aux_hidden_state_outputs = True
    model.set_aux_hidden_state_layers(layers)
