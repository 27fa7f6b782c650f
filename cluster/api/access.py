"""Who may pass which door of the public ports. A test walks them all: one that is not in the table is an admin's.

open     everybody: probes, metrics, the page's files, gRPC's health
client   who shows a key, where there are keys
admin    who shows an admin's key: it changes weights, others' requests or files, or reads what others said. Until
         there is such a key, also every program of this machine, on a port that no other reaches; but not a page
         of somebody else in its browser
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlsplit

from starlette.routing import BaseRoute

from outrider.cluster.common.api_keys import HOW_TO_BE_ADMIN, HOW_TO_SHOW, ApiKeys
from outrider.cluster.common.errors import Forbidden, NotJson
from outrider.cluster.common.security import is_loopback
from outrider.cluster.web.page import FILES as WEB_FILES

OPEN_PATHS = frozenset({"/health", "/ready", "/live", "/metrics", *WEB_FILES})
CLIENT_PATHS = frozenset(
    {
        *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize"),
        *("/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/models", "/v1/models/{name:path}", "/v1/responses/{response_id}"),
        *("/load", "/version", "/openapi.json", "/v1/learner"),
        # of trainers: samples, and what a trainer asks before it does something
        *("/generate", "/inference/v1/generate", "/health_generate", "/liveness", "/is_paused"),
        *("/get_weight_version", "/weight_version", "/model_info", "/get_model_info", "/server_info"),
        *("/get_server_info", "/v1/loads", "/get_load", "/weight_info", "/get_world_size"),
    }
)
OPEN_RPCS = "/grpc.health.v1.Health/"
CLIENT_RPCS = frozenset(
    {
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        *(
            f"/outrider.v1.Inference/{name}"
            for name in ("Generate", "GenerateUnary", "Abort", "GetModelInfo", "GetServerInfo", "GetLoads")
        ),
        *(
            f"/vllm.grpc.engine.VllmEngine/{name}"
            for name in ("Generate", "Abort", "HealthCheck", "GetModelInfo", "GetServerInfo", "GetLoads")
        ),
        "/vllm.grpc.engine.VllmEngine/GetTokenizer",
    }
)
JSON_TYPES = frozenset({"application/json", "application/jsonl", "application/x-ndjson"})
OWN_SITES = frozenset({"same-origin", "none"})  # of Sec-Fetch-Site; none: the reader typed the address


def admin_paths(routes: Iterable[BaseRoute]) -> frozenset[str]:
    """Return the paths of an application that are an admin's. Raises `ValueError` for one with parameters."""
    paths = {str(getattr(route, "path", route)) for route in routes} - OPEN_PATHS - CLIENT_PATHS
    if bad := sorted(path for path in paths if "{" in path):
        raise ValueError(f"an admin's path has no parameters, unlike {bad[0]}")
    return frozenset(paths)


def require_admin(keys: ApiKeys, shown: Sequence[tuple[str, str]], path: str, *, is_private: bool) -> None:
    """Raise `Forbidden` or `NotJson` unless a request with these headers may pass an admin's door.

    `is_private`: only this machine's programs reach the port.
    """
    if keys.has_admin:
        if not keys.is_admin(shown):
            raise Forbidden(f"{path} needs an admin's key, {HOW_TO_SHOW}")
    elif not is_private:
        needed = "beyond this machine that needs an admin's key, and there is none"
        raise Forbidden(f"{path} changes weights, or what others have: {needed}; add {HOW_TO_BE_ADMIN}")
    else:
        _require_own_program(dict(shown), path)


def _require_own_program(headers: Mapping[str, str], path: str) -> None:
    """Refuse what a page of somebody else may have sent, which a browser of this machine shows."""
    without = f"without an admin's key, {path} is for programs of this machine"
    host, origin = headers.get("host", ""), headers.get("origin")
    if not is_loopback(_hostname(host)):
        raise Forbidden(f"{without}: the header Host must be localhost, not {host!r}")
    if origin is not None and origin.partition("://")[2] != host:
        raise Forbidden(f"{without}: the header Origin must be its own, not {origin!r}")
    if headers.get("sec-fetch-site", "none") not in OWN_SITES:
        raise Forbidden(f"{without}, and not for other sites' pages")
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if has_body and kind not in JSON_TYPES:  # clients name all sorts of types for none
        raise NotJson(f"the header Content-Type must be application/json, not {kind!r}", "content-type")


def _hostname(host: str) -> str:
    """Return the host of a header Host, without the port; "" where it has none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
