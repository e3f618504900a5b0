"""The default model as GGUF files of one precision each, for llama.cpp: BF16, Q8_0, and the package's own Q4_1.

All three hold the weights of the package's Q4_1 file: BF16 and Q8_0 are made from it by dequantising and requantising,
so that every engine computes with the same numbers (up to the precision compared). Made once and kept with the peers.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

PRECISIONS = ("BF16", "Q8_0", "Q4_1")


def _copy_metadata(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, file_type: int) -> None:
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
    writer.add_file_type(file_type)


def export(source: Path, precision: str, directory: Path) -> Path:
    """The path of ``source`` at ``precision``; written to ``directory`` when it is not there yet."""
    if precision == "Q4_1":
        return source
    target = directory / f"{source.name.removesuffix('.gguf').removesuffix('.Q4_1')}.{precision}.gguf"
    if target.is_file():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    quant = gguf.GGMLQuantizationType[precision]
    reader = gguf.GGUFReader(source)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, arch=reader.fields["general.architecture"].contents())
    _copy_metadata(reader, writer, gguf.LlamaFileType[f"MOSTLY_{precision}"])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:  # norms stay in float32, as llama.cpp's own converter leaves them
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target
