"""The committed protobuf code is what its .proto files generate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROTO_FOLDER = Path(__file__).resolve().parents[2] / "proto"


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of fresh output; generated in a process of its own, for protoc keeps global state."""
    destination = tmp_path_factory.mktemp("generated")
    subprocess.run([sys.executable, PROTO_FOLDER / "generate.py", destination], check=True)
    return destination


def test_generates_exactly_the_committed_files(regenerated: Path) -> None:
    committed = {path.name for path in PROTO_FOLDER.glob("*_pb2*")}
    assert {path.name for path in regenerated.iterdir()} == committed
    sources = {path.stem for path in PROTO_FOLDER.glob("*.proto")}
    assert committed == {f"{name}_pb2{end}" for name in sources for end in (".py", ".pyi", "_grpc.py")}


def test_committed_code_is_up_to_date_byte_for_byte(regenerated: Path) -> None:
    stale = [
        path.name for path in regenerated.iterdir() if path.read_bytes() != (PROTO_FOLDER / path.name).read_bytes()
    ]
    assert not stale, f"{stale} differ from their .proto: run `make proto`"


def test_generated_modules_import_each_other_by_their_full_name() -> None:
    for path in PROTO_FOLDER.glob("*_pb2_grpc.py"):
        assert "from outrider.proto import" in path.read_text()
