from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.drafter_service.heads.head_files import HeadFiles, opened, read_json, write_head
from outrider.verifier_service.formats.checkpoint import StateDictSource

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "ids": torch.tensor([3, 1])}


def files_of(config: dict[str, object], tensors: dict[str, torch.Tensor] = TENSORS) -> HeadFiles:
    return HeadFiles(Path("head"), config, StateDictSource(tensors))


def write_config(folder: Path, config: object = None) -> None:
    (folder / "config.json").write_text(json.dumps({} if config is None else config))


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    with opened(folder) as files:
        return {"a.weight": files.take("a.weight", (2, 3)), "ids": files.take("ids", (2,), torch.int64)}


def require_equal(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_one_safetensors_file_is_read(tmp_path: Path):
    write_config(tmp_path)
    save_file(TENSORS, tmp_path / "any_name.safetensors")
    require_equal(read_all(tmp_path))


def test_a_sharded_checkpoint_is_read(tmp_path: Path):
    write_config(tmp_path)
    shards = {name: f"model-{index}-of-2.safetensors" for index, name in enumerate(TENSORS)}
    for name, shard in shards.items():
        save_file({name: TENSORS[name]}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    require_equal(read_all(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_pytorchs_own_file_is_read(tmp_path: Path, name: str):
    write_config(tmp_path)
    torch.save(TENSORS, tmp_path / name)
    require_equal(read_all(tmp_path))


def test_pytorchs_own_shards_are_read(tmp_path: Path):
    write_config(tmp_path)
    shards = {name: f"pytorch_model-{index}-of-2.bin" for index, name in enumerate(TENSORS)}
    for name, shard in shards.items():
        torch.save({name: TENSORS[name]}, tmp_path / shard)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": shards}))
    require_equal(read_all(tmp_path))
    (tmp_path / shards["ids"]).unlink()
    with pytest.raises(ValueError, match=r"pytorch_model-1-of-2\.bin, which is not there"):
        read_all(tmp_path)


class Harmful:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code ran')",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path):
    write_config(tmp_path)
    torch.save({"a.weight": Harmful()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: not a file of plain tensors"):
        read_all(tmp_path)


def test_a_pickle_of_something_else_is_refused(tmp_path: Path):
    write_config(tmp_path)
    torch.save({"epoch": 3}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: must hold a dict of tensors"):
        read_all(tmp_path)


def test_a_broken_safetensors_file_is_named(tmp_path: Path):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match=f"{tmp_path}: not a safetensors file"):
        read_all(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path):
    write_config(tmp_path)
    with pytest.raises(ValueError, match=r"neither \*\.safetensors nor"):
        read_all(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"), [(None, "cannot be read"), ("{", "not JSON"), ("[1]", "must hold an object, not list")]
)
def test_a_config_that_is_none_is_named(tmp_path: Path, text: str | None, problem: str):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=rf"config\.json: {problem}"):
        read_json(path)


def test_a_tensor_that_does_not_fit_is_named_with_both_shapes():
    files = files_of({})
    with pytest.raises(ValueError, match=r"head: tensor 'a\.weight' has shape \(2, 3\), expected \(3, 2\)"):
        files.take("a.weight", (3, 2))
    with pytest.raises(ValueError, match="head: tensor 'b' is missing"):
        files.take("b", (3, 2))
    with pytest.raises(ValueError, match=r"tensor 'ids' has dtype torch\.int64, expected one like torch\.float32"):
        files.take("ids", (2,))
    with pytest.raises(ValueError, match="head: tensor 'b' is missing"):
        files.shape("b")


def test_what_nobody_took_is_named():
    files = files_of({})
    files.take("a.weight", (2, 3))
    with pytest.raises(ValueError, match="head: tensor 'ids' has no place"):
        files.require_all_taken()
    files.skip("ids")
    files.require_all_taken()


def test_floats_are_read_as_the_wanted_dtype():
    assert files_of({}).take("a.weight", (2, 3), torch.float16).dtype == torch.float16
    half = {"a.weight": torch.ones(2, dtype=torch.bfloat16)}
    assert files_of({}, half).take("a.weight", (2,)).dtype == torch.float32


def test_config_values_are_checked():
    files = files_of({"n": 3, "text": "3", "flag": True, "rate": 0.5, "zero": 0, "none": None})
    assert files.integer("missing", "n") == 3
    assert files.integer("none", default=7) == 7
    assert files.boolean("flag", False)
    assert files.boolean("missing", True)
    assert files.number("rate", 1.0) == 0.5
    assert files.number("missing", 1.0) == 1.0
    with pytest.raises(ValueError, match=r"config\.json: text must be an integer of at least 1, not '3'"):
        files.integer("text")
    with pytest.raises(ValueError, match="zero must be an integer of at least 1"):
        files.integer("zero")
    with pytest.raises(ValueError, match="flag must be an integer"):
        files.integer("flag")
    with pytest.raises(ValueError, match="a or b is missing"):
        files.integer("a", "b")
    with pytest.raises(ValueError, match="n must be true or false"):
        files.boolean("n", False)
    with pytest.raises(ValueError, match="text must be a number"):
        files.number("text", 1.0)


def test_written_heads_are_stored_as_the_wanted_dtype(tmp_path: Path):
    write_head(tmp_path / "new", {"n": 3}, TENSORS, dtype=torch.float16, file_name="head.safetensors")
    stored = load_file(tmp_path / "new" / "head.safetensors")
    assert stored["a.weight"].dtype == torch.float16
    assert stored["ids"].dtype == torch.int64
    assert read_json(tmp_path / "new" / "config.json") == {"n": 3, "dtype": "float16"}
