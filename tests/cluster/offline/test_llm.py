"""`LLM` with tiny random models: vLLM's names and meanings, and the tokens of transformers' own `generate`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fakes.backend import CALL_ARGUMENTS, CALL_TEMPLATES, build_tokenizer, calls_template, chat_of_call
from outrider.cluster import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from outrider.cluster.cli.generate import generate
from outrider.cluster.offline.llm import OPTIONS, offline_config
from tiny.models import full_logits, make_checkpoint

TEXTS = ["the quick brown", "fox jumps over", "größer 日本語 and the lazy dog"]
SIZES = {"max_model_len": 96, "kv_cache_memory_bytes": 4 << 20, "device": "cpu"}
Target = tuple[Path, PreTrainedModel]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Target:
    folder = tmp_path_factory.mktemp("target")
    model = make_checkpoint(folder, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return folder, model


@pytest.fixture(scope="module")
def llm(target: Target) -> Iterator[LLM]:
    with LLM(target[0], speculative_config={"method": "ngram"}, speculation="always", **SIZES) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(target: Target, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """What the library's own greedy loop writes after each of TEXTS."""
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}
    found = []
    for text in TEXTS:
        ids = torch.tensor([tokenizer.encode(text)])
        written = target[1].generate(ids, attention_mask=torch.ones_like(ids), **options)
        found.append(written[0, ids.shape[1] :].tolist())
    return found


def first(outputs: list[RequestOutput]) -> CompletionOutput:
    return outputs[0].outputs[0]


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# --- tokens ---


def test_without_parameters_sampling_is_the_models(target: Target, tmp_path: Path):
    shutil.copytree(target[0], tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 1, "max_new_tokens": 5}))
    greedy = SamplingParams(temperature=0, max_tokens=5)
    for mode in ("auto", "vllm"):
        with LLM(tmp_path, generation_config=mode, num_speculative_tokens=0, seed=3, **SIZES) as opened:
            own, expected = opened.generate(TEXTS), opened.generate(TEXTS, greedy)
        assert (token_ids(own) == token_ids(expected)) is (mode == "auto")


def test_a_draft_model_of_shorter_context_drafts_within_it(target: Target, llm: LLM, tmp_path: Path):
    shutil.copytree(target[0], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 48}))
    prompts = [{"prompt_token_ids": [7 + index % 5 for index in range(length)]} for length in (4, 30, 60)]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    with LLM(target[0], draft_model=tmp_path, speculation="always", **SIZES) as drafted:
        within, across, beyond = outputs = drafted.generate(prompts, params)
    assert token_ids(outputs) == token_ids(llm.generate(prompts, params))
    assert within.metrics.num_accepted_tokens > across.metrics.num_accepted_tokens > 0
    assert beyond.metrics.num_accepted_tokens == 0


def test_greedy_tokens_are_those_of_transformers(llm: LLM, expected: list[list[int]], tokenizer):
    outputs = llm.generate(TEXTS, GREEDY)
    assert token_ids(outputs) == expected
    for text, output in zip(TEXTS, outputs, strict=True):
        assert (output.prompt, output.prompt_token_ids) == (text, tokenizer.encode(text))
        assert (output.finished, output.error, output.prompt_logprobs) == (True, None, None)
        (completion,) = output.outputs
        assert (completion.index, completion.finish_reason, completion.stop_reason) == (0, "length", None)
        assert completion.text == tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        assert (completion.logprobs, completion.cumulative_logprob) == (None, None)


@pytest.mark.parametrize("drafts", ["off", "always"])
def test_processed_logprobs_are_of_the_law_that_was_drawn_from(target: Target, drafts: str):
    options = {"speculative_config": {"method": "ngram"}, "speculation": drafts, **SIZES}
    asked = SamplingParams(temperature=0.4, seed=3, max_tokens=12, ignore_eos=True, logprobs=0)
    with LLM(target[0], logprobs_mode="processed_logprobs", **options) as llm:
        (output,) = llm.generate(TEXTS[0], asked)
    completion = first([output])
    laws = torch.log_softmax(full_logits(target[1], output.prompt_token_ids + completion.token_ids) / 0.4, dim=1)
    assert completion.logprobs is not None
    for place, by_id in enumerate(completion.logprobs, start=len(output.prompt_token_ids) - 1):
        ((token_id, shown),) = by_id.items()
        assert shown.logprob == pytest.approx(laws[place, token_id].item(), abs=5e-4)


@pytest.mark.parametrize("drafter", ["none", "model", "process"])
def test_whoever_drafts_they_stay_the_same(target: Target, expected, drafter: str):
    folder = str(target[0])
    options: dict[str, Any] = {
        "none": {"speculation": "off", "draft_model": "/nowhere"},  # not loaded: nobody asks it
        "model": {"speculative_config": {"model": folder, "num_speculative_tokens": 3}, "speculation": "always"},
        "process": {"draft_model": folder, "speculation": "always", "drafter_process": True},
    }[drafter]
    with LLM(folder, **options, **SIZES) as other:
        outputs = other.generate(TEXTS, GREEDY)
    assert token_ids(outputs) == expected
    num_accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    assert num_accepted == 0 if drafter == "none" else num_accepted > 0


def test_prompts_come_in_several_forms_and_are_answered_in_their_order(llm: LLM, expected, tokenizer):
    ids = {"prompt_token_ids": tokenizer.encode(TEXTS[1])}
    mixed = llm.generate([{"prompt": TEXTS[2]}, ids, TEXTS[0]], GREEDY)
    assert token_ids(mixed) == [expected[2], expected[1], expected[0]]
    assert [output.prompt for output in mixed] == [TEXTS[2], None, TEXTS[0]]
    numbers = [int(output.request_id) for output in mixed]
    assert numbers == sorted(set(numbers))
    for one in (TEXTS[0], {"prompt": TEXTS[0]}):
        (output,) = llm.generate(one, GREEDY)
        assert output.outputs[0].token_ids == expected[0]
        assert int(output.request_id) > numbers[-1]
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_sampling_of_its_own(llm: LLM, expected):
    params = [SamplingParams(temperature=0, max_tokens=size, ignore_eos=True) for size in (9, 2, 5)]
    outputs = llm.generate(TEXTS, params)
    assert token_ids(outputs) == [ids[:size] for ids, size in zip(expected, (9, 2, 5), strict=True)]
    finished = [output.request_id for output in llm.as_completed(TEXTS, params)]
    assert sorted(finished, key=int) != finished, "the shortest ends first"


def test_texts_come_piece_by_piece(llm: LLM):
    prompts = [*TEXTS, {"prompt_token_ids": [5] * 500}]
    params = [SamplingParams(temperature=0, max_tokens=size, ignore_eos=True) for size in (9, 2, 5, 5)]
    outputs = llm.generate(prompts, params)
    pieces = list(llm.as_generated(prompts, params))
    first_id = int(outputs[-1].request_id) + 1
    by_prompt = [[piece for piece in pieces if piece.request_id == str(first_id + place)] for place in range(4)]
    for own, output in zip(by_prompt, outputs, strict=True):
        assert "".join(piece.text for piece in own) == output.outputs[0].text
        assert [piece.finish_reason for piece in own[:-1]] == [None] * (len(own) - 1)
        assert (own[-1].finish_reason, own[-1].error) == (output.outputs[0].finish_reason, output.error)
    assert len(by_prompt[0]) > 2
    assert pieces.index(by_prompt[1][-1]) < pieces.index(by_prompt[0][-1])


def test_several_outputs_of_a_seed_differ_and_repeat(llm: LLM):
    params = SamplingParams(n=3, seed=5, max_tokens=10, ignore_eos=True)
    (output,), (again,) = llm.generate(TEXTS[0], params), llm.generate(TEXTS[0], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert again.outputs == output.outputs
    (last,) = llm.generate(TEXTS[0], SamplingParams(seed=5, max_tokens=10, ignore_eos=True, choice_index=2))
    assert last.outputs[0].token_ids == output.outputs[2].token_ids


def test_no_limit_means_the_models(llm: LLM, tokenizer):
    (output,) = llm.generate(TEXTS[0], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == SIZES["max_model_len"]
    assert output.outputs[0].finish_reason == "length"


# --- how outputs end, and what is told of them ---


def test_a_stop_string_ends_the_text_and_frees_what_it_held(llm: LLM, expected, tokenizer):
    pieces = [tokenizer.decode([id_]) for id_ in expected[0]]
    place = next(index for index in range(3, 9) if "\ufffd" not in pieces[index] and pieces[index].strip())
    stop = pieces[place]
    whole = tokenizer.decode(expected[0])
    for includes in (False, True):
        stops = {"stop": ["no such text", stop], "include_stop_str_in_output": includes}
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **stops)
        completion = first(llm.generate(TEXTS[0], params))
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        end = whole.index(stop) + (len(stop) if includes else 0)
        assert completion.text == whole[:end]
        assert completion.token_ids == expected[0][: len(completion.token_ids)]
        assert len(completion.token_ids) <= place + 1
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    outputs = llm.as_completed([TEXTS[0], TEXTS[1]], [params, long])
    assert next(outputs).prompt == TEXTS[0]
    assert [request.sampling.max_tokens for request in llm._engine.engine.requests.values()] == [60]
    outputs.close()
    llm._engine.engine.check_integrity()


def test_a_stop_token_is_in_the_tokens_but_not_in_the_text(llm: LLM, expected, tokenizer):
    stop = expected[1][4]
    place = expected[1].index(stop)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[stop])
    completion = first(llm.generate(TEXTS[1], params))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == expected[1][: place + 1]
    assert completion.text == tokenizer.decode(expected[1][:place])


def test_the_end_of_the_sequence_has_no_stop_reason(llm: LLM):
    end = 2  # the tiny models' own
    params = SamplingParams(temperature=0, max_tokens=5, logit_bias={end: 100}, skip_special_tokens=False)
    completion = first(llm.generate(TEXTS[0], params))
    assert (completion.token_ids, completion.text) == ([end], "")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    longer = first(llm.generate(TEXTS[0], SamplingParams(temperature=0, min_tokens=3, logit_bias={end: 100})))
    assert len(longer.token_ids) == 4


def test_log_probabilities_are_the_models_own(llm: LLM, target, tokenizer):
    (output,) = llm.generate(
        TEXTS[0], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    )
    (completion,) = output.outputs
    ids = output.prompt_token_ids + completion.token_ids
    laws = torch.log_softmax(full_logits(target[1], ids), dim=-1)
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 4
    for place, by_id in enumerate(completion.logprobs, start=len(output.prompt_token_ids) - 1):
        assert list(by_id) == laws[place].topk(2).indices.tolist()  # greedy: its own is the likeliest
        assert [shown.rank for shown in by_id.values()] == [1, 2]
        for other, shown in by_id.items():
            assert shown.logprob == pytest.approx(laws[place, other].item(), abs=1e-4)
    own = [by_id[token_id].logprob for token_id, by_id in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(own))
    assert output.prompt_logprobs is not None
    nothing, *others = output.prompt_logprobs
    assert nothing is None
    for place, by_id in enumerate(others):
        ((token_id, shown),) = by_id.items()
        assert token_id == ids[place + 1]
        assert shown == Logprob(
            logprob=pytest.approx(laws[place, token_id].item(), abs=1e-4),
            rank=int((laws[place] > laws[place, token_id]).sum()) + 1,
            decoded_token=tokenizer.decode([token_id]),
        )


def test_a_form_is_kept_to(llm: LLM):
    params = SamplingParams(temperature=1, max_tokens=30, structured_outputs={"choice": ["fox", "lazy dog"]})
    assert {first(llm.generate(TEXTS[0], params)).text for _ in range(6)} <= {"fox", "lazy dog"}


def test_what_the_engine_refuses_is_that_prompts_error_alone(llm: LLM, expected):
    outputs = llm.generate([TEXTS[0], {"prompt_token_ids": [5] * 500}, {"prompt_token_ids": [10**6]}], GREEDY)
    assert [output.error is None for output in outputs] == [True, False, False]
    assert "prompt of 500 tokens" in (outputs[1].error or "")
    assert "prompt_token_ids" in (outputs[2].error or "")
    assert outputs[0].outputs[0].token_ids == expected[0]
    assert outputs[1].outputs == [CompletionOutput(index=0, text="", token_ids=[], finish_reason="error")]


# --- chats ---


def test_a_chat_goes_through_the_template(llm: LLM, tokenizer):
    rendered = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    (one,) = llm.chat(MESSAGES, GREEDY)
    assert (one.prompt, one.prompt_token_ids) == (rendered, tokenizer.encode(rendered, add_special_tokens=False))
    several = llm.chat([MESSAGES, [*MESSAGES, *MESSAGES]], GREEDY)
    assert several[0].outputs == one.outputs
    assert len(several) == 2
    (same,) = llm.generate({"messages": MESSAGES}, GREEDY)
    assert same.outputs == one.outputs
    (open_,) = llm.chat(MESSAGES, GREEDY, add_generation_prompt=False)
    assert rendered.startswith(open_.prompt or "")
    assert open_.prompt != rendered
    (own,) = llm.chat(MESSAGES, GREEDY, chat_template="{{ messages[0]['content'] }}!")
    assert own.prompt == "the quick fox!"


@pytest.mark.parametrize("kind", CALL_TEMPLATES)
@pytest.mark.parametrize("arguments", [CALL_ARGUMENTS, json.loads(CALL_ARGUMENTS)])
def test_calls_made_before_are_written_in_whichever_form_they_come(llm: LLM, kind: str, arguments: Any):
    body, written = CALL_TEMPLATES[kind]
    (output,) = llm.chat(chat_of_call(arguments), GREEDY, chat_template=calls_template(body))
    assert output.prompt == f"[user]fox[assistant]{written}[assistant]"


def test_arguments_that_no_template_can_walk_are_named(llm: LLM):
    template = calls_template(CALL_TEMPLATES["walks"][0])
    with pytest.raises(ValueError, match=r"^messages\[1\]: messages: tool_calls: function.arguments of 'weather'"):
        llm.chat([MESSAGES, chat_of_call('{"city')], GREEDY, chat_template=template)


def test_a_template_writes_its_own_special_tokens(tmp_path: Path):
    tokenizer = build_tokenizer()
    start = tokenizer.convert_tokens_to_ids("<|start|>")
    own = tokenizer.backend_tokenizer
    own.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", start)])
    make_checkpoint(tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(tmp_path)
    with LLM(tmp_path, speculation="off", **SIZES) as llm:
        (text,), (chat,) = llm.generate("the fox", GREEDY), llm.chat(MESSAGES, GREEDY)
    assert text.prompt_token_ids == [start, *tokenizer.encode("the fox", add_special_tokens=False)]
    assert [chat.prompt_token_ids[0], chat.prompt_token_ids[1] == start] == [start, False]


def test_a_model_without_a_template_says_so(tmp_path: Path, tokenizer):
    make_checkpoint(tmp_path, vocab_size=len(tokenizer))
    build_tokenizer(chat_template=None).save_pretrained(tmp_path)
    with LLM(tmp_path, speculation="off", **SIZES) as plain:
        with pytest.raises(ValueError, match=r"^messages: this model has no chat template"):
            plain.chat(MESSAGES)
        (output,) = plain.chat(MESSAGES, GREEDY, chat_template="{{ messages[0]['content'] }}")
    assert output.prompt == "the quick fox"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "^messages must be a list of messages"),
        ([MESSAGES, []], r"^messages\[1\] must be a list of messages"),
        ([MESSAGES, [{"role": "bad", "content": "x"}]], r"^messages\[1\]: .*no such role"),
    ],
)
def test_messages_that_do_not_fit_are_named(llm: LLM, messages: Any, message: str):
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, GREEDY)


# --- what is refused, and how it is closed ---


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([TEXTS[0], 3], GREEDY, r"^prompts\[1\] must be a text"),
        ({"prompt": TEXTS[0], "temperature": 1}, GREEDY, "^prompts: unknown field 'temperature'"),
        (3, GREEDY, "^prompts must be"),
        (TEXTS, [GREEDY], "^sampling_params must be one, or one for each of 3 prompts, not 1"),
        (TEXTS, {"temperature": 0}, "^sampling_params must be a SamplingParams"),
    ],
)
def test_wrong_calls_are_named(llm: LLM, prompts: Any, params: Any, message: str):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_paralel_size": 2}, "unknown option 'tensor_paralel_size'; did you mean 'tensor_parallel_size'"),
        ({"port": 80}, "unknown option 'port'"),
        ({"pipeline_parallel_size": 2}, "unknown option 'pipeline_parallel_size'"),
        ({"enable_expert_parallel": True}, "unknown option 'enable_expert_parallel'"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1"),
        ({"dtype": "float8"}, "dtype"),
        ({"speculation": "sometimes"}, "speculation must be"),
        ({"speculative_config": {"method": "ngam"}}, "unknown method 'ngam'; did you mean 'ngram'"),
        ({"speculative_config": {"num_speculative_tokens_per_batch_size": [[1, 2, 3]]}}, "only a server follows it"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LLM(**options)


def test_the_options_are_those_of_the_command_line():
    own = {"generation_config"}  # of prompts without `SamplingParams`, which the command never has
    own |= {parameter.name for parameter in generate.params if isinstance(parameter, click.Option | click.Argument)}
    assert set(OPTIONS) - {"check_integrity"} <= own
    assert offline_config({"seed": None}) == offline_config({})


def test_an_iterator_that_is_left_cancels_the_others(llm: LLM, expected):
    outputs = llm.as_completed(TEXTS, [SamplingParams(max_tokens=1), GREEDY, GREEDY])
    assert next(outputs).prompt == TEXTS[0]
    with pytest.raises(RuntimeError, match="generating for another call"):
        llm.generate(TEXTS[0])
    outputs.close()
    assert not llm._engine.engine.requests
    assert token_ids(llm.generate(TEXTS, GREEDY)) == expected


def test_an_iterator_that_outlives_its_llm_says_so(target: Target):
    with LLM(target[0], speculation="off", **SIZES) as llm:
        outputs = llm.as_completed(TEXTS, [SamplingParams(max_tokens=1), GREEDY, GREEDY])
        next(outputs)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        next(outputs)


def test_a_closed_one_says_so(target: Target):
    llm = LLM(target[0], speculation="off", **SIZES)
    llm.generate(TEXTS[0], GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(TEXTS[0], GREEDY)


def test_progress_is_shown_on_stderr_where_it_is_asked_for(llm: LLM, capsys: pytest.CaptureFixture[str]):
    llm.generate(TEXTS[0], GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(TEXTS[0], GREEDY, use_tqdm=True)
    shown = capsys.readouterr()
    assert "prompts" in shown.err
    assert shown.out == ""


def test_the_names_are_loaded_when_they_are_used():
    code = """
import sys
import outrider.cluster
heavy = {"torch", "transformers", "ray"}
print(sys.modules.keys() & heavy, sorted({"LLM", "SamplingParams", "RequestOutput"} - set(dir(outrider.cluster))))
from outrider.cluster import SamplingParams
print(sys.modules.keys() & heavy)
try:
    outrider.cluster.LLMs
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "set() []",
        "set()",
        "module 'outrider.cluster' has no attribute 'LLMs'",
    ]
