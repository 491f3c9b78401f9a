"""GGUF: what the reference writer writes is read back; whatever else there may be on disk gives a InvalidModelFile."""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backends.quant import BY_GGUF_ID, QuantType
from homeserve import checkpoint
from homeserve.checkpoint import gguf
from homeserve.checkpoint.mapped import kind_of
from homeserve.errors import InvalidModelFile, ModelNotFound

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "1", 16)


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, raw: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + raw


def tensor(name: str, dims: Sequence[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


ARCH = key("general.architecture", 8, string("llama"))


def build(
    keys: Sequence[bytes] = (ARCH,),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    key_count: int | None = None,
    tensor_count: int | None = None,
) -> bytes:
    """A GGUF from its parts; the counts may lie."""
    counts = (len(tensors) if tensor_count is None else tensor_count, len(keys) if key_count is None else key_count)
    head = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def sound() -> bytes:
    """A small sound file with every value type, arrays, and three tensors."""
    scalars = ((0, "B", 1), (1, "b", -1), (2, "H", 2), (3, "h", -2), (4, "I", 3), (5, "i", -3))
    scalars += ((6, "f", 0.5), (7, "?", True), (10, "Q", 1 << 40), (11, "q", -(1 << 40)), (12, "d", 0.25))
    keys = [ARCH, *(key(f"k{kind}", kind, struct.pack("<" + code, value)) for kind, code, value in scalars)]
    words = ("a", "", "größe", "▁x")
    keys.append(key("words", 9, struct.pack("<IQ", 8, len(words)) + b"".join(map(string, words))))
    keys.append(key("numbers", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)))
    tensors = [tensor("a", (32, 2), 8, 0), tensor("b", (5,), 0, 96), tensor("c", (4, 3, 2), 1, 128)]
    data = bytes(range(68)) + bytes(28) + np.arange(5, dtype=np.float32).tobytes() + bytes(12) + bytes(48)
    return build(keys, tensors, data)


@pytest.fixture
def put(tmp_path: Path) -> Callable[[bytes], str]:
    path = tmp_path / "model.gguf"

    def put(data: bytes, name: str = "model.gguf") -> str:
        target = path.with_name(name)
        target.write_bytes(data)
        return str(target)

    return put


Put = Callable[..., str]


def refused(path: str) -> InvalidModelFile:
    with pytest.raises(InvalidModelFile) as caught:
        checkpoint.open(path).close()
    error = caught.value
    assert error.path == path and path in str(error) and error.where
    return error


# --------------------------------------------------------------------------------------------------------- sound files


def test_every_value_and_tensor_is_read(put: Put) -> None:
    opened = checkpoint.open(put(sound()))
    metadata = opened.metadata
    assert [metadata[f"k{kind}"] for kind in (0, 1, 2, 3, 4, 5, 7)] == [1, -1, 2, -2, 3, -3, True]
    assert [metadata[f"k{kind}"] for kind in (6, 10, 11, 12)] == [0.5, 1 << 40, -(1 << 40), 0.25]
    words, numbers = metadata["words"], metadata["numbers"]
    assert words == ("a", "", "größe", "▁x") and numbers == [1, -2, 3]
    assert isinstance(words, gguf.Array)
    assert words[2] == "größe" and len(words) == 4 and words[1:] == ("", "größe", "▁x")
    a, b, c = (opened.tensors[name] for name in "abc")
    assert (a.type, a.rows, a.cols, bytes(a.data)) == (QuantType.Q8_0, 2, 32, bytes(range(68)))
    assert (b.type, b.rows, b.cols) == (QuantType.F32, 1, 5)
    assert b.data.view(np.float32).tolist() == [0, 1, 2, 3, 4]
    assert (c.type, c.rows, c.cols, c.data.nbytes) == (QuantType.F16, 6, 4, 48)
    assert not a.data.flags.owndata and not a.data.flags.writeable
    opened.drop_pages()
    assert bytes(a.data[:4]) == bytes(range(4))
    opened.close()
    assert bytes(a.data[:4]) == bytes(range(4)), "a view that is held keeps the map"


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(put: Put, version: int) -> None:
    assert checkpoint.open(put(build(version=version))).arch == "llama"


def test_the_reference_writer_is_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    path = tmp_path / "written.gguf"
    writer = reference.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_file_type(15)
    writer.add_custom_alignment(64)
    writer.add_token_list([f"t{i}" for i in range(300)])
    writer.add_token_types([1] * 300)
    writer.add_chat_template([{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}])
    floats = {f"t.{i}": rng.standard_normal((3 + i, 256), np.float32) for i in range(4)}
    kinds = [reference.GGMLQuantizationType[name] for name in ("Q4_0", "Q5_1", "BF16")]
    packed = {f"t.{i}": (kind, reference.quants.quantize(floats[f"t.{i}"], kind)) for i, kind in enumerate(kinds)}
    for name, (kind, raw) in packed.items():
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.add_tensor("t.3", floats["t.3"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = checkpoint.open(str(path))
    assert opened.metadata["llama.block_count"] == 2 and opened.metadata["general.alignment"] == 64
    assert opened.metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(300)]
    assert opened.chat_templates == {"default": "D", "tool_use": "T"}
    assert opened.quant_label == "Q4_K_M" and opened.file_bytes == path.stat().st_size
    for name, (kind, raw) in packed.items():
        view = opened.tensors[name]
        assert (view.type.name, view.rows, view.cols) == (kind.name, *floats[name].shape)
        assert bytes(view.data) == raw.tobytes()
    assert np.array_equal(opened.tensors["t.3"].data.view(np.float32).reshape(-1, 256), floats["t.3"])


def test_every_type_has_the_size_that_the_reference_says() -> None:
    for kind in BY_GGUF_ID.values():
        known = reference.GGML_QUANT_SIZES[reference.GGMLQuantizationType(kind.gguf_id)]
        assert known == (kind.block_len, kind.block_bytes), kind


def test_the_label_falls_back_to_the_type_with_most_bytes(put: Put) -> None:
    assert checkpoint.open(put(sound())).quant_label == "Q8_0"
    assert checkpoint.open(put(build())).quant_label == "none"


def test_tokens_that_are_no_utf8_are_kept_readable(put: Put) -> None:
    raw = struct.pack("<IQ", 8, 2) + string(b"\xff\xfe") + string("ok")
    assert checkpoint.open(put(build([ARCH, key("words", 9, raw)]))).metadata["words"] == ("\ufffd\ufffd", "ok")


def test_the_digest_follows_the_vocabulary(put: Put) -> None:
    def digest(pre: str, other: str) -> str:
        return checkpoint.open(
            put(build([ARCH, key("tokenizer.ggml.pre", 8, string(pre)), key("general.name", 8, string(other))]))
        ).tokenizer.digest

    assert digest("a", "x") == digest("a", "y") != digest("b", "x")


# ------------------------------------------------------------------------------------------------- what is refused


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "one byte": (b"G", "text"),
    "magic only": (b"GGUF", "ends at byte 4"),
    "version 1": (build(version=1), "too old"),
    "version 4": (build(version=4), "too new"),
    "big endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "keys that cannot be": (build(key_count=1 << 62), "key"),
    "more keys than bytes": (build(key_count=1000), "key"),
    "tensors that cannot be": (build(tensor_count=1 << 63), "tensor"),
    "more tensors than bytes": (build(tensor_count=100), "tensor"),
    "no architecture": (build([]), "missing"),
    "architecture is a number": (build([key("general.architecture", 4, bytes(4))]), "architecture"),
    "architecture is empty": (build([key("general.architecture", 8, string(""))]), "architecture"),
    "key twice": (build([ARCH, ARCH]), "twice"),
    "key without a name": (build([ARCH, key("", 4, bytes(4))]), "name"),
    "key of no UTF-8": (build([ARCH, key(b"\xff", 4, bytes(4))]), "UTF-8"),
    "endless key": (build([ARCH, struct.pack("<Q", (1 << 64) - 1)], data=bytes(64)), "name"),
    "endless text": (build([ARCH, key("k", 8, struct.pack("<Q", (1 << 64) - 1))]), "ends at byte"),
    "unknown value type": (build([ARCH, key("k", 13, bytes(8))]), "value type 13"),
    "array of arrays": (build([ARCH, key("k", 9, struct.pack("<IQ", 9, 1) + bytes(12))]), "value type 9"),
    "endless array": (build([ARCH, key("k", 9, struct.pack("<IQ", 12, 1 << 61))]), "ends at byte"),
    "array over 64 bits": (build([ARCH, key("k", 9, struct.pack("<IQ", 12, (1 << 64) - 1))]), "ends at byte"),
    "endless strings": (build([ARCH, key("k", 9, struct.pack("<IQ", 8, 1 << 60))]), "strings"),
    "strings past the end": (build([ARCH, key("k", 9, struct.pack("<IQ", 8, 9) + bytes(16))]), "ends at byte"),
    "string past the end": (
        build([ARCH, key("k", 9, struct.pack("<IQQ", 8, 1, 1 << 50))], data=bytes(64)),
        "ends at byte",
    ),
    "alignment 0": (build([ARCH, key("general.alignment", 4, struct.pack("<I", 0))]), "power of two"),
    "alignment 48": (build([ARCH, key("general.alignment", 4, struct.pack("<I", 48))]), "power of two"),
    "alignment 2^31": (build([ARCH, key("general.alignment", 4, struct.pack("<I", 1 << 31))]), "power of two"),
    "alignment is a text": (build([ARCH, key("general.alignment", 8, string("32"))]), "power of two"),
    "alignment is a flag": (build([ARCH, key("general.alignment", 7, b"\1")]), "power of two"),
    "no dimensions": (build(tensors=[tensor("t", (), 0, 0)]), "dimensions"),
    "many dimensions": (build(tensors=[tensor("t", (1,) * 5, 0, 0)], data=bytes(64)), "dimensions"),
    "dimension 0": (build(tensors=[tensor("t", (0, 4), 0, 0)]), "shape"),
    "dimensions over 64 bits": (build(tensors=[tensor("t", (1 << 32, 1 << 32, 4), 0, 0)]), "data section"),
    "dimension over all bounds": (build(tensors=[tensor("t", (1 << 60,), 0, 0)]), "shape"),
    "part of a block": (build(tensors=[tensor("t", (33,), 8, 0)], data=bytes(64)), "blocks"),
    "a type to come": (build(tensors=[tensor("t", (32,), 99, 0)], data=bytes(64)), "type 99"),
    "a type that was removed": (build(tensors=[tensor("t", (32,), 4, 0)], data=bytes(64)), "Q4_2"),
    "a type known elsewhere": (build(tensors=[tensor("t", (128,), 41, 0)], data=bytes(64)), "Q1_0"),
    "tensor past the end": (build(tensors=[tensor("t", (32,), 0, 0)], data=bytes(127)), "data section"),
    "tensor far away": (build(tensors=[tensor("t", (8,), 0, (1 << 64) - 32)], data=bytes(64)), "data section"),
    "tensor off its alignment": (build(tensors=[tensor("t", (4,), 0, 8)], data=bytes(64)), "multiple"),
    "tensor twice": (build(tensors=[tensor("t", (4,), 0, 0)] * 2, data=bytes(64)), "twice"),
    "tensors overlap": (
        build(tensors=[tensor("t", (16,), 0, 0), tensor("u", (4,), 0, 32)], data=bytes(64)),
        "overlaps",
    ),
    "tensor without a name": (build(tensors=[tensor("", (4,), 0, 0)], data=bytes(64)), "name"),
    "long tensor name": (build(tensors=[tensor("t" * 200, (4,), 0, 0)], data=bytes(64)), "name"),
    "projector": (build([ARCH, key("general.type", 8, string("mmproj"))]), "projector"),
    "later part of a split": (build([key("split.no", 2, struct.pack("<H", 3))]), "part 4"),
    "split with another name": (
        build([ARCH, key("split.no", 2, bytes(2)), key("split.count", 2, struct.pack("<H", 2))]),
        "part 1 of 2",
    ),
    "split count is a text": (build([ARCH, key("split.count", 8, string("2"))]), "whole number"),
    "picture": (b"\x89PNG\r\n\x1a\n" + bytes(100), "PNG"),
    "safetensors": (struct.pack("<Q", 2) + b"{}", "safetensors"),
    "text": (b"hello, I am a model\n" * 4, "text"),
    "page": (b"<!DOCTYPE html><html>", "HTML"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "LFS"),
    "pickle archive": (b"PK\x03\x04" + bytes(50), "ZIP"),
    "noise": (bytes(range(128, 256)), "unknown data"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name(put: Put, case: str) -> None:
    data, words = HOSTILE[case]
    error = refused(put(data))
    assert words in str(error), str(error)
    assert "\n" not in str(error) and len(str(error)) < 1500


def test_a_file_cut_anywhere_is_refused(put: Put) -> None:
    whole = sound()
    step = 1 if SLOW else 13
    for length in range(0, len(whole), step):
        refused(put(whole[:length]))


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        checkpoint.open(str(tmp_path / "absent.gguf"))
    with pytest.raises(ModelNotFound):
        checkpoint.open(str(tmp_path))
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    refused(str(pipe))
    with pytest.raises(InvalidModelFile, match="folder"):
        checkpoint.open(str(tmp_path / "a.safetensors"))
    refused("/dev/null")
    refused("a\0b.gguf")


def test_a_folder_with_one_gguf_is_that_gguf(put: Put, tmp_path: Path) -> None:
    put(build())
    assert checkpoint.open(str(tmp_path)).arch == "llama"
    put(build(), "other.gguf")
    with pytest.raises(InvalidModelFile, match="several"):
        checkpoint.open(str(tmp_path))


def test_words_for_kinds_of_files() -> None:
    assert kind_of(b"\x1f\x8b\x08\0") == "a gzip archive"
    assert kind_of(b'  {"a": 1}') == "a JSON text"
    assert kind_of(b"") == "unknown data"


# ----------------------------------------------------------------------------------------------------------- splits


def split(tmp_path: Path, parts: Sequence[bytes]) -> str:
    for number, data in enumerate(parts, 1):
        (tmp_path / f"m-{number:05d}-of-{len(parts):05d}.gguf").write_bytes(data)
    return str(tmp_path / f"m-00001-of-{len(parts):05d}.gguf")


def part(number: int, count: int, total: int, names: str = "", *, arch: bool = False) -> bytes:
    keys = [ARCH] if arch else []
    keys += [key("split.no", 2, struct.pack("<H", number)), key("split.count", 2, struct.pack("<H", count))]
    keys.append(key("split.tensors.count", 5, struct.pack("<i", total)))
    tensors = [tensor(name, (8,), 0, 32 * index) for index, name in enumerate(names)]
    return build(keys, tensors, b"".join(name.encode() * 32 for name in names))


def test_a_split_model_is_one(tmp_path: Path) -> None:
    path = split(tmp_path, [part(0, 3, 3, arch=True), part(1, 3, 3, "ab"), part(2, 3, 3, "c")])
    opened = checkpoint.open(path)
    assert {name: bytes(view.data[:1]) for name, view in opened.tensors.items()} == {"a": b"a", "b": b"b", "c": b"c"}
    assert opened.file_bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert checkpoint.open(str(tmp_path)).arch == "llama", "the folder means its first part"
    opened.close()


def test_damaged_splits_are_refused(tmp_path: Path) -> None:
    first, second = part(0, 2, 2, "a", arch=True), part(1, 2, 2, "b")
    cases = {
        "whole number": [build([ARCH, key("split.count", 6, struct.pack("<f", 2))]), second],
        "promises 3": [part(0, 2, 3, "a", arch=True), part(1, 2, 3, "b")],
        "earlier part": [first, part(1, 2, 2, "a")],
        "part 2 of 2": [first, part(0, 2, 2, "b")],
        "ends at byte": [first, second[:70]],
    }
    for words, parts in cases.items():
        with pytest.raises(InvalidModelFile, match=words):
            checkpoint.open(split(tmp_path, parts))
    path = split(tmp_path, [first, second])
    with pytest.raises(InvalidModelFile, match="first part"):
        try:
            checkpoint.open(path.replace("00001", "00002", 1))
        except InvalidModelFile as error:
            assert "first part" in (error.fix or "")
            raise InvalidModelFile(error.path, error.where, error.fix or "") from error
    Path(path.replace("00001-of", "00002-of")).unlink()
    with pytest.raises(InvalidModelFile, match="missing"):
        checkpoint.open(path)


# -------------------------------------------------------------------------------------------------------------- fuzz


def mutated(rng: random.Random, whole: bytes) -> bytes:
    """One to four changes, of the kinds that break parsers."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(7):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                count = rng.choice((0, 1, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1))
                data[at : at + 8] = struct.pack("<Q", count)
            case 2:
                data[at : at + 4] = struct.pack("<I", rng.choice((0, 8, 9, 12, 13, 0x7FFFFFFF, 0xFFFFFFFF)))
            case 3:
                del data[at : at + rng.randint(1, 64)]
            case 4:
                data[at:at] = rng.randbytes(rng.randint(1, 64))
            case 5:
                data[at:at] = data[at : at + rng.randint(1, 200)]
            case 6:
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("round", range(5000 if SLOW else 24))
def test_mutated_files_open_or_are_refused(put: Put, round: int) -> None:
    rng = random.Random(SEED * 10_007 + round)
    whole = sound()
    opened_count = 0
    for _ in range(40):
        data = mutated(rng, whole)
        try:
            opened = checkpoint.open(put(data))
        except InvalidModelFile:
            continue
        opened_count += 1
        for view in opened.tensors.values():
            assert view.data.nbytes == view.rows * view.type.row_bytes(view.cols)
        for value in opened.metadata.values():
            assert not isinstance(value, gguf.Array) or len(value.values()) == len(value)
        opened.close()
    assert opened_count < 40, "no mutation did any harm: nothing was tested"


@settings(max_examples=3_000 if SLOW else 30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=400), st.sampled_from((2, 3)), st.tuples(st.integers(0, 9), st.integers(0, 9)))
def test_any_bytes_after_the_preamble(put: Put, data: bytes, version: int, counts: tuple[int, int]) -> None:
    path = put(b"GGUF" + struct.pack("<IQQ", version, *counts) + data)
    try:
        checkpoint.open(path).close()
    except InvalidModelFile as error:
        assert error.path == path


def test_hostile_counts_allocate_nothing(put: Put) -> None:
    cases = [data for data, _ in HOSTILE.values()]
    tracemalloc.start()
    try:
        for data in cases:
            path = put(data)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with pytest.raises(InvalidModelFile):
                checkpoint.open(path)
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 1 << 20, f"{peak - before} bytes for a file of {len(data)}"
    finally:
        tracemalloc.stop()
