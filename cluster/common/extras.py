"""Optional dependencies, and the message if one is missing.

The modules below import an extra's packages at the top. Their importers call `require_extra` or `missing_extra` first,
and import them inside a function.

plots       lab/bench/serve_plot.py, lab/simulate/plots.py
otlp        cluster/gateway/tracing.py
vllm-grpc   cluster/api/vllm_grpc.py
gguf        verifier_service/formats/gguf.py, which has the library import them, and lab/peers/half_gguf.py
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence

PACKAGES: Mapping[str, Sequence[str]] = {
    "plots": ("matplotlib",),
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"),
    "vllm-grpc": ("smg_grpc_proto",),
    "gguf": ("gguf", "accelerate"),
}


class MissingExtraError(ValueError):
    """An option needs packages that are not installed; the text says how to install them."""


def is_installed(package: str) -> bool:
    """Return whether a package can be found; only its parent is imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def missing_extra(extra: str, find: Callable[[str], bool] = is_installed) -> str | None:
    """Return how to install a missing extra; None: it is installed."""
    if all(find(package) for package in PACKAGES[extra]):
        return None
    return f"pip install 'outrider[{extra}]'"


def require_extra(extra: str, what: str, find: Callable[[str], bool] = is_installed) -> None:
    """Raise `MissingExtraError`, naming the option `what` and its extra, unless the extra is installed."""
    if (remedy := missing_extra(extra, find)) is not None:
        raise MissingExtraError(f"{what} needs packages that are not installed: {remedy}")
