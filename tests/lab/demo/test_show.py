"""Which drafter the demo has, what it asks, and what a log sees of a wait."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from outrider.cluster.config.service_config import ServiceConfig
from outrider.cluster.gateway.text_codec import TextCodec
from outrider.lab.demo.questions import questions_for
from outrider.lab.demo.show import STAND_IN, run, with_drafter
from outrider.lab.demo.waiting import SILENCE_S, show_wait
from outrider.verifier_service.model.tokenizer import load_tokenizer


def test_the_embedded_model_keeps_its_drafter():
    assert with_drafter(ServiceConfig(), num_cores=2) == ServiceConfig()


def test_one_without_gets_one_that_needs_no_checkpoint():
    unknown = ServiceConfig(model=ServiceConfig().model.target_path)  # by its folder, the model has no drafter
    config = with_drafter(unknown, num_cores=8)
    assert config.drafting.speculative_config == STAND_IN
    assert config.pools


@pytest.mark.parametrize(
    "options", [{"speculative_config": {"method": "ngram", "location": "verifier"}}, {"num_drafters": 0}]
)
def test_without_a_pool_there_is_nothing_to_kill(options: dict):
    with pytest.raises(ValueError, match="there must be one"):
        with_drafter(ServiceConfig(**options), num_cores=8)


def test_on_a_shared_cluster_nothing_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ValueError, match="unset RAY_ADDRESS"):
        run(ServiceConfig(), Console(file=io.StringIO()))


def test_the_embedded_model_goes_on_with_code_it_has_not_seen():
    codec = TextCodec(load_tokenizer(ServiceConfig().verifier_spec.model))
    questions = questions_for(None, codec)
    assert {question.path for question in questions.burst} == {"/v1/completions"}
    chats = questions_for("a chat model", codec)
    assert {question.path for question in (*chats.over_http, *chats.over_grpc, chats.long)} == {"/v1/chat/completions"}
    assert len({question.shown for question in chats.burst}) == 256
    assert questions.edits == ()
    assert all(edit.fields["prediction"]["content"] in edit.fields["messages"][0]["content"] for edit in chats.edits)


def test_a_log_is_told_now_and_then_that_a_wait_goes_on():
    written, now_s = io.StringIO(), 0.0
    with show_wait("waiting", 10, Console(file=written, width=20), clock=lambda: now_s) as on_work:
        on_work(1, "one")
        now_s = SILENCE_S
        on_work(5, "half")
        on_work(6, "more")
    assert written.getvalue() == "waiting …\nwaiting: half\n"
