"""Write a GGUF file in fp16 with the values that we serve: what OpenVINO reads without packing them anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, GGUFWriter, dequantize

LEFT_OUT = ("general.architecture", "general.file_type", "general.quantization_version")  # the writer has its own
FILE_TYPE_F16 = 1


def write_half_gguf(source: Path, target: Path) -> None:
    """Dequantise a file's tensors, round them to bfloat16 as `model.gguf` does, and keep everything else."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in LEFT_OUT:
            continue
        if field.types[0] == GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_file_type(FILE_TYPE_F16)
    for tensor in reader.tensors:
        wide = np.array(dequantize(tensor.data, tensor.tensor_type))
        rounded = torch.from_numpy(wide).bfloat16().float().numpy()
        writer.add_tensor(tensor.name, rounded if rounded.ndim == 1 else rounded.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
