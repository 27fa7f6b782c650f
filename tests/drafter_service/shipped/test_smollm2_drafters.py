"""The shipped head drafts for the real model: text as without it, and drafts that are right often enough."""

from __future__ import annotations

import contextlib
import json

import pytest

from outrider.cluster import LLM, SamplingParams
from outrider.cluster.config.known_models import SMOLLM2, SMOLLM2_HUB_ID, path_of
from outrider.drafter_service.shipped import smollm2_drafters
from outrider.lab.chat_prompts import PROMPTS

NUM_PROMPTS = 6
MAX_TOKENS = 32
MAX_BYTES = 25_000_000
OPTIONS = {"max_model_len": 512, "max_num_seqs": NUM_PROMPTS, "dtype": "float32", "device": "cpu"}


def generated(**options):
    messages = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()[:NUM_PROMPTS]]
    with contextlib.closing(LLM(SMOLLM2, **OPTIONS, **options)) as llm:
        params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
        return llm.chat([[{"role": "user", "content": text}] for text in messages], params)


@pytest.mark.skipif(path_of(SMOLLM2) == SMOLLM2_HUB_ID, reason="SmolLM2 is not installed: make smollm2")
def test_the_head_is_right_often_enough_and_changes_no_token():
    plain = generated(speculation="off")
    drafted = generated(speculation="always", speculative_config={"location": "verifier"})
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    num_drafts = sum(each.metrics.num_drafts for each in drafted)
    num_accepted = sum(each.metrics.num_accepted_tokens for each in drafted)
    assert num_drafts > 0
    assert num_accepted / num_drafts > 0.15, "tokens of a draft that were right; a head that knows nothing has 0.0"


def test_the_heads_are_small_enough_to_ship():
    for folder in smollm2_drafters().values():
        assert (folder / "config.json").is_file()
        assert sum(file.stat().st_size for file in folder.iterdir()) <= MAX_BYTES
