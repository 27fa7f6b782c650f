"""SGLang's door, against stand-ins with the signatures that docs/sglang.md names: SGLang itself runs on no CPU here."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from checkout import ROOT
from fakes.hosted.engine import MAX_MODEL_LEN, VOCAB_SIZE, Clock, PlayedPool, continued
from outrider.cluster.hosted import sglang_entry
from outrider.cluster.hosted.drafting import HostedConfig, HostedDrafting, HostRow
from outrider.cluster.hosted.options import PluginOptions
from outrider.cluster.hosted.plugin import HostStep
from outrider.cluster.hosted.sglang_entry import ALGORITHM, register_with
from outrider.cluster.hosted.sglang_steps import PADDING, DraftedBatches
from outrider.cluster.hosted.sglang_worker import (
    OPTIONS_VARIABLE,
    UntriedSglangError,
    check_server_args,
    options_of,
    plugin_of,
    pool_worker,
)

OPTIONS = PluginOptions(pool="127.0.0.1:1")
WIDTH = 4


@dataclass
class Sampling:
    """SGLang's `SamplingParams`, as far as it is read."""

    temperature: float = 0.0
    max_new_tokens: int | None = 8
    stop_token_ids: set[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None


@dataclass
class Req:
    """SGLang's `Req`, as far as it is read."""

    rid: str
    origin_input_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    sampling_params: Sampling = field(default_factory=Sampling)
    eos_token_ids: set[int] | None = None


class Propose:
    """A plug-in that writes down its steps and gives these drafts."""

    def __init__(self, *answers: list[list[int]]) -> None:
        self.answers, self.steps = list(answers), []  # type: list[list[list[int]]], list[HostStep]

    def __call__(self, num_rows: int, read: Callable[[], HostStep]) -> list[list[int]]:
        self.steps.append(read())
        return self.answers.pop(0)

    propose = __call__


def batches() -> DraftedBatches:
    return DraftedBatches(WIDTH, draft_seeded=False)


def test_a_batch_is_a_chain_of_fixed_width_for_each_request():
    requests = [Req("a", [1, 2], [5]), Req("b", [3], [6, 7])]
    tokens, masks = batches().draft(requests, 0.0, Propose([[8, 9], []]))
    assert tokens.dtype == np.int64
    assert tokens.reshape(2, WIDTH).tolist() == [[5, 8, 9, PADDING], [7, PADDING, PADDING, PADDING]]
    chain = np.tril(np.ones((WIDTH, WIDTH))).tolist()  # also of padding: siblings of one token would count it twice
    assert masks.reshape(2, WIDTH, WIDTH).tolist() == [chain, chain]


def test_a_draft_that_is_too_long_is_cut_and_a_width_of_one_is_refused():
    tokens, _ = batches().draft([Req("a", [1], [2])], 0.0, Propose([[3, 4, 5, 6, 7]]))
    assert tokens.tolist() == [2, 3, 4, 5]
    with pytest.raises(ValueError, match="speculative-num-draft-tokens"):
        DraftedBatches(1, draft_seeded=False)


def test_what_a_step_did_is_seen_at_the_next_call():
    drafted, propose = batches(), Propose([[8, 9], []], [[], []], [[]])
    first, second = Req("a", [1, 2, 3], [5]), Req("b", [3, 4], [6])
    drafted.draft([first, second], 0.0, propose)
    first.output_ids += [8, 4]  # one of its two draft tokens, and the target's own
    second.output_ids += [7]
    drafted.draft([first, second], 1.0, propose)
    first.output_ids += [2]
    drafted.draft([first], 2.0, propose)  # the other one has ended
    (rows, gone, host), (then, none_gone, _), (last, ended, _) = propose.steps
    assert (list(gone), list(none_gone), list(ended)) == ([], [], ["b"])
    assert rows == [
        HostRow(request_id="a", num_tokens=4, num_scheduled_tokens=3, num_draft_tokens=0, num_new_tokens=1),
        HostRow(request_id="b", num_tokens=3, num_scheduled_tokens=2, num_draft_tokens=0, num_new_tokens=1),
    ]
    assert then == [
        HostRow(request_id="a", num_tokens=6, num_scheduled_tokens=3, num_draft_tokens=2, num_new_tokens=2),
        HostRow(request_id="b", num_tokens=4, num_scheduled_tokens=1, num_draft_tokens=0, num_new_tokens=1),
    ]
    assert then[0].num_accepted_tokens == 1
    assert last[0].num_new_tokens == 1
    assert host.began_s == 0.0
    assert drafted.request_ids() == ("a",)


def test_an_accepted_padding_token_is_no_accepted_draft_token():
    drafted, propose, request = batches(), Propose([[]], [[]]), Req("a", [1], [2])
    drafted.draft([request], 0.0, propose)
    request.output_ids += [PADDING, 3]
    drafted.draft([request], 1.0, propose)
    (row,) = propose.steps[1][0]
    assert (row.num_new_tokens, row.num_draft_tokens, row.num_accepted_tokens) == (2, 0, 0)


def test_a_request_whose_kv_was_taken_away_begins_again_with_its_output():
    drafted, propose = batches(), Propose([[], [8]], [[]], [[], []])
    one, other = Req("a", [1, 2], [5]), Req("b", [3], [6, 7])
    drafted.draft([one, other], 0.0, propose)
    drafted.draft([one], 1.0, propose)
    other.output_ids += [9]
    drafted.draft([one, other], 2.0, propose)
    row = propose.steps[2][0][1]
    assert (row.num_tokens, row.num_draft_tokens, row.num_new_tokens) == (4, 0, 1)
    host = propose.steps[2][2]
    assert host.token_ids(1, 0, 3) == [3, 6, 7]
    assert host.token_ids(1, 1, 4) == [6, 7, 9]
    assert host.token_ids(1, 3, 3) == []


def test_requests_are_described_and_seeded_ones_have_no_drafts_unless_asked_for():
    seeded = Sampling(temperature=1.0, sampling_seed=4, stop_token_ids={7}, max_new_tokens=None)
    requests = [Req("a", [1, 2], [5], eos_token_ids={2}), Req("b", [1], [3], sampling_params=seeded)]
    for draft_seeded in (False, True):
        propose = Propose([[], []])
        DraftedBatches(WIDTH, draft_seeded=draft_seeded).draft(requests, 0.0, propose)
        host = propose.steps[0][2]
        plain, other = host.describe(0), host.describe(1)
        assert (plain.num_prompt_tokens, plain.max_tokens, plain.stop_token_ids) == (2, 8, {2})
        assert (plain.num_speculative_tokens, plain.store) == (None, None)
        assert (other.max_tokens, other.stop_token_ids) == (1 << 30, {7})
        assert other.num_speculative_tokens == (None if draft_seeded else 0)


def test_the_core_drafts_for_sglangs_batches_and_every_token_is_the_targets():
    clock = Clock()
    pool, drafted = PlayedPool(clock), DraftedBatches(WIDTH, draft_seeded=False)
    config = HostedConfig(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, num_speculative_tokens=WIDTH - 1)
    drafting = HostedDrafting(pool, config, clock=clock)
    pool.come_up("d")
    pool.is_right = lambda position: position % 5 > 0

    def propose(num_rows: int, read: Callable[[], HostStep]) -> list[list[int]]:
        return drafting.propose(*read())

    one, other = (
        Req(rid, prompt, continued(prompt, 1), Sampling(max_new_tokens=None))
        for rid, prompt in (("a", [3, 1, 4]), ("b", [9, 2]))
    )
    for step in range(40):
        began_s, clock.now_s = clock.now_s, clock.now_s + 0.02
        requests = [one, other] if step < 20 else [other]
        tokens, _ = drafted.draft(requests, began_s, propose)
        for request, row in zip(requests, tokens.reshape(-1, WIDTH).tolist(), strict=True):
            right = continued([*request.origin_input_ids, *request.output_ids], WIDTH)
            num_accepted = next((at for at in range(WIDTH - 1) if row[1 + at] != right[at]), WIDTH - 1)
            request.output_ids += right[: num_accepted + 1]
    assert drafting.stats.num_accepted_tokens > 30
    assert drafting.stats.num_committed_tokens <= len(one.output_ids) + len(other.output_ids)
    assert {request_id for _, request_id in pool.sessions} == {"b"}  # the other has left, and its session is closed


# --- the worker ---


class NGRAMWorker:
    """Stands in for SGLang's, with its signatures; it verifies nothing."""

    def __init__(self, server_args: Any, gpu_id: int, ps: Any, nccl_port: int, target_worker: Any) -> None:
        self.ngram_corpus, self.num_cleared = object(), 0

    def clear_cache_pool(self) -> None:
        self.num_cleared += 1

    def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray]:
        raise AssertionError("the corpus drafts")

    def _update_ngram_corpus(self, batch: Any) -> None:
        raise AssertionError("the corpus learns")

    def forward_batch_generation(self, batch: Any, on_publish: Any = None) -> Any:
        drafts = self._prepare_draft_tokens(batch) if batch.is_decode else None
        self._update_ngram_corpus(batch)
        return drafts


def server_args(**changes: Any) -> SimpleNamespace:
    values = {
        "speculative_num_draft_tokens": WIDTH,
        "disable_overlap_schedule": True,
        "pp_size": 1,
        "enable_dp_attention": False,
        "tokenizer_path": "",
        "model_path": "/nowhere",
        "revision": None,
        "trust_remote_code": False,
    }
    return SimpleNamespace(**(values | changes))


TARGET = SimpleNamespace(model_runner=SimpleNamespace(model_config=SimpleNamespace(vocab_size=99, context_len=64)))
ALONE = SimpleNamespace(rank_in_group=0, world_size=1)


def test_the_worker_drafts_from_the_plug_in_and_times_whole_steps():
    propose, times = Propose([[8]], [[]]), iter((10.0, 11.0, 12.0, 13.0))
    made: list[tuple[Any, ...]] = []

    def make(*parts: Any) -> Any:
        made.append(parts)
        return propose

    worker_of = pool_worker(NGRAMWorker, OPTIONS, group_of=lambda: ALONE, make=make, clock=lambda: next(times))
    worker = worker_of(server_args=server_args(), gpu_id=0, ps=None, nccl_port=1, target_worker=TARGET)
    assert made[0][1:3] == (TARGET.model_runner.model_config, OPTIONS)
    request = Req("a", [1], [2])
    assert worker.forward_batch_generation(SimpleNamespace(is_decode=False, reqs=[request])) is None  # its prompt
    tokens, _ = worker.forward_batch_generation(SimpleNamespace(is_decode=True, reqs=[request]), on_publish=None)
    assert tokens.tolist() == [2, 8, PADDING, PADDING]
    worker.forward_batch_generation(SimpleNamespace(is_decode=True, reqs=[request]))
    assert [host.began_s for _, _, host in propose.steps] == [11.0, 12.0]  # of the step before
    worker.clear_cache_pool()
    assert (worker.num_cleared, made[0][3].request_ids()) == (1, ())


def test_only_the_first_rank_makes_a_plug_in_and_the_others_hear_its_drafts():
    group = SimpleNamespace(rank_in_group=1, world_size=2, broadcast_object=lambda value, src: [[8, 9]])

    def make(*parts: Any) -> Any:
        raise AssertionError("of the first rank alone")

    worker = pool_worker(NGRAMWorker, OPTIONS, group_of=lambda: group, make=make)(
        server_args(), 0, None, 1, target_worker=TARGET
    )
    tokens, _ = worker.forward_batch_generation(SimpleNamespace(is_decode=True, reqs=[Req("a", [1], [2])]))
    assert tokens.tolist() == [2, 8, 9, PADDING]


def test_a_worker_of_another_form_is_refused():
    class NoHook:
        pass

    class Other(NGRAMWorker):
        def _prepare_draft_tokens(self, batch: Any, extra: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
            raise NotImplementedError

    class Three(NGRAMWorker):
        def _prepare_draft_tokens(self, batch: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[override]
            raise NotImplementedError

    for base, complaint in ((NoHook, "has no"), (Other, "takes"), (Three, "returns")):
        with pytest.raises(UntriedSglangError, match=complaint):
            pool_worker(base, OPTIONS, group_of=lambda: ALONE)


def test_the_plug_in_has_the_sizes_of_sglangs_arguments():
    found = plugin_of(server_args(), TARGET.model_runner.model_config, OPTIONS, batches())
    try:
        config = found._config
        assert (config.vocab_size, config.max_model_len, config.num_speculative_tokens) == (99, 64, WIDTH - 1)
        assert found._hello.verifier_id.startswith("sglang-")
        tokens, _ = batches().draft([Req("a", [1], [2])], 0.0, found.propose)  # nobody listens there
        assert tokens.tolist() == [2, PADDING, PADDING, PADDING]
    finally:
        found.close()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
    ],
)
def test_options_of_sglang_that_do_not_go_with_a_pool_are_refused(changes: dict[str, Any], complaint: str):
    check_server_args(server_args())
    with pytest.raises(ValueError, match=complaint):
        check_server_args(server_args(**changes))


def test_options_come_from_one_variable():
    assert options_of({OPTIONS_VARIABLE: '{"pool": "host:9"}'}).pool == "host:9"
    for text, complaint in ((None, "must say"), ("{", OPTIONS_VARIABLE), ('{"pool": "host"}', "pool")):
        with pytest.raises(ValueError, match=complaint):
            options_of({} if text is None else {OPTIONS_VARIABLE: text})
    with pytest.raises(ValueError, match="state_taps"):
        options_of({OPTIONS_VARIABLE: json.dumps({"pool": "host:9", "state_taps": [3]})})


# --- the entry point ---


class CustomSpecAlgo:
    """Stands in for SGLang's, with the arguments and some of the questions that it has."""

    def __init__(self, name: str, factory: Any, *, supports_overlap: bool = False, validate_server_args: Any = None):
        self.name, self.factory = name, factory
        self.supports_overlap, self.validate_server_args = supports_overlap, validate_server_args

    def is_ngram(self) -> bool:
        return False

    def is_eagle(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        pass


class Algorithms:
    """Stands in for SGLang's enumeration."""

    registry: ClassVar[dict[str, CustomSpecAlgo]] = {}

    @classmethod
    def register(
        cls, name: str, *, supports_overlap: bool = False, validate_server_args: Any = None, spec_class: type = object
    ) -> Callable[[Any], Any]:
        def decorator(factory: Any) -> Any:
            cls.registry[name.upper()] = spec_class(
                name=name, factory=factory, supports_overlap=supports_overlap, validate_server_args=validate_server_args
            )
            return factory

        return decorator


def test_the_algorithm_is_verified_as_ngram_drafts_and_checks_its_arguments():
    handled: Sequence[Any] = []
    register_with(Algorithms, CustomSpecAlgo, handle_ngram=handled.append, make_worker=lambda arguments: NGRAMWorker)  # type: ignore[attr-defined]
    algorithm = Algorithms.registry[ALGORITHM]
    assert (algorithm.is_ngram(), algorithm.is_eagle(), algorithm.has_draft_kv()) == (True, False, False)
    assert not algorithm.supports_overlap
    assert algorithm.factory(server_args()) is NGRAMWorker
    algorithm.handle_server_args(server_args())
    assert len(handled) == 1
    for check in (algorithm.validate_server_args, algorithm.handle_server_args):
        with pytest.raises(ValueError, match="--pp-size"):
            check(server_args(pp_size=4))


def test_the_entry_point_is_the_function_that_registers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (value,) = project["entry-points"]["sglang.srt.plugins"].values()
    module, _, function = value.partition(":")
    assert module == sglang_entry.__name__
    assert not inspect.signature(getattr(sglang_entry, function)).parameters
