"""The engine that plays: what it says in each mode, and that its books are the real engine's."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafter_service import embedded
from outrider.lab.gateway.played_engine import PlayedRunner, played_engine
from outrider.lab.gateway.played_spec import Asked, OnTime, PlayedSpec, Scripted
from outrider.verifier_service.engine.engine import VerifierEngine
from outrider.verifier_service.engine.verifier_spec import VerifierSpec
from outrider.verifier_service.links.relay_client import RelayDraftClient
from outrider.verifier_service.messages.request import FinishReason, GenerationRequest, RequestOutput, SamplingParams
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.tokenizer import load_tokenizer

VOCAB_SIZE, EOS = 64, 0
MODEL = ModelConfig(path=str(embedded.target_path()), device="cpu")


def spec_of(says: OnTime | Scripted | Asked, *, step_s: float = 0.0) -> PlayedSpec:
    verifier = VerifierSpec(model=MODEL)
    return PlayedSpec(verifier=verifier, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,), says=says, step_s=step_s)


class Playing:
    """An engine that plays, and how long it has paused."""

    def __init__(self, says: OnTime | Scripted | Asked, *, step_s: float = 0.0) -> None:
        spec = spec_of(says, step_s=step_s)
        self.pauses_s: list[float] = []
        runner = PlayedRunner(spec, pause=self.pauses_s.append)
        self.engine: VerifierEngine = played_engine(spec, RelayDraftClient(), runner)

    def ask(self, request_id: str, *, prompt: Sequence[int] = (5, 6, 7), **sampling: object) -> None:
        params = SamplingParams(temperature=0.0, **{"max_tokens": 8, **sampling})  # type: ignore[arg-type]
        message = GenerationRequest(request_id=request_id, prompt_token_ids=tuple(prompt), sampling=params)
        assert self.engine.add(message) is None

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step() or []
        self.engine.check_integrity()
        return outputs

    def run(self) -> dict[str, list[RequestOutput]]:
        found: dict[str, list[RequestOutput]] = {}
        while self.engine.has_work():
            for output in self.step():
                found.setdefault(output.request_id, []).append(output)
        return found


def tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def test_on_time_everybody_says_a_token_a_step_over_and_over() -> None:
    playing = Playing(OnTime(token_ids=(11, 12, 13)), step_s=0.006)
    playing.ask("a", max_tokens=7)
    playing.ask("b", max_tokens=2, prompt=range(1, 40))
    found = playing.run()
    assert tokens(found["a"]) == [11, 12, 13, 11, 12, 13, 11]
    assert tokens(found["b"]) == [11, 12]
    assert all(len(output.token_ids) == 1 for output in found["a"])
    assert found["a"][-1].finish_reason is FinishReason.LENGTH
    assert playing.pauses_s == [0.006] * 7


def test_a_script_is_said_in_turn_and_ends() -> None:
    playing = Playing(Scripted(sequences=((21, 22, 23), (31,))))
    for name in "abc":
        playing.ask(name)
    found = playing.run()
    assert {name: tokens(outputs) for name, outputs in found.items()} == {
        "a": [21, 22, 23, EOS],
        "b": [31, EOS],
        "c": [21, 22, 23, EOS],
    }
    assert {outputs[-1].finish_reason for outputs in found.values()} == {FinishReason.STOP}


def test_turns_go_on_with_requests_that_come_later_and_what_has_ended_is_forgotten() -> None:
    playing = Playing(Scripted(sequences=((21,), (31,), (41,))))
    playing.ask("a")
    playing.step()
    playing.ask("b")
    playing.engine.cancel("a")
    assert tokens(playing.run()["b"]) == [31, EOS]
    playing.ask("a")  # the same name again is another request
    assert tokens(playing.run()["a"]) == [41, EOS]


def test_what_is_asked_is_answered_whoever_comes_first() -> None:
    longer, shorter = (load_tokenizer(MODEL).decode(ids) for ids in ([35, 36, 37], [36]))
    playing = Playing(Asked(replies=((longer, (21, 22)), (shorter, (31,)), ("", (41,)))))
    for name, prompt in {"a": (40, 41), "b": (40, 35, 36, 37, 41), "c": (40, 36)}.items():
        playing.ask(name, prompt=prompt)
    found = playing.run()
    said = {name: tokens(outputs) for name, outputs in found.items()}
    assert said == {"a": [41, EOS], "b": [21, 22, EOS], "c": [31, EOS]}


def test_what_a_lost_verifier_has_said_is_not_said_again() -> None:
    playing = Playing(Scripted(sequences=((21, 22, 23),)))
    message = GenerationRequest(
        request_id="a",
        prompt_token_ids=(5,),
        output_token_ids=(21,),
        sampling=SamplingParams(temperature=0.0, max_tokens=8),
    )
    assert playing.engine.add(message) is None
    assert tokens(playing.run()["a"]) == [22, 23, EOS]


def test_a_context_of_128_k_has_room() -> None:
    playing = Playing(OnTime(token_ids=(11,)))
    playing.ask("a", max_tokens=2, prompt=[3] * 130_000)
    assert tokens(playing.run()["a"]) == [11, 11]
