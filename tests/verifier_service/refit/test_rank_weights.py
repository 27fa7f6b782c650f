"""New weights in the old storage: logits are those of a runner that started with them, bit for bit, or nothing changes.

Every architecture is refitted from a folder; a trainer in another process sends over gloo, to one rank and to two.
"""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outrider.verifier_service.formats.checkpoint import WeightError
from outrider.verifier_service.messages.engine import DestroyWeightsGroup, InitWeightsGroup, UpdateWeights
from outrider.verifier_service.model import packed_linear
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.decoder import Decoder
from outrider.verifier_service.model.packed_linear import PackedLinear
from outrider.verifier_service.model.ranks import free_port
from outrider.verifier_service.model.runner import ModelRunner, ParallelRunner, follow
from outrider.verifier_service.model.step_graphs import GraphBackend
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.refit import model_weights
from outrider.verifier_service.refit.rank_weights import BrokenWeightsError, RankWeights
from tiny.models import TINY_ARCHITECTURES, make_model, random_sequences, scattered_batches, without_kernels
from tiny.played_graphs import played_backend
from tiny.refits import Trainer, perturb, tensors_of, trainer, write_two
from tiny.two_ranks import Pair, two_ranks

pytestmark = pytest.mark.usefixtures("on_one_thread")
NUM_BLOCKS, BLOCK_SIZE = 48, 4
SEQUENCES = random_sequences((33, 14))
WIDE = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 1}  # wide enough for oneDNN's packing


def runner_of(
    folder: str, *, group: TensorParallelGroup | None = None, backend: GraphBackend | None = None, **options: Any
) -> ModelRunner:
    group = group or TensorParallelGroup.single()
    sizes = {"num_kv_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "tensor_parallel_size": group.size}
    config = ModelConfig(path=folder, device="cpu", check_logits=False, **sizes, **options)
    return ModelRunner(config, group, backend)


def logits_of(runner: ModelRunner | ParallelRunner) -> torch.Tensor:
    batches = scattered_batches(SEQUENCES, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    return torch.cat([runner.execute(batch).clone() for batch, _ in batches])


def from_folder(folder: str) -> UpdateWeights:
    return UpdateWeights(call_id="update", folder=folder)


def held(runner: ModelRunner) -> list[tuple[str, int]]:
    """Every tensor's address, but of those that are oneDNN's own."""
    model: Any = getattr(runner.model, "model", runner.model)
    return [
        (f"{name}.{leaf}", value.data_ptr())
        for name, module in model.named_modules()
        for leaf, value in {**vars(module), **module._parameters}.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    ]


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{name: (name, {}, {}) for name in TINY_ARCHITECTURES},
    "bfloat16": ("llama", {}, {"dtype": "bfloat16"}),
    "int8": ("llama", {}, {"quantization": "int8"}),
    "fp8": ("llama", {}, {"quantization": "fp8", "dtype": "bfloat16"}),
    "tied_int8": ("qwen2", {}, {"quantization": "int8"}),
    "packed": ("llama", WIDE, {}),
    "packed_int8": ("llama", WIDE, {"quantization": "int8"}),
    "packed_tied": ("qwen2", WIDE, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_there_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model_type, shape, options = KINDS[kind]
    if kind.startswith("packed"):
        monkeypatch.setattr(packed_linear, "load_kernels", lambda dtype: None)
    old, new = write_two(tmp_path, model_type, **shape)
    runner = runner_of(old, **options)
    before, addresses = logits_of(runner), held(runner)
    if kind in ("packed", "packed_tied"):
        assert isinstance(runner.model, Decoder)
        assert any(isinstance(module, PackedLinear) for module in runner.model.modules())
    wanted = logits_of(runner_of(new, **options))
    assert not torch.equal(before, wanted)
    weights = RankWeights(runner)
    assert weights.change(from_folder(new)) == 0
    assert torch.equal(logits_of(runner), wanted)
    assert held(runner) == addresses
    for folder, logits in ((new, wanted), (old, before), (old, before)):  # repeated calls change nothing
        weights.change(from_folder(folder))
        assert torch.equal(logits_of(runner), logits)


@without_kernels()
@pytest.mark.parametrize("model_type", ["llama", "stablelm"], ids=["our decoder", "the library's"])
def test_captured_steps_stay_valid(tmp_path: Path, model_type: str) -> None:
    """A replay reads the addresses that it was captured with, which a played one checks."""
    old, new = write_two(tmp_path, model_type)
    runner = runner_of(old, backend=played_backend())
    before, wanted = logits_of(runner), logits_of(runner_of(new, backend=played_backend()))
    assert runner.graphs is not None
    num_graphs = runner.graphs.counts.num_graphs
    RankWeights(runner).change(from_folder(new))
    assert torch.equal(logits_of(runner), wanted)
    assert not torch.equal(before, wanted)
    assert (runner.graphs.counts.num_graphs, num_graphs > 0) == (num_graphs, True)


def test_a_tied_head_that_is_left_out_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write_two(tmp_path, "qwen2")
    options = {"quantization": "int8"}  # its head has storage of its own on every processor
    runner, wanted = runner_of(old, **options), logits_of(runner_of(new, **options))
    parts = model_weights.decoder_parts
    monkeypatch.setattr(
        model_weights, "decoder_parts", lambda *a, **o: (part for part in parts(*a, **o) if part[0] != "head")
    )
    RankWeights(runner).change(from_folder(new))
    assert not torch.equal(logits_of(runner), wanted)


# --- what does not fit changes nothing ---


def _without(tensors: dict[str, torch.Tensor]) -> str:
    return [name for name in tensors if "down_proj" in name][-1]


def lacking(tensors: dict[str, torch.Tensor]) -> str:
    name = _without(tensors)
    del tensors[name]
    return f"1 tensors are missing, '{name}'"


def narrow(tensors: dict[str, torch.Tensor]) -> str:
    name = _without(tensors)
    tensors[name] = tensors[name][:, :-1].contiguous()
    return f"'{name}' has shape"


def strange(tensors: dict[str, torch.Tensor]) -> str:
    tensors["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
    return "'model.layers.0.mlp.extra.weight' has no place"


def rounded(tensors: dict[str, torch.Tensor]) -> str:
    name = _without(tensors)
    tensors[name] = tensors[name].to(torch.int8)
    return f"'{name}' is not of a floating-point dtype"


def without_an_expert(tensors: dict[str, torch.Tensor]) -> str:
    name = "model.layers.1.mlp.experts.1.up_proj.weight"
    del tensors[name]
    return f"1 tensors are missing, '{name}'"


def without_a_dense(tensors: dict[str, torch.Tensor]) -> str:
    name = "gpt_neox.layers.1.attention.dense.weight"
    del tensors[name]
    return f"1 tensors are missing, '{name}'"


DAMAGES = [("llama", lacking), ("llama", narrow), ("llama", strange), ("llama", rounded)]
DAMAGES += [("qwen3_moe", without_an_expert), ("gpt_neox", without_a_dense)]


@pytest.mark.parametrize(("model_type", "damage"), DAMAGES)
def test_a_folder_that_does_not_fit_changes_nothing(tmp_path: Path, damage: Any, model_type: str) -> None:
    old, new = write_two(tmp_path, model_type)
    runner = runner_of(old)
    before = logits_of(runner)
    tensors = tensors_of(new)
    problem = damage(tensors)
    save_file(tensors, Path(new) / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=problem):
        RankWeights(runner).change(from_folder(new))
    assert torch.equal(logits_of(runner), before)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"rope_theta": 77.0}, "another model"), ({"rms_norm_eps": 0.5}, "another model")],
)
def test_a_folder_of_a_model_that_computes_otherwise_is_refused(tmp_path: Path, changes: Any, problem: str) -> None:
    make_model().save_pretrained(tmp_path / "old")
    model = perturb(make_model())
    for name, value in changes.items():
        setattr(model.config, name, value)
    if "rope_theta" in changes:
        model.config.rope_parameters = {"rope_type": "default", "rope_theta": 77.0}
    model.save_pretrained(tmp_path / "new")
    runner = runner_of(str(tmp_path / "old"))
    before = logits_of(runner)
    with pytest.raises(WeightError, match=problem):
        RankWeights(runner).change(from_folder(str(tmp_path / "new")))
    assert torch.equal(logits_of(runner), before)


def test_a_folder_that_is_not_there_or_is_cut_short_changes_nothing(tmp_path: Path) -> None:
    old, new = write_two(tmp_path)
    runner = runner_of(old)
    before = logits_of(runner)
    file = Path(new) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for folder in (new, str(tmp_path / "nowhere")):
        with pytest.raises(WeightError):
            RankWeights(runner).change(from_folder(folder))
    assert torch.equal(logits_of(runner), before)


def test_a_copy_that_breaks_off_says_so_until_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = write_two(tmp_path)
    runner, wanted = runner_of(old), logits_of(runner_of(new))
    weights = RankWeights(runner)
    left, copy = iter([True, True, False]), model_weights.copy_tensors

    def failing(target: torch.nn.Module, source: torch.nn.Module) -> None:
        if not next(left):
            raise OSError("the disk is gone")
        copy(target, source)

    with monkeypatch.context() as patches:
        patches.setattr(model_weights, "copy_tensors", failing)
        with pytest.raises(BrokenWeightsError, match="the disk is gone"):
            weights.change(from_folder(new))
    assert not torch.equal(logits_of(runner), wanted)
    weights.change(from_folder(new))
    assert torch.equal(logits_of(runner), wanted)


# --- a trainer's group ---


def halves(folder: str) -> tuple[list[str], list[str]]:
    names = list(tensors_of(folder))
    return names[: len(names) // 2], names[len(names) // 2 :]


@pytest.mark.parametrize("is_flattened", [False, True])
def test_a_trainers_group_in_buckets(tmp_path: Path, is_flattened: bool) -> None:
    old, new = write_two(tmp_path)
    runner, wanted = runner_of(old), logits_of(runner_of(new))
    before, weights = logits_of(runner), RankWeights(runner)
    with trainer() as there:
        weights.change(there.joins())
        assert weights.change(there.joining) == 0  # the same call again
        for folder, logits, previous in ((new, wanted, before), (old, before, wanted)):
            first, second = halves(folder)
            assert weights.change(there.sends(folder, first, is_flattened=is_flattened)) == len(second)
            assert set(weights.missing) == set(second)
            assert torch.equal(logits_of(runner), previous), "a half-streamed update touches nothing"
            assert weights.change(there.sends(folder, second, is_flattened=is_flattened)) == 0
            assert weights.missing == ()
            assert torch.equal(logits_of(runner), logits)
        weights.change(DestroyWeightsGroup(call_id="end", group_name=there.joining.group_name))
    with pytest.raises(WeightError, match="there is no weights group"):
        weights.change(UpdateWeights(call_id="late", group_name=there.joining.group_name))


def test_of_a_tensor_that_is_sent_twice_the_later_one_counts(tmp_path: Path) -> None:
    old, new = write_two(tmp_path)
    runner, wanted = runner_of(old), logits_of(runner_of(new))
    first, second = halves(new)
    with trainer() as there:
        weights = RankWeights(runner)
        weights.change(there.joins())
        weights.change(there.sends(old, first))
        weights.change(there.sends(new, first))
        assert weights.change(there.sends(new, second)) == 0
    assert torch.equal(logits_of(runner), wanted)


def test_flattened_parts_of_several_dtypes(tmp_path: Path) -> None:
    """A float32 tensor may begin at a byte where no float32 can lie in memory."""
    old, new = write_two(tmp_path, hidden_size=64)
    tensors = tensors_of(new)
    mixed = {name: tensor.bfloat16() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(mixed, Path(new) / "model.safetensors", {"format": "pt"})
    runner, wanted = runner_of(old), logits_of(runner_of(new))
    names = sorted(mixed, key=lambda name: "norm" not in name)
    with trainer() as there:
        weights = RankWeights(runner)
        weights.change(there.joins())
        assert weights.change(there.sends(new, names, is_flattened=True)) == 0
    assert torch.equal(logits_of(runner), wanted)


def test_experts_in_any_order(tmp_path: Path) -> None:
    """Buckets may part the experts of a layer, and the first of them need not come first."""
    old, new = write_two(tmp_path, "qwen3_moe")
    runner, wanted = runner_of(old), logits_of(runner_of(new))
    names = sorted(tensors_of(new), reverse=True)
    with trainer() as there:
        weights = RankWeights(runner)
        weights.change(there.joins())
        left = [weights.change(there.sends(new, names[start : start + 11])) for start in range(0, len(names), 11)]
    assert left[-1] == 0
    assert left == sorted(left, reverse=True)
    assert torch.equal(logits_of(runner), wanted)


def test_a_bucket_that_does_not_fit_drops_the_update(tmp_path: Path) -> None:
    old, new = write_two(tmp_path)
    tensors = tensors_of(new)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][1:].contiguous()
    save_file(tensors, Path(new) / "model.safetensors", {"format": "pt"})
    runner = runner_of(old)
    before, weights = logits_of(runner), RankWeights(runner)
    with trainer() as there:
        weights.change(there.joins())
        first = [name for name in tensors if name != "lm_head.weight"]
        assert weights.change(there.sends(new, first)) == 1
        with pytest.raises(WeightError, match=r"'lm_head\.weight' has shape"):
            weights.change(there.tells(new, ["lm_head.weight"]))
        with pytest.raises(WeightError, match="begin again with /init_weights_update_group"):
            weights.change(there.tells(old, ["lm_head.weight"]))
    assert torch.equal(logits_of(runner), before)


def test_a_trainer_that_does_not_send_ends_the_group(tmp_path: Path) -> None:
    old, new = write_two(tmp_path)
    runner = runner_of(old)
    before, weights = logits_of(runner), RankWeights(runner)
    with trainer() as there:
        hasty = InitWeightsGroup(**{name: getattr(there.joining, name) for name in there.joining.__slots__})
        object.__setattr__(hasty, "timeout_s", 2.0)
        there.joins()
        weights.change(hasty)
        message = UpdateWeights(
            call_id="update",
            names=("lm_head.weight",),
            dtypes=("float32",),
            shapes=((256, 64),),
            group_name=hasty.group_name,
        )
        with pytest.raises(WeightError, match=r"(?i)tim(ed|e) ?out"):
            weights.change(message)
        with pytest.raises(WeightError, match="there is no weights group"):
            weights.change(message)
    assert torch.equal(logits_of(runner), before)
    weights.change(from_folder(new))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"backend": "mpi"}, "backend"),
        ({"rank_offset": 0}, "rank 0 is the trainer"),
        ({"timeout_s": 0.5}, r"(?i)tim(ed|e) ?out"),
    ],
)
def test_a_group_that_cannot_be_joined(tmp_path: Path, fields: dict[str, Any], problem: str) -> None:
    old, _ = write_two(tmp_path)
    where = {"call_id": "init", "master_address": "127.0.0.1", "master_port": free_port(), "backend": "gloo"}
    what = {"rank_offset": 1, "world_size": 2, "group_name": "g", "timeout_s": 5.0}
    message = InitWeightsGroup(**{**where, **what, **fields})
    with pytest.raises(WeightError, match=problem):
        RankWeights(runner_of(old)).change(message)


# --- two ranks ---


def run_follower(connection: Connection, store_address: str) -> None:
    """Rank 1, which follows one model after another; "!" before a folder: it leaves its shard as it is."""
    torch.set_num_threads(1)
    group = TensorParallelGroup.join(1, 2, store_address)
    whole_copy = model_weights.ModelWeights.copy
    while folder := connection.recv_bytes().decode():
        runner = runner_of(folder.removeprefix("!"), group=group)
        model_weights.ModelWeights.copy = (lambda self, source: None) if folder.startswith("!") else whole_copy
        follow(connection, runner, RankWeights(runner).follower_calls())


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with two_ranks(run_follower) as pair:
        yield pair


def logits_of_pair(pair: Pair, folder: str, *changes: Any) -> list[torch.Tensor]:
    """Serve a folder on two ranks; return logits at first and after each change, or call of a trainer."""
    group, connection = pair
    connection.send_bytes(folder.encode())
    share = runner_of(folder.removeprefix("!"), group=group)
    runner, weights = ParallelRunner(share, [connection]), RankWeights(share, [connection])
    found = [logits_of(runner)]
    for change in changes:
        message = change() if callable(change) else change
        weights.change(message)
        found.append(logits_of(runner))
    runner.close()
    return found


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_moe", "starcoder2"])
def test_two_ranks_from_a_folder(pair: Any, tmp_path: Path, model_type: str) -> None:
    old, new = write_two(tmp_path, model_type)
    (wanted,) = logits_of_pair(pair, new)
    before, after, again = logits_of_pair(pair, old, from_folder(new), from_folder(old))
    assert torch.equal(after, wanted)
    assert torch.equal(again, before)
    assert not torch.equal(before, after)


def test_two_ranks_from_a_trainer(pair: Any, tmp_path: Path) -> None:
    old, new = write_two(tmp_path)
    (wanted,) = logits_of_pair(pair, new)
    first, second = halves(new)

    def calls(there: Trainer) -> list[Any]:
        return [there.joins, lambda: there.sends(new, first), lambda: there.sends(new, second, is_flattened=True)]

    with trainer(num_ranks=2) as there:
        before, joined, half, after = logits_of_pair(pair, old, *calls(there))
    assert torch.equal(after, wanted)
    assert torch.equal(before, joined)
    assert torch.equal(before, half)


def test_a_shard_that_is_left_out_shows(pair: Any, tmp_path: Path) -> None:
    old, new = write_two(tmp_path)
    (wanted,) = logits_of_pair(pair, new)
    _, after = logits_of_pair(pair, f"!{old}", from_folder(new))
    assert not torch.equal(after, wanted)


def test_two_ranks_refuse_together(pair: Any, tmp_path: Path) -> None:
    old, new = write_two(tmp_path)
    tensors = tensors_of(new)
    problem = narrow(tensors)
    save_file(tensors, Path(new) / "model.safetensors", {"format": "pt"})
    group, connection = pair
    connection.send_bytes(old.encode())
    share = runner_of(old, group=group)
    runner, weights = ParallelRunner(share, [connection]), RankWeights(share, [connection])
    before = logits_of(runner)
    with pytest.raises(WeightError, match=problem):
        weights.change(from_folder(new))
    assert torch.equal(logits_of(runner), before)
    runner.close()


class WithAnother(TensorParallelGroup):
    """One rank, beside which another one fails when it is told to."""

    fails = False

    def all_reduce_min(self, value: int) -> int:
        return 0 if self.fails else value


def test_what_another_rank_refuses_is_not_taken(tmp_path: Path) -> None:
    old, new = write_two(tmp_path)
    group = WithAnother(0, 1, None)
    runner = runner_of(old, group=group)
    weights, before = RankWeights(runner, []), logits_of(runner)
    group.fails = True
    with pytest.raises(WeightError, match="another rank has failed"):
        weights.change(from_folder(new))
    assert torch.equal(logits_of(runner), before)
