"""What a client may give beside its prompt, each field once: its type, its names at the doors, what it means.

From it come the bodies of OpenAI's and SGLang's doors, what gRPC's doors read, `RequestInput`, and the table of
docs/api.md, which `python -m outrider.cluster.gateway.client_fields` writes. The engine's part, with its bounds, is
`SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from pydantic import AliasChoices, Field

from outrider.verifier_service.messages.draft import ranges_of
from outrider.verifier_service.messages.request import SamplingParams

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
_HEAD = """\
| field | bounds | Responses, Messages | SGLang's `/generate` | vLLM's gRPC | |
|---|---|---|---|---|---|
"""
TokenIds = Annotated[list[int], Field(fail_fast=True)]  # one error is enough for a long list
Texts = Annotated[list[str], Field(fail_fast=True)]
RESPONSES, SGLANG, VLLM, METADATA = "responses", "sglang", "vllm", "metadata"
METADATA_PREFIX = "x-outrider-"  # of fields that travel in a gRPC call's metadata
_TWO_NAMES = Annotated[
    bool | None, Field(validation_alias=AliasChoices("disable_spec_decode", "disable_speculative_decoding"))
]


class At:
    """Where a field is known beside completions, chats and our own gRPC, and what it means."""

    def __init__(self, *doors: str, sglang: str = "", wire: Any = None, means: str = "") -> None:
        """`sglang`: another name that it has there. `wire`: its type in a JSON body; None: the same."""
        self.names = dict.fromkeys(doors, "") | ({SGLANG: sglang} if sglang else {})
        self.wire, self.means = wire, means


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFields:
    """None: not given."""

    n: Annotated[int | None, At(SGLANG, VLLM, means="at most 128")] = None
    use_beam_search: Annotated[
        bool | None, At(means="the `n` texts of the highest score, [below](#beam-search); not in gRPC")
    ] = None
    length_penalty: Annotated[
        float | None, At(means="of beams, in [-10, 10]: above 0 a longer text scores higher; without beams 1 alone")
    ] = None
    max_tokens: Annotated[
        int | None,
        At(
            VLLM,
            sglang="max_new_tokens",
            means="also `max_completion_tokens`; above the room that the prompt leaves, the limit is that room, and "
            "`warnings` says so",
        ),
    ] = None
    min_tokens: Annotated[int | None, At(RESPONSES, VLLM, sglang="min_new_tokens", means="at most `max_tokens`")] = None
    temperature: Annotated[float | None, At(SGLANG, VLLM)] = None
    top_p: Annotated[float | None, At(SGLANG, VLLM)] = None
    top_k: Annotated[int | None, At(RESPONSES, SGLANG, VLLM, means="0 and -1: off")] = None
    min_p: Annotated[float | None, At(RESPONSES, SGLANG, VLLM)] = None
    seed: Annotated[
        int | None,
        At(RESPONSES, VLLM, sglang="sampling_seed", means="a seeded answer is the same with and without drafts"),
    ] = None
    presence_penalty: Annotated[float | None, At(RESPONSES, SGLANG, VLLM)] = None
    frequency_penalty: Annotated[float | None, At(RESPONSES, SGLANG, VLLM)] = None
    repetition_penalty: Annotated[float | None, At(RESPONSES, SGLANG, VLLM)] = None
    logit_bias: Annotated[
        Mapping[int, float] | None,
        At(RESPONSES, SGLANG, VLLM, wire=dict[str, float] | None, means="by token id, each in [-100, 100]"),
    ] = None
    stop: Annotated[str | Texts | None, At(RESPONSES, SGLANG, VLLM, means="a text, or at most 16")] = None
    stop_token_ids: Annotated[TokenIds | None, At(RESPONSES, SGLANG, VLLM)] = None
    allowed_token_ids: Annotated[
        TokenIds | None,
        At(
            RESPONSES,
            means="no other token comes, the end included; where a grammar allows none of them, they give way; not in "
            "gRPC",
        ),
    ] = None
    bad_words: Annotated[
        Texts | None,
        At(
            RESPONSES,
            means="texts whose tokens never come, at a text's beginning or behind a space; written in other tokens "
            "they may, as in vLLM",
        ),
    ] = None
    include_stop_str_in_output: Annotated[bool | None, At(VLLM, sglang="no_stop_trim")] = None
    ignore_eos: Annotated[bool | None, At(RESPONSES, SGLANG, VLLM)] = None
    skip_special_tokens: Annotated[bool | None, At(SGLANG, VLLM)] = None
    disable_spec_decode: Annotated[
        bool | None,
        At(RESPONSES, METADATA, wire=_TWO_NAMES, means="also `disable_speculative_decoding`: no drafts"),
    ] = None
    num_speculative_tokens: Annotated[
        int | None, At(RESPONSES, METADATA, means="a cap on the draft length; 0: no drafts")
    ] = None
    rejection_sample_method: Annotated[str | None, At(means="`standard`, `block` or `typical`, below")] = None
    priority: Annotated[
        int | None, At(RESPONSES, METADATA, means="in [-1000, 1000], lower is served earlier; below")
    ] = None
    target_inter_token_ms: Annotated[
        float | None, At(RESPONSES, METADATA, means="slower than this, its drafts count more; far faster, less")
    ] = None
    session_id: Annotated[str | None, At(RESPONSES, METADATA, means="shared by requests with a common prefix")] = None
    cache_salt: Annotated[
        str | None, At(RESPONSES, METADATA, means="only requests with the same salt share prefixes")
    ] = None
    history_key: Annotated[str | None, At(RESPONSES, METADATA, means="with `--rollouts`; without it refused")] = None
    store: Annotated[
        bool | None,
        At(
            METADATA,
            means="false: no drafter keeps anything of the request once it has ended, nor learns from it",
        ),
    ] = None
    prompt_logprobs: Annotated[int | None, At(VLLM)] = None
    logprobs_mode: Annotated[str | None, At(METADATA, means="`raw_logprobs` or `processed_logprobs`, below")] = None


_HINTS = get_type_hints(ClientFields, include_extras=True)
_AT: dict[str, At] = {name: hint.__metadata__[0] for name, hint in _HINTS.items()}
CLIENT_FIELDS = tuple(_AT)


def named_at(door: str) -> dict[str, str]:
    """Return the fields that a door knows, each with its name there."""
    return {name: at.names[door] or name for name, at in _AT.items() if door in at.names}


def kind_of(name: str) -> Any:
    """Return a field's type in a JSON body, None included."""
    return _HINTS[name].__origin__ if _AT[name].wire is None else _AT[name].wire


def metadata_key(name: str) -> str:
    """Return the key of a field that travels in a gRPC call's metadata."""
    return METADATA_PREFIX + name.replace("_", "-")


def table() -> str:
    """Return the table of docs/api.md."""
    bounds = ranges_of(SamplingParams)
    rows = []
    for name, at in _AT.items():
        doors = {door: f"`{named or name}`" for door, named in at.names.items()}
        known = [doors.get(door, "") for door in (RESPONSES, SGLANG, VLLM)]
        known[2] = f"`{metadata_key(name)}`" if METADATA in doors else known[2]
        bound = str(bounds.get(name, "")).removeprefix("in ")
        rows.append(f"| `{name}` | {bound} | {' | '.join(known)} | {at.means} |\n")
    return _HEAD + "".join(rows)


def with_table(page: str) -> str:
    """Return the page with the present table in place of its own."""
    before, _, rest = page.partition(_HEAD)
    return before + table() + rest[rest.index("\n\n") + 1 :]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
