"""`outrider generate`: prompts in, records out, no server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.offline.engine import OfflineEngine
from outrider.cluster.offline.prompts import PromptError, collect, parse_request, read_prompt_lines, result_json
from outrider.cluster.router.fleet import PolicyMode
from outrider.verifier_service.messages.request import SamplingParams, SpeculationPlan
from outrider.verifier_service.model.tokenizer import load_tokenizer


def run(
    config: ServiceConfig,
    sampling: SamplingParams,
    prompt_texts: Sequence[str],
    prompts_file: Path | None,
    *,
    drafter_process: bool,
) -> Iterator[dict[str, Any]]:
    """Yield a record per prompt, in the order in which they finish."""
    lines = [{"prompt": text} for text in prompt_texts]
    if prompts_file is not None:
        lines += read_prompt_lines(prompts_file)
    if not lines:
        raise PromptError("give --prompt or --prompts")
    tokenizer = load_tokenizer(config.verifier_spec.model)
    mode = config.router_policy.mode
    plan = SpeculationPlan(
        draft_length=0 if mode is PolicyMode.OFF else config.num_speculative_tokens,
        is_pinned=mode is PolicyMode.ALWAYS,
    )
    requests = [
        parse_request(line, request_id=f"prompt-{index}", defaults=sampling, plan=plan, tokenizer=tokenizer)
        for index, line in enumerate(lines)
    ]
    if plan.draft_length == 0:
        config = replace(config, num_drafters=0)  # nothing is loaded that nobody asks
    prices_drafts = mode is PolicyMode.AUTO and plan.draft_length > 0
    with OfflineEngine(config, drafter_process=drafter_process, prices_drafts=prices_drafts) as engine:
        for result in collect(requests, engine.generate(requests)):
            yield result_json(result, str(tokenizer.decode(result.token_ids, skip_special_tokens=True)))
