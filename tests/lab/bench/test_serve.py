"""`outrider bench serve` against the HTTP application on a real port."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from matplotlib.image import imread
from transformers import PreTrainedTokenizerFast

from fakes.backend import FakeBackend, Step, build_gateway, build_tokenizer, says
from outrider.cluster.api.openai.endpoints import build_api
from outrider.cluster.cli.main import main
from outrider.cluster.common.errors import RequestFailed, Unavailable
from outrider.lab.bench.serve import read_prompts
from outrider.verifier_service.messages.request import GenerationRequest, SpeculationMetrics
from services.served_app import served

SPECULATION = SpeculationMetrics(enabled=True, num_drafts=2, num_draft_tokens=8, num_accepted_tokens=3)
TEXT = "the quick brown fox"


async def healthy() -> bool:
    return True


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def backend(tokenizer: PreTrainedTokenizerFast) -> FakeBackend:
    return FakeBackend(lambda _: says(tokenizer, TEXT), speculation=SPECULATION)


@pytest.fixture
def url(backend: FakeBackend, tokenizer: PreTrainedTokenizerFast) -> Iterator[str]:
    with served(build_api(build_gateway(backend, tokenizer, max_model_len=2000), healthy)) as url:
        yield url


def bench(url: str, *options: str) -> Result:
    return CliRunner().invoke(main, ["bench", "serve", "--url", url, "--num-prompts", "6", *options])


def words(result: Result) -> str:
    return " ".join(result.output.split())


def test_a_sweep_prints_a_table_and_writes_json_and_plots(
    url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
):
    document, image = tmp_path / "load.json", tmp_path / "load.png"
    result = bench(
        url, "--concurrency", "1,3", "--max-tokens", "9", "--ignore-eos", "--json", str(document), "--plot", str(image)
    )
    assert result.exit_code == 0, result.output
    assert "tiny at http" in result.output
    assert result.output.count("6/6") == 2
    assert len(backend.requests) == 1 + 2 * 6  # with the warm-up
    assert {(request.sampling.max_tokens, request.sampling.ignore_eos) for request in backend.requests} == {(9, True)}
    points = json.loads(document.read_text())["points"]
    assert [point["concurrency"] for point in points] == [1, 3]
    for point in points:
        assert point["errors"] == {}
        assert point["acceptance_rate"] == 3 / 8
        assert point["tokens_per_s"] == pytest.approx(point["requests_per_s"] * len(tokenizer.encode(TEXT)))
        assert 0 < point["ttft"]["p50_s"] <= point["e2el"]["p50_s"]
    pixels = imread(image)
    assert pixels.shape[0] > 300
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].min() < 0.5  # something is drawn


def test_errors_are_counted_and_shown(url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast):
    def sometimes(request: GenerationRequest) -> Sequence[Step]:
        number = len(backend.requests)  # the first is the warm-up
        if number % 3 == 0:
            return [Unavailable("no verifier")]
        if number % 3 == 1 and number > 1:
            return [*says(tokenizer, "the"), RequestFailed("lost")]
        return says(tokenizer, TEXT)

    backend.script = sometimes
    result = bench(url, "--concurrency", "1")
    assert result.exit_code == 0, result.output
    assert "2/6" in result.output
    assert "1: 2 x HTTP 503: no verifier" in result.output
    assert "1: 2 x lost" in result.output


def test_nothing_hangs_where_the_server_does(url: str, backend: FakeBackend, tokenizer: PreTrainedTokenizerFast):
    backend.script = lambda _: says(tokenizer, TEXT) if len(backend.requests) == 1 else [None]
    result = bench(url, "--concurrency", "2", "--max-seconds", "0.5")
    assert result.exit_code == 1
    assert "0/6" in result.output
    assert "2 x cut off" in result.output
    assert "4 x not sent" in result.output
    assert "no request was completed" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--concurrency", "1;4"), "expected numbers"),
        (("--concurrency", "0"), "concurrency must be at least 1"),
        (("--request-rate", "-1"), "request_rate must be above 0"),
        (("--concurrency", "1", "--request-rate", "1"), "either --concurrency or --request-rate"),
        (("--max-tokens", "0"), "max_tokens must be"),
        (("--max-seconds", "0"), "max_seconds must be"),
        (("--slo-ttft-ms", "0"), "slo ttft_s must be"),
        (("--num-prompts", "0"), "--num-prompts"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(options: tuple[str, ...], message: str):
    result = bench("http://127.0.0.1:1", *options)
    assert result.exit_code == 2
    assert message in words(result)


def test_prompts_of_a_file_are_text_or_ids(tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt_token_ids": [1, 2]}\n')
    assert read_prompts(file, 2) == ("a", [1, 2])
    file.write_text('{"prompt": "a"}\n{"prompt": "b", "seed": 1}\n')
    with pytest.raises(ValueError, match="prompt 2: give either"):
        read_prompts(file, 2)
