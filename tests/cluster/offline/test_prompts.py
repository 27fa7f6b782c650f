import pytest

from outrider.cluster.offline.prompts import PromptError, collect, parse_request, read_prompt_lines, result_json
from outrider.verifier_service.messages.request import (
    AcceptanceRule,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    SamplingParams,
    SpeculationMetrics,
    SpeculationPlan,
    StructuredKind,
    StructuredOutput,
)


def parse(line, tokenizer):
    return parse_request(
        line, request_id="prompt-0", defaults=SamplingParams(max_tokens=9), plan=SpeculationPlan(), tokenizer=tokenizer
    )


def test_line_may_carry_text_or_ids_and_its_own_sampling(tokenizer):
    request = parse({"prompt_token_ids": [1, 2], "temperature": 0.5, "seed": 3, "stop_token_ids": [4]}, tokenizer)
    assert request.prompt_token_ids == (1, 2)
    assert request.sampling == SamplingParams(max_tokens=9, temperature=0.5, seed=3, stop_token_ids=(4,))
    text = "hello world"
    assert parse({"prompt": text}, tokenizer).prompt_token_ids == tuple(tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({}, "either prompt or prompt_token_ids"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either prompt or prompt_token_ids"),
        ({"prompt": 3}, "prompt must be a string"),
        ({"prompt_token_ids": [1.5]}, "list of integers"),
        ({"prompt": "a", "temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'"),
        ({"prompt": "a", "top_p": 2}, "top_p must be"),
        ({"prompt": "a", "temperature": "hot"}, "prompt-0"),
    ],
)
def test_bad_lines_name_what_is_wrong(line, message, tokenizer):
    with pytest.raises(PromptError, match=message):
        parse(line, tokenizer)


def test_bad_file_names_the_line(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\nnot json\n')
    with pytest.raises(PromptError, match=r"prompts.jsonl:3"):
        read_prompt_lines(path)
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert read_prompt_lines(path) == [{"prompt": "a"}, {"prompt": "b"}]


def test_results_are_yielded_as_they_finish():
    requests = [GenerationRequest(request_id=name, prompt_token_ids=(1,)) for name in "ab"]
    metrics = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=8, num_accepted_tokens=4)
    outputs = [
        RequestOutput(request_id="a", token_ids=(1,)),
        RequestOutput(request_id="b", token_ids=(2,), finish_reason=FinishReason.LENGTH, speculation=metrics),
        RequestOutput(request_id="a", token_ids=(3, 4), finish_reason=FinishReason.STOP),
    ]
    results = list(collect(requests, outputs))
    assert [(result.request.request_id, result.token_ids) for result in results] == [("b", [2]), ("a", [1, 3, 4])]
    record = result_json(results[0], "text")
    assert record["finish_reason"] == "length"
    assert record["metrics"]["speculative_decoding"]["mean_acceptance_length"] == 3
    assert record["metrics"]["speculative_decoding"]["draft_acceptance_rate"] == 0.5


def test_structured_output_and_the_acceptance_rule_are_spelled_as_over_http(tokenizer):
    line = {"prompt_token_ids": [5], "guided_choice": ["a", "b"], "rejection_sample_method": "block"}
    sampling = parse(line, tokenizer).sampling
    assert sampling.structured == StructuredOutput(kind=StructuredKind.CHOICE, choices=("a", "b"))
    assert sampling.acceptance is AcceptanceRule.BLOCK


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rejection_sample_method": "blocks"}, "blocks"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"structured": {"kind": "regex"}}, "unknown field 'structured'"),
    ],
)
def test_what_is_wrong_with_them_is_named(tokenizer, fields, named):
    with pytest.raises(PromptError, match=named):
        parse({"prompt_token_ids": [5], **fields}, tokenizer)
