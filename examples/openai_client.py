"""Outrider through the official `openai` client, and what it says of speculation.

With `outrider serve` in another terminal: `python examples/openai_client.py [URL]`.
"""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI

URL = "http://127.0.0.1:8000/v1"
PROMPT = "def read_lines(path):\n"
# What a request may say of speculation. At temperature 0 and with a seed the tokens are the same whatever it says.
WAYS: dict[str, dict[str, Any]] = {
    "as the server decides": {},
    "drafts of at most two tokens": {"num_speculative_tokens": 2},
    "no drafts": {"disable_spec_decode": True},
}


def main(url: str = URL) -> None:
    client = OpenAI(base_url=url, api_key="none")  # a server with keys (--api-key) wants one of them here
    model = client.models.list().data[0].id
    print(f"{url} serves {model}")

    for title, extra_body in WAYS.items():
        print(f"\n--- {title}\n{PROMPT}", end="")
        print(f"\n[{summary(stream(client, model, extra_body))}]")


def stream(client: OpenAI, model: str, extra_body: dict[str, Any]) -> dict[str, Any]:
    """Print a completion as it comes; return what it says of speculation. OpenAI's client passes `extra_body` on."""
    speculation: dict[str, Any] = {}
    chunks = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=48, temperature=0.8, seed=1, stream=True, extra_body=extra_body
    )
    for chunk in chunks:
        print("".join(choice.text for choice in chunk.choices), end="", flush=True)
        metrics = (chunk.model_extra or {}).get("metrics") or {}  # Outrider's own field, beside OpenAI's
        speculation = metrics.get("speculative_decoding", speculation)
    return speculation


def summary(speculation: dict[str, Any]) -> str:
    if not speculation["num_drafts"]:
        return f"no drafts: {speculation['disabled_reason'] or 'none came in time'}"
    accepted = f"{speculation['num_accepted_tokens']} of {speculation['num_draft_tokens']} draft tokens were right"
    return f"{accepted}, {speculation['mean_acceptance_length']:.2f} tokens per verification"


if __name__ == "__main__":
    main(*sys.argv[1:])
