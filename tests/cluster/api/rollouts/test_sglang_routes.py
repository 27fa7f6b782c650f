"""SGLang's native endpoints over real engines with tiny models: tokens, their laws and versions, aborts, updates."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.cluster.gateway.rollout_memory import RolloutMemory
from outrider.verifier_service.messages.request import SpeculationMetrics
from support.stack import Stack
from support.waiting import until
from tiny.models import make_model
from tiny.refits import perturb, tensors_of, trainer
from tiny.trained_fleet import TrainedFleet, trained_fleet

PROMPT = [5, 9, 13, 21, 34]
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 200, "ignore_eos": True}


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[TrainedFleet]:
    async with trained_fleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("weights") / "new"
    perturb(make_model()).save_pretrained(folder)
    return str(folder)


async def post(fleet: TrainedFleet, path: str, body: Any = None, status: int = 200) -> Any:
    answer = await fleet.http.post(path, json={} if body is None else body)
    assert answer.status_code == status, answer.text
    return answer.json() if answer.headers.get("content-type", "").startswith("application/json") else answer.text


async def generate(fleet: TrainedFleet, sampling: dict[str, Any] = GREEDY, **fields: Any) -> Any:
    return await post(fleet, "/generate", {"input_ids": PROMPT, "sampling_params": sampling, **fields})


def of_model(folder: str | None, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of the library's own model, and their log probabilities at temperature 1."""
    model = make_model() if folder is None else type(make_model()).from_pretrained(folder)
    ids, logprobs = list(prompt), []
    for _ in range(num_tokens):
        with torch.no_grad():
            row = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row[ids[-1]]))
    return ids[len(prompt) :], logprobs


# --- /generate ---


async def test_tokens_log_probabilities_and_counts_are_the_models(fleet: TrainedFleet):
    sampling = {"temperature": 1.0, "top_k": 1, "max_new_tokens": 8, "ignore_eos": True}
    sampling |= {"stop": None, "custom_params": {"return_top_p_token_ids": True}}
    answer = await generate(fleet, sampling, return_logprob=True, image_data=[])
    tokens, _ = of_model(None, PROMPT, 8)
    meta = answer["meta_info"]
    assert answer["output_ids"] == tokens
    assert [id_ for _, id_, _ in meta["output_token_logprobs"]] == tokens
    assert [logprob for logprob, _, _ in meta["output_token_logprobs"]] == [0.0] * 8  # the law after top_k = 1
    assert meta["input_token_logprobs"] == []
    assert meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (5, 8, 0)
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 8}]
    assert meta["weight_version"] == "default"


async def test_a_prompt_is_scored_without_a_token(fleet: TrainedFleet):
    answer = await generate(fleet, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=2, top_logprobs_num=2)
    with torch.no_grad():
        rows = make_model()(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1)
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [id_ for _, id_, _ in scored] == PROMPT[2:]
    assert scored[0][0] is None
    assert [logprob for logprob, _, _ in scored[1:]] == pytest.approx(
        [float(rows[2, 21]), float(rows[3, 34])], abs=1e-4
    )
    assert answer["output_ids"] == []
    assert answer["meta_info"]["input_top_logprobs"][1][0][1] == int(rows[2].argmax())


async def test_a_batch_is_a_list_in_the_prompts_order_with_their_choices(fleet: TrainedFleet):
    sampling = {"temperature": 1.0, "n": 2, "sampling_seed": 3, "max_new_tokens": 4, "ignore_eos": True}
    prompts = [PROMPT, [7, 8]]
    body = {"input_ids": prompts, "sampling_params": sampling, "rid": "batch", "return_prompt_token_ids": True}
    answers = await post(fleet, "/generate", body)
    assert [answer["prompt_token_ids"] for answer in answers] == [PROMPT, PROMPT, [7, 8], [7, 8]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["batch_0", "batch_0", "batch_1", "batch_1"]
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    assert await post(fleet, "/generate", body) == [{**answer, "meta_info": any_meta()} for answer in answers]


def any_meta() -> Any:
    class Any_:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, dict)

        __hash__ = None  # type: ignore[assignment]

    return Any_()


async def test_a_streams_events_grow(fleet: TrainedFleet):
    # salts apart: found KV would give a step another shape, and its numbers another rounding
    many = {**GREEDY, "max_new_tokens": 48}  # more than come at once
    whole = await generate(fleet, many, return_logprob=True, extra_key="whole")
    body = {"input_ids": PROMPT, "sampling_params": many, "return_logprob": True, "extra_key": "streamed"}
    body["stream"] = True
    async with fleet.http.stream("POST", "/generate", json=body) as answer:
        lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    assert len(events) > 1
    for before, after in itertools.pairwise(events):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


async def test_a_stop_token_is_in_the_tokens_and_named(fleet: TrainedFleet):
    tokens = (await generate(fleet))["output_ids"]
    answer = await generate(fleet, {**GREEDY, "stop_token_ids": [tokens[3]]}, return_logprob=True)
    first = tokens.index(tokens[3])
    assert answer["output_ids"] == tokens[: first + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokens[3]}
    assert answer["meta_info"]["output_token_logprobs_length"] == first + 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input_ids"),
        ({"input_ids": PROMPT, "text": "x"}, "input_ids"),
        ({"input_ids": [9999]}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": PROMPT, "sampling_params": {"temprature": 1.0}}, "temprature"),
        ({"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [PROMPT, PROMPT], "sampling_params": [{}]}, "sampling_params"),
        ({"input_ids": [PROMPT, PROMPT], "rid": ["a"]}, "rid"),
        ({"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 99}, "top_logprobs_num"),
        ({"input_ids": PROMPT, "image_data": ["x"]}, "image_data"),
        ({"input_ids": PROMPT, "sampling_params": {"logit_bias": {"x": 1.0}}}, "logit_bias"),
    ],
)
async def test_a_bad_field_is_named(body: dict[str, Any], field: str):
    answer = await Stack(rollouts=True, memory=RolloutMemory()).post("/generate", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert field in error["message"]


async def test_every_step_counts_as_a_verification():
    """A step without a draft, too: slime's acceptance length is the tokens, divided by the verifications."""
    speculation = SpeculationMetrics(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3, num_empty_rounds=1)
    stack = Stack([[5], [6, 7, 8], [9, 10]], speculation=speculation, rollouts=True, memory=RolloutMemory())
    answer = (await stack.post("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY})).json()
    counts = {name: value for name, value in answer["meta_info"].items() if name.startswith("spec_")}
    assert counts == {
        "spec_verify_ct": 3,
        "spec_accept_token_num": 3,
        "spec_num_correct_drafts": 3,
        "spec_draft_token_num": 6,
        "spec_num_proposed_drafts": 6,
        "spec_accept_rate": 0.5,
        "spec_accept_length": 2.0,
    }


# --- abort, pause, flush ---


async def test_an_abort_answers_200_with_the_tokens_so_far(fleet: TrainedFleet):
    running = asyncio.create_task(generate(fleet, LONG, rid="mine", return_logprob=True))
    other = asyncio.create_task(generate(fleet, LONG, rid="other"))
    await until(lambda: fleet.num_running == 2)
    await post(fleet, "/abort_request", {"rid": "mine"})
    answer = await running
    reason = answer["meta_info"]["finish_reason"]
    assert (reason["type"], reason["status_code"]) == ("abort", None)
    assert answer["output_ids"] == of_model(None, PROMPT, len(answer["output_ids"]))[0]
    assert not other.done()
    await post(fleet, "/abort_request", {"abort_all": True})
    assert (await other)["meta_info"]["finish_reason"]["type"] == "abort"
    await post(fleet, "/abort_request", {"rid": "unknown"})


async def test_a_pause_aborts_and_new_requests_wait_for_its_end(fleet: TrainedFleet):
    running = asyncio.create_task(generate(fleet, LONG))
    await until(lambda: fleet.num_running == 1)
    assert (await post(fleet, "/pause_generation"))["status"] == "ok"
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await fleet.http.get("/flush_cache")).status_code == 200
    assert (await fleet.http.get("/health_generate")).status_code == 200
    waiting = asyncio.create_task(generate(fleet))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert (await fleet.http.get("/v1/loads?include=core")).json()["loads"][0]["num_waiting_reqs"] == 1
    await post(fleet, "/continue_generation")
    assert (await waiting)["output_ids"] == of_model(None, PROMPT, 8)[0]
    assert (await fleet.http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 0


async def test_a_request_stopped_in_place_goes_on(fleet: TrainedFleet):
    running = asyncio.create_task(generate(fleet, {**LONG, "max_new_tokens": 60}))
    await until(lambda: fleet.num_running == 1)
    await post(fleet, "/pause_generation", {"mode": "in_place"})
    assert (await fleet.http.get("/flush_cache")).status_code == 400
    await post(fleet, "/continue_generation")
    assert (await running)["output_ids"] == of_model(None, PROMPT, 60)[0]


async def test_an_unknown_mode_is_refused(fleet: TrainedFleet):
    error = (await post(fleet, "/pause_generation", {"mode": "sleep"}, status=400))["error"]
    assert error["param"] == "mode"


async def test_health_generate_generates(fleet: TrainedFleet):
    assert (await fleet.http.get("/health_generate")).status_code == 200
    await fleet.verifiers.pop().stop()
    assert (await fleet.http.get("/health_generate")).status_code == 503


# --- weights ---


async def test_weights_from_a_folder_there_and_back(fleet: TrainedFleet, new: str):
    old = await generate(fleet)
    body = {"model_path": new, "weight_version": "step-1", "flush_cache": True, "load_format": None}
    answer = await post(fleet, "/update_weights_from_disk", body)
    assert answer["success"]
    assert "step-1" in answer["message"]
    assert (await fleet.http.get("/get_weight_version")).json()["weight_version"] == "step-1"
    changed = await generate(fleet)
    assert changed["output_ids"] == of_model(new, PROMPT, 8)[0] != old["output_ids"]
    assert changed["meta_info"]["weight_version"] == "step-1"
    await post(fleet, "/update_weights_from_disk", {"model_path": str(fleet.folder / "v0")})
    back = await generate(fleet)
    assert back["output_ids"] == old["output_ids"]
    assert back["meta_info"]["weight_version"] == "1"  # nobody named it: the first number


async def test_weights_from_a_trainers_group_in_buckets(fleet: TrainedFleet, new: str):
    names = list(tensors_of(new))
    with trainer() as training:
        # the trainer's start held the event loop, and so the verifiers' reports
        while not (await fleet.router.snapshot()).verifiers:
            await asyncio.sleep(0.01)
        init = training.joining
        joining = {
            "master_address": init.master_address,
            "master_port": str(init.master_port),  # as AReaL writes it
            "rank_offset": 1,
            "world_size": 2,
            "group_name": init.group_name,
            "backend": "gloo",
        }
        training.joins()
        assert (await post(fleet, "/init_weights_update_group", joining))["success"]
        await post(fleet, "/pause_generation")
        for bucket in (names[:5], names[5:]):
            assert (await fleet.http.get("/get_weight_version")).json()["weight_version"] == "default"
            message = training.sends(new, bucket)
            update = {
                "names": list(message.names),
                "dtypes": list(message.dtypes),
                "shapes": [list(shape) for shape in message.shapes],
                "group_name": init.group_name,
                "weight_version": "2",
                "flush_cache": False,
            }
            answer = await post(fleet, "/update_weights_from_distributed", update)
            if bucket[0] == names[0]:
                assert "tensors are missing" in answer["message"]
                refused = (await post(fleet, "/continue_generation", status=400))["error"]
                assert "half here" in refused["message"]
        await post(fleet, "/continue_generation")
        assert (await generate(fleet))["output_ids"] == of_model(new, PROMPT, 8)[0]
        assert (await post(fleet, "/destroy_weights_update_group", {"group_name": init.group_name}))["success"]


async def test_an_answer_that_crosses_an_update_says_which_tokens_are_whose(fleet: TrainedFleet, new: str):
    running = asyncio.create_task(generate(fleet, {**LONG, "max_new_tokens": 120}))
    await until(lambda: fleet.num_running == 1)
    await post(fleet, "/pause_generation", {"mode": "in_place"})
    await post(fleet, "/update_weights_from_disk", {"model_path": new, "weight_version": "b"})
    await post(fleet, "/continue_generation")
    answer = await running
    first, second = answer["meta_info"]["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "b", 120)
    assert first["end"] == second["start"] > 0
    assert answer["output_ids"][: first["end"]] == of_model(None, PROMPT, first["end"])[0]
    assert answer["meta_info"]["weight_version"] == "b"


async def test_a_folder_that_does_not_fit_changes_nothing(fleet: TrainedFleet, tmp_path: Path):
    make_model(hidden_size=32).save_pretrained(tmp_path / "narrow")
    answer = await post(fleet, "/update_weights_from_disk", {"model_path": str(tmp_path / "narrow")}, status=400)
    assert not answer["success"]
    assert "another model" in answer["message"]
    assert (await generate(fleet))["output_ids"] == of_model(None, PROMPT, 8)[0]


async def test_weights_that_are_not_finite_are_refused_by_the_tensors_name_and_the_old_ones_answer(
    fleet: TrainedFleet, new: str, tmp_path: Path
):
    shutil.copytree(new, tmp_path / "spoilt")
    tensors = tensors_of(new)
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, tmp_path / "spoilt" / "model.safetensors", {"format": "pt"})
    body = {"model_path": str(tmp_path / "spoilt"), "weight_version": "7"}
    answer = await post(fleet, "/update_weights_from_disk", body, status=400)
    assert "'model.norm.weight' has numbers that are not finite" in answer["message"]
    found = (await fleet.http.get("/get_weight_version")).json()
    assert found == {"weight_version": "default", "weight_digest": ""}
    assert (await generate(fleet))["output_ids"] == of_model(None, PROMPT, 8)[0]
    assert (await post(fleet, "/update_weights_from_disk", {"model_path": new, "weight_version": "7"}))["success"]


async def test_one_change_at_a_time(tmp_path: Path, new: str):
    """Two at once left verifiers with different weights by one name, in one of four tries."""
    async with trained_fleet(tmp_path, num_verifiers=2) as fleet:
        old = str(fleet.folder / "v0")
        for number in range(4):
            bodies = [{"model_path": folder, "weight_version": str(number)} for folder in (new, old)]
            calls = [fleet.http.post("/update_weights_from_disk", json=body) for body in bodies]
            assert sorted(answer.status_code for answer in await asyncio.gather(*calls)) == [200, 409]
            found = (await fleet.http.get("/get_weight_version")).json()
            assert found["weight_version"] == str(number)
            assert len(found["weight_digest"].split(",")) == 1
            assert len({(await generate(fleet, rid=str(index)))["output_ids"][0] for index in range(6)}) == 1


async def test_a_trainer_that_accepts_and_says_nothing_stops_no_stream(fleet: TrainedFleet, new: str):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "group_name": "g"}
        body = {**where, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
        joining = asyncio.create_task(fleet.http.post("/init_weights_update_group", json=body))
        connection, _ = await asyncio.to_thread(silent.accept)
        for number in range(3):
            assert (await generate(fleet, rid=str(number)))["output_ids"] == of_model(None, PROMPT, 8)[0]
        assert not joining.done()
        body = {"model_path": new, "weight_version": "7"}
        assert "another change" in (await post(fleet, "/update_weights_from_disk", body, status=409))["message"]
        assert (await post(fleet, "/destroy_weights_update_group", {"group_name": "g"}))["success"]
        assert (await joining).status_code == 400
        connection.close()
        assert (await post(fleet, "/update_weights_from_disk", body))["success"]


@pytest.mark.parametrize("version", ["9" * 5000, "a,b", "a\0b"])
async def test_a_name_that_later_updates_would_stumble_over_is_refused(fleet: TrainedFleet, new: str, version: str):
    body = {"model_path": new, "weight_version": version}
    assert "weight_version must be" in (await post(fleet, "/update_weights_from_disk", body, status=400))["message"]
    assert (await post(fleet, "/update_weights_from_disk", {"model_path": new}))["success"]


async def test_a_drafter_has_an_update_of_its_own(fleet: TrainedFleet, new: str):
    body = {"model_path": new, "selector": "draft"}
    answer = await post(fleet, "/update_weights_from_disk", body, status=400)
    assert "verifier v0: " in answer["message"]
    assert "draft" in answer["message"]
    assert (await fleet.http.get("/get_weight_version")).json()["weight_version"] == "default"
    refused = await post(fleet, "/update_weights_from_disk", {**body, "selector": "all"}, status=400)
    assert refused["error"]["param"] == "selector"


async def test_pickled_tensors_are_refused_by_name(fleet: TrainedFleet):
    error = (await post(fleet, "/update_weights_from_tensor", status=400))["error"]
    assert "pickled" in error["message"]


async def test_a_group_too_small_for_the_verifiers_is_refused_before_anyone_waits(fleet: TrainedFleet):
    body = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 1}
    answer = await post(fleet, "/init_weights_update_group", body, status=400)
    assert "world_size" in answer["message"]


async def test_slime_reads_what_it_compares(fleet: TrainedFleet):
    info = (await fleet.http.get("/server_info")).json()
    assert (info["tp_size"], info["pp_size"], info["num_gpus"], info["disaggregation_mode"]) == (1, 1, 1, "null")
    assert info["enable_memory_saver"] is False
    assert info["vllm_config"]["model_config"]["dtype"] == "float32"  # TRL's
    assert info["weight_version"] == "default"


# --- two verifiers ---


async def test_a_verifier_that_missed_an_update_gets_no_request(tmp_path: Path, new: str):
    async with trained_fleet(tmp_path, num_verifiers=2) as fleet:
        await post(fleet, "/update_weights_from_disk", {"model_path": new, "weight_version": "7"})
        expected = of_model(new, PROMPT, 8)[0]
        late = await fleet.add_verifier("v2")
        for _ in range(12):
            answer = await generate(fleet, {**GREEDY}, extra_key=None)
            assert (answer["output_ids"], answer["meta_info"]["weight_version"]) == (expected, "7")
        assert (await fleet.http.get("/get_weight_version")).json()["weight_version"] == "7,default"
        assert late.runner is not None
        for verifier in fleet.verifiers[:2]:
            await verifier.stop()
        del fleet.verifiers[:2]
        answer = await generate(fleet)  # the only ones left: their version says which
        assert answer["meta_info"]["weight_version"] == "default"


async def test_one_verifier_that_refuses_is_named(tmp_path: Path):
    async with trained_fleet(tmp_path, num_verifiers=2) as fleet:
        answer = await post(fleet, "/update_weights_from_disk", {"model_path": "/nowhere"}, status=400)
        assert "verifier v" in answer["message"]
        assert "there is no folder /nowhere" in answer["message"]


async def test_the_document_names_every_operation_once(fleet: TrainedFleet):
    document = (await fleet.http.get("/openapi.json")).json()
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)
