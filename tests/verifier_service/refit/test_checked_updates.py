"""Updates that are not what they are said to be: refused by the tensor's name, and the old weights stay.

The table is that of a review: a wrong word about a dtype ended the process, or was served.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from outrider.verifier_service.formats.checkpoint import WeightError
from outrider.verifier_service.messages.engine import DestroyWeightsGroup, InitWeightsGroup, UpdateWeights
from outrider.verifier_service.model.config import ModelConfig
from outrider.verifier_service.model.runner import ModelRunner
from outrider.verifier_service.model.tensor_parallel import TensorParallelGroup
from outrider.verifier_service.refit.rank_weights import RankWeights
from outrider.verifier_service.refit.weight_checks import MAX_FACTOR, PART, Checked, digest_of, rms_of
from tiny.models import random_sequences, scattered_batches
from tiny.refits import tensors_of, trainer, write_two

NUM_BLOCKS, BLOCK_SIZE = 24, 4
pytestmark = pytest.mark.usefixtures("on_one_thread")
SEQUENCES = random_sequences((9, 21))
NORM = "model.norm.weight"


class Served:
    """A tiny model that serves, another's folder, and whether the model is still the first one."""

    def __init__(self, folder: Path) -> None:
        self.old, self.new = write_two(folder)
        sizes = {"num_kv_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE}
        config = ModelConfig(path=self.old, device="cpu", check_logits=False, **sizes)
        self.runner = ModelRunner(config, TensorParallelGroup.single())
        self.weights = RankWeights(self.runner)
        self.before = self.logits()

    def logits(self) -> torch.Tensor:
        batches = scattered_batches(SEQUENCES, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        return torch.cat([self.runner.execute(batch).clone() for batch, _ in batches])

    def rewrite(self, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        """Change the tensors of the new folder's file."""
        tensors = tensors_of(self.new)
        change(tensors)
        save_file(tensors, Path(self.new) / "model.safetensors", {"format": "pt"})

    def refuses(self, message: InitWeightsGroup | UpdateWeights, problem: str) -> None:
        digest = self.weights.digest
        with pytest.raises(WeightError, match=problem):
            self.weights.change(message)
        assert torch.equal(self.logits(), self.before)
        assert self.weights.digest == digest


@pytest.fixture
def served(tmp_path: Path) -> Served:
    return Served(tmp_path)


def cast(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})


@pytest.mark.parametrize("is_flattened", [False, True])
@pytest.mark.parametrize(
    ("sent", "said", "problem"),
    [
        (torch.float32, "bfloat16", "sent more bytes"),  # gloo ends the process that has no room
        (torch.bfloat16, "float32", "not finite: the trainer sent fewer bytes"),
        (torch.bfloat16, "float16", "a wrong dtype"),
        (torch.float16, "bfloat16", "a wrong dtype"),
    ],
)
def test_a_wrong_word_about_the_dtype(
    served: Served, sent: torch.dtype, said: str, problem: str, is_flattened: bool
) -> None:
    served.rewrite(cast(sent))
    with trainer() as there:
        there.may_fail = True
        served.weights.change(there.joins())
        message = there.sends(served.new, is_flattened=is_flattened)
        served.refuses(dataclasses.replace(message, dtypes=(said,) * len(message.names)), problem)
    served.refuses(message, "begin again with /init_weights_update_group")
    with trainer() as there:
        served.weights.change(there.joins())
        assert served.weights.change(there.sends(served.new, is_flattened=is_flattened)) == 0
    assert not torch.equal(served.logits(), served.before)


def lie(message: UpdateWeights, **fields: object) -> UpdateWeights:
    """Say something else of the first tensor."""
    told = {name: (value, *getattr(message, name)[1:]) for name, value in fields.items()}
    return dataclasses.replace(message, **told)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"shapes": (8,)}, "has shape"),
        ({"shapes": (-1, 64)}, "shapes: .* cannot have"),
        ({"shapes": (1 << 40, 1 << 40)}, "shapes: .* cannot have|has shape"),
        ({"names": "lm_tail.weight"}, "'lm_tail.weight' has no place"),
        ({"names": NORM}, "named twice"),
        ({"dtypes": "int8"}, "dtypes: 'int8'"),
        ({"dtypes": "complex64"}, "dtypes: 'complex64'"),
        ({"dtypes": "nn"}, "dtypes: 'nn'"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_received(
    served: Served, fields: dict[str, object], problem: str
) -> None:
    with trainer() as there:
        served.weights.change(there.joins())
        served.refuses(lie(there.tells(served.new), **fields), problem)


def test_lists_of_other_lengths_are_refused(served: Served) -> None:
    with trainer() as there:
        served.weights.change(there.joins())
        served.refuses(dataclasses.replace(there.tells(served.new), dtypes=("float32",)), "differ in number")


def test_a_large_tensor_that_the_model_has_no_use_for_is_not_received(served: Served) -> None:
    with trainer() as there:
        served.weights.change(there.joins())
        message = there.tells(served.new)
        unused = {"names": "model.layers.0.self_attn.rotary_emb.inv_freq", "dtypes": "float32", "shapes": (1 << 30,)}
        longer = {name: (*getattr(message, name), value) for name, value in unused.items()}
        served.refuses(dataclasses.replace(message, **longer), "bytes are of tensors that the model does not use")


def spoil(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[NORM][3] = value

    return change


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_from_a_folder_and_from_a_group(served: Served, value: float) -> None:
    served.rewrite(spoil(value))
    problem = f"tensor '{NORM}' has numbers that are not finite$"
    served.refuses(UpdateWeights(call_id="u", folder=served.new), problem)
    with trainer() as there:
        served.weights.change(there.joins())
        served.refuses(there.sends(served.new), problem)


@pytest.mark.parametrize("factor", [1.1 * MAX_FACTOR, 0.9 / MAX_FACTOR])
def test_matrices_are_about_as_large_as_those_that_serve_now(served: Served, factor: float) -> None:
    def scale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] *= factor

    assert served.weights.change(UpdateWeights(call_id="u", folder=served.new)) == 0
    served.before = served.logits()
    served.rewrite(scale)
    served.refuses(UpdateWeights(call_id="u", folder=served.new), "tensor 'lm_head.weight' has a root mean square")


def test_a_tensor_may_begin_at_zero_and_become_zero(served: Served) -> None:
    def empty(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] *= 0.0

    kept = tensors_of(served.new)["lm_head.weight"]
    served.rewrite(empty)
    assert served.weights.change(UpdateWeights(call_id="u", folder=served.new)) == 0
    served.rewrite(lambda tensors: tensors.update({"lm_head.weight": 100.0 * kept}))
    assert served.weights.change(UpdateWeights(call_id="u", folder=served.new)) == 0


def test_a_digest_is_of_all_tensors_wherever_they_came_from(served: Served) -> None:
    weights, found = served.weights, list[str]()
    assert weights.digest == ""
    for folder in (served.new, served.old, served.new):
        weights.change(UpdateWeights(call_id="u", folder=folder))
        found.append(weights.digest)
    with trainer() as there:
        weights.change(there.joins())
        for names in there.buckets(served.old, 3):
            weights.change(there.sends(served.old, names))
        found.append(weights.digest)
    served.rewrite(lambda tensors: tensors[NORM].__setitem__(3, 1.25 * tensors[NORM][3]))
    weights.change(UpdateWeights(call_id="u", folder=served.new))
    assert [found.index(one) for one in found] == [0, 1, 0, 1], "as in `found`: the same tensors have the same one"
    assert weights.digest not in found


def test_a_trainer_that_answers_and_says_nothing_holds_nobody_up(served: Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        _, port = silent.getsockname()
        where = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        served.weights.begin(InitWeightsGroup(call_id="init", group_name="g", backend="gloo", **where))
        connection, _ = silent.accept()
        assert not served.weights.is_ready
        assert torch.equal(served.logits(), served.before), "steps go on"
        with pytest.raises(WeightError, match="the weights group was left"):
            served.weights.finish(is_abandoned=True)
        while connection.recv(1024):  # it comes to its end: the process that joined is gone
            pass
        connection.close()
    assert served.weights.change(DestroyWeightsGroup(call_id="end", group_name="g")) == 0
    assert served.weights.change(UpdateWeights(call_id="u", folder=served.new)) == 0


def test_the_root_mean_square_of_all_parts_shows_what_is_not_finite() -> None:
    large = torch.full((PART + 3,), 2.0)
    assert rms_of(large) == 2.0
    for place in (0, PART - 1, PART + 2):
        for value in (math.nan, math.inf):
            spoilt = large.clone()
            spoilt[place] = value
            assert not math.isfinite(rms_of(spoilt))
    assert rms_of(torch.empty(0)) == 0.0


def test_no_process_is_left_when_a_group_ends(served: Served) -> None:
    with trainer() as there:
        served.weights.change(there.joins())
        (_, group) = served.weights._groups[there.joining.group_name]
        pid = group._process.pid
        os.kill(pid, 0)
        served.weights.change(DestroyWeightsGroup(call_id="end", group_name=there.joining.group_name))
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_digest_does_not_go_by_the_order_in_which_tensors_came():
    first, second = Checked(1.0, b"1"), Checked(1.0, b"2")
    assert digest_of({"a": first, "b": second}) == digest_of({"b": second, "a": first})
    assert digest_of({"a": first, "b": second}) != digest_of({"a": second, "b": first})
