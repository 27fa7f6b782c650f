"""Regenerate the committed protobuf code: `python proto/generate.py [OUTPUT_FOLDER]`.

The virtual path mapping `-I outrider/proto=proto` gives the generated files the right absolute imports. Generate with
grpcio-tools 1.72: its code runs on protobuf 6 and 7, where newer generators refuse protobuf 6.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTO_FOLDER = Path(__file__).resolve().parent


def generate(destination: Path) -> list[Path]:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` of every .proto file into `destination`."""
    sources = sorted(PROTO_FOLDER.glob("*.proto"))
    with tempfile.TemporaryDirectory() as scratch:
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "pyi", "grpc_python")]
        mapping = f"-Ioutrider/proto={PROTO_FOLDER}"
        well_known = f"-I{Path(grpc_tools.__file__).parent / '_proto'}"
        if protoc.main(
            ["protoc", mapping, well_known, *outputs, *(f"outrider/proto/{source.name}" for source in sources)]
        ):
            raise SystemExit("protoc failed")
        return [
            Path(shutil.copy(path, destination / path.name))
            for path in sorted((Path(scratch) / "outrider" / "proto").iterdir())
        ]


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO_FOLDER)
