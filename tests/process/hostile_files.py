"""Damaged model files by the thousand, and a child process that opens each.

    python hostile_files.py SEED FIRST COUNT FOLDER

A file is made from a small sound one that is described here, not stored: a list of keys and a list of tensors. Damage
is done to the description (a count that lies, a shape that belongs to another architecture, two tensors at one place, a
split that leads in a circle) and, after it is written, to its bytes. Everything follows from SEED and the file's
number, so a failure is repeated by these two.

The child works under 1 GiB of address space and 2 s of processor time for each file; whatever breaks that, and every
error that is not one of the `ModelError`s with a path, a place and a reason, is a failure. It prints one JSON line at
the end.
"""

from __future__ import annotations

import collections
import json
import math
import random
import resource
import shutil
import signal
import struct
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ADDRESS_SPACE_BYTES = 1 << 30
SECONDS_EACH = 2.0

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, VOCAB = 32, 4, 2, 8, 64, 2, 48
U32, U64 = 4, 10
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
BOUNDS = {"B": (0, 255), "b": (-128, 127), "H": (0, 65535), "h": (-(2**15), 2**15 - 1), "?": (0, 1)}
ODD_COUNTS = (0, 1, 2, 255, 2**16, 2**24, 2**24 + 1, 2**29, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**63, 2**64 - 1)
ODD_NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    31,
    33,
    255,
    2**15,
    2**16,
    2**20 + 1,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63,
    2**64 - 1,
)
ODD_FLOATS = (0.0, -0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"), 1e38)
ODD_TEXTS = ("", "\0", "llama", "x" * 300, "qwen35", "../../etc/passwd", "%s%n", "\u202e", "None", "1" * 40)
ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen2moe", "qwen3moe", "gpt-oss", "qwen35", "qwen35moe",
    "qwen3next", "gemma4", "nobody",
)  # fmt: skip
BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144), 30: (1, 2)}
"""Elements and bytes of a block, of the types used here."""


# ------------------------------------------------------------------------------------------------------- a sound model


def llama_keys() -> list[list[Any]]:
    """[name, type, value]; arrays have the type 9 and a value (element type, elements)."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(32, 64)), "▁", "a", "b", "ab", "▁a", "▁ab"]
    tokens += [chr(ord("c") + index) for index in range(VOCAB - len(tokens))]
    types = [2, 3, 3, *[6] * 32, *[1] * (VOCAB - 35)]
    return [
        ["general.architecture", 8, "llama"],
        ["general.alignment", U32, 32],
        ["llama.block_count", U32, LAYERS],
        ["llama.context_length", U32, 512],
        ["llama.embedding_length", U32, HIDDEN],
        ["llama.feed_forward_length", U32, FFN],
        ["llama.attention.head_count", U32, HEADS],
        ["llama.attention.head_count_kv", U32, KV_HEADS],
        ["llama.rope.dimension_count", U32, HEAD_DIM],
        ["llama.rope.freq_base", 6, 10000.0],
        ["llama.attention.layer_norm_rms_epsilon", 6, 1e-5],
        ["llama.vocab_size", U32, VOCAB],
        ["tokenizer.ggml.model", 8, "llama"],
        ["tokenizer.ggml.tokens", 9, (8, tokens)],
        ["tokenizer.ggml.scores", 9, (6, [float(-index) for index in range(VOCAB)])],
        ["tokenizer.ggml.token_type", 9, (5, types)],
        ["tokenizer.ggml.bos_token_id", U32, 1],
        ["tokenizer.ggml.eos_token_id", U32, 2],
        ["tokenizer.chat_template", 8, "{{ messages[0].content }}"],
    ]


def other_vocabulary(rng: random.Random, keys: list[list[Any]]) -> None:
    """The same tokens as another model of tokenizers reads them."""
    model = rng.choice(("gpt2", "gemma4", "t5", "bert"))
    for key in keys:
        if key[0] == "tokenizer.ggml.model":
            key[2] = model
    if model in ("gpt2", "gemma4"):
        keys.append(["tokenizer.ggml.merges", 9, (8, ["a b", "▁ a", "▁a b"])])
        keys.append(["tokenizer.ggml.pre", 8, rng.choice(("gpt-2", "qwen35", "deepseek-llm", "afmoe", "kimi-k2"))])
    if model == "t5":
        table = [*struct.pack("<I", 1024), *bytes(1024), *b"a\0b\0"]
        keys.append(["tokenizer.ggml.precompiled_charsmap", 9, (0, table)])
        keys.append(["tokenizer.ggml.remove_extra_whitespaces", 7, True])
    keys += [[f"tokenizer.ggml.{name}_token_id", U32, 0] for name in ("unknown", "cls", "seperator")]


def llama_tensors() -> list[dict[str, Any]]:
    """Dimensions as GGUF writes them, fastest first. `at` is None for the next free place."""
    shapes = [("token_embd.weight", [HIDDEN, VOCAB], 8), ("output_norm.weight", [HIDDEN], 0)]
    shapes.append(("output.weight", [HIDDEN, VOCAB], 0))
    for layer in range(LAYERS):
        shapes += [
            (f"blk.{layer}.attn_norm.weight", [HIDDEN], 0),
            (f"blk.{layer}.attn_q.weight", [HIDDEN, HEADS * HEAD_DIM], 2),
            (f"blk.{layer}.attn_k.weight", [HIDDEN, KV_HEADS * HEAD_DIM], 1),
            (f"blk.{layer}.attn_v.weight", [HIDDEN, KV_HEADS * HEAD_DIM], 30),
            (f"blk.{layer}.attn_output.weight", [HEADS * HEAD_DIM, HIDDEN], 0),
            (f"blk.{layer}.ffn_norm.weight", [HIDDEN], 0),
            (f"blk.{layer}.ffn_gate.weight", [HIDDEN, FFN], 8),
            (f"blk.{layer}.ffn_up.weight", [HIDDEN, FFN], 8),
            (f"blk.{layer}.ffn_down.weight", [FFN, HIDDEN], 0),
        ]
    return [{"name": name, "dims": dims, "type": kind, "at": None} for name, dims, kind in shapes]


# ------------------------------------------------------------------------------------------------------------- writing


class Writer:
    """Writes a description. `lies`: probability that a length or count that it writes is another one."""

    def __init__(self, rng: random.Random, lies: float) -> None:
        self.rng = rng
        self.lies = lies

    def count(self, true: int, layout: str = "<Q") -> bytes:
        if self.lies and self.rng.random() < self.lies:
            true = self.rng.choice((*ODD_COUNTS, true + 1, true - 1, true * 2)) % (1 << (8 * struct.calcsize(layout)))
        return struct.pack(layout, true)

    def text(self, text: str | bytes) -> bytes:
        raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        return self.count(len(raw)) + raw

    def number(self, kind: int, value: object) -> bytes:
        code = NUMBERS[kind]
        number = value if isinstance(value, (int, float)) else 7
        if code in "fd":
            try:
                return struct.pack("<" + code, float(number))
            except OverflowError:
                return struct.pack("<" + code, float("inf"))
        size = struct.calcsize(code)
        whole = int(number) if math.isfinite(number) and abs(number) < 1e30 else 0
        return bytes([whole & 1]) if code == "?" else (whole % (1 << (8 * size))).to_bytes(size, "little")

    def value(self, kind: int, value: Any) -> bytes:
        if kind == 8:
            return self.text(str(value))
        if kind == 9:
            element, items = value
            head = struct.pack("<I", element) + self.count(len(items))
            if element == 8:
                return head + b"".join(self.text(str(item)) for item in items)
            if element == 9:
                return head + b"".join(self.value(9, item if isinstance(item, tuple) else (4, [])) for item in items)
            return head + b"".join(self.number(element, item) for item in items if element in NUMBERS)
        return self.number(kind, value) if kind in NUMBERS else bytes(8)

    def gguf(self, keys: list[list[Any]], tensors: list[dict[str, Any]], version: int = 3) -> bytes:
        head = [b"GGUF", struct.pack("<I", version), self.count(len(tensors)), self.count(len(keys))]
        for name, kind, value in keys:
            head += [self.text(name), struct.pack("<I", kind), self.value(kind, value)]
        at = 0
        for tensor in tensors:
            length = 1
            block, size = BLOCKS.get(tensor["type"], (1, 4))
            for dim in tensor["dims"]:
                length *= dim
            length = min(length // block * size, 1 << 20)
            place = at if tensor["at"] is None else tensor["at"]
            head += [self.text(tensor["name"]), self.count(len(tensor["dims"]), "<I")]
            head += [struct.pack("<Q", dim % (1 << 64)) for dim in tensor["dims"]]
            head.append(struct.pack("<IQ", tensor["type"], place % (1 << 64)))
            at = max(at, -(-(at + length) // 32) * 32)
        whole = b"".join(head)
        return whole + bytes(-len(whole) % 32) + bytes(at)


# -------------------------------------------------------------------------------------------------------------- damage


def damage_keys(rng: random.Random, keys: list[list[Any]]) -> None:
    at = rng.randrange(len(keys))
    name, kind, value = keys[at]
    match rng.randrange(9):
        case 0:
            del keys[at]
        case 1:
            keys.insert(rng.randrange(len(keys)), [name, kind, value])
        case 2:
            keys[at][0] = rng.choice((rng.choice(keys)[0], "", "x" * 70_000, "\ufffd", b"\xff\xfe", name + "x"))
        case 3:
            keys[at][1] = rng.choice((*range(14), 99, 2**32 - 1))
        case 4:
            keys[0] = ["general.architecture", 8, rng.choice(ARCHITECTURES)]
        case 5:
            key = rng.choice(("split.no", "split.count", "split.tensors.count", "general.type", "general.file_type"))
            keys.append([key, rng.choice((2, 5, 8)), rng.choice((*ODD_NUMBERS, *ODD_TEXTS))])
        case 6:
            arch = rng.choice(ARCHITECTURES)
            for key in keys:
                if isinstance(key[0], str) and key[0].startswith("llama."):
                    key[0] = arch + key[0][5:]
            keys[0] = ["general.architecture", 8, arch]
        case _:
            keys[at][2] = odd_value(rng, kind, value)
    for key in keys:
        if key[1] == 9 and not isinstance(key[2], tuple):
            key[2] = (rng.choice((4, 6, 8)), [key[2]] * rng.randrange(3))
        elif key[1] in (6, 12) and isinstance(key[2], tuple):
            key[2] = rng.choice(ODD_FLOATS)


def odd_value(rng: random.Random, kind: int, value: Any) -> Any:
    if kind == 8:
        return rng.choice((*ODD_TEXTS, str(value)[:-1], str(value) * 50))
    if kind == 9 and isinstance(value, tuple):
        element, items = value[0], list(value[1])
        match rng.randrange(5):
            case 0:
                items = items[: rng.randrange(len(items) + 1)]
            case 1:
                items = items * rng.choice((2, 50))
            case 2:
                element = rng.choice((*range(14), 2**32 - 1))
            case 3:
                element, items = 9, [(4, [1])] * rng.choice((1, 1000))
            case _:
                for _ in range(rng.randint(1, 5)):
                    items[rng.randrange(len(items))] = rng.choice((*ODD_TEXTS, *ODD_NUMBERS, *ODD_FLOATS))
        return element, items
    if kind in (6, 12):
        return rng.choice(ODD_FLOATS)
    return rng.choice(ODD_NUMBERS)


def damage_tensors(rng: random.Random, tensors: list[dict[str, Any]]) -> None:
    tensor = rng.choice(tensors)
    match rng.randrange(10):
        case 0:
            tensors.remove(tensor)
        case 1:
            tensors.append(dict(tensor))
        case 2:
            tensor["name"] = rng.choice((rng.choice(tensors)["name"], "", "n" * 200, b"\xff", "blk.9.x", "a\0b"))
        case 3:
            tensor["dims"] = [rng.choice((*ODD_COUNTS, 2**48, 32, 33)) for _ in range(rng.randrange(1, 6))]
        case 4:
            tensor["dims"] = tensor["dims"][::-1]
        case 5:
            dims = list(tensor["dims"])
            dims[rng.randrange(len(dims))] += rng.choice((-1, 1, 32, -32))
            tensor["dims"] = dims
        case 6:
            tensor["type"] = rng.choice((*range(45), 2**31, 2**32 - 1))
        case 7:
            tensor["at"] = rng.choice((*ODD_COUNTS, 0, 32, 33, 64, 1024, 2**20))
        case 8:
            other = rng.choice(tensors)
            tensor["dims"], other["dims"] = other["dims"], tensor["dims"]
        case _:
            tensors.append({"name": "blk.0.attn_q.bias", "dims": [rng.choice((1, 32, 31))], "type": 0, "at": None})
    if not tensors:
        tensors.append({"name": "token_embd.weight", "dims": [1], "type": 0, "at": None})


def damage_bytes(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    header = min(len(data), 3000)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(header if rng.random() < 0.9 else len(data))
        match rng.randrange(5):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(ODD_COUNTS))
            case 3:
                del data[at : at + rng.choice((1, 4, 8, 100))]
            case _:
                data[at:at] = data[at : at + rng.choice((1, 8, 64))]
        header = max(1, min(header, len(data)))
        if not data:
            return b"G"
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


# --------------------------------------------------------------------------------------------------- the kinds of input


def gguf_case(rng: random.Random, folder: Path) -> Path:
    keys, tensors = llama_keys(), llama_tensors()
    if rng.random() < 0.3:
        other_vocabulary(rng, keys)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        if rng.random() < 0.5:
            damage_keys(rng, keys)
        else:
            damage_tensors(rng, tensors)
    raw = Writer(rng, rng.choice((0.0, 0.0, 0.005, 0.05))).gguf(
        keys, tensors, rng.choice((*[3] * 20, 2, 2, 1, 0x03000000))
    )
    if rng.random() < 0.3:
        raw = damage_bytes(rng, raw)
    path = folder / "m.gguf"
    path.write_bytes(raw)
    return path


def split_case(rng: random.Random, folder: Path) -> Path:
    """Two or three parts, one of them wrong: missing, twice the same, of another count, leading back to the first."""
    count = rng.choice((2, 3))
    tensors = llama_tensors()
    paths = [folder / f"m-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    for index, path in enumerate(paths):
        keys = llama_keys() if index == 0 else []
        keys += [["split.no", 2, index], ["split.count", 2, count], ["split.tensors.count", 5, len(tensors)]]
        part = [dict(each) for each in tensors[index::count]]
        if rng.random() < 0.3:
            keys[-rng.randint(1, 3)][2] = rng.choice(ODD_NUMBERS)
        if rng.random() < 0.3:
            damage_tensors(rng, part)
        raw = Writer(rng, 0.0).gguf(keys, part)
        path.write_bytes(damage_bytes(rng, raw) if rng.random() < 0.2 else raw)
    victim = rng.choice(paths)
    match rng.randrange(6):
        case 0:
            victim.unlink()
        case 1:
            victim.unlink()
            victim.symlink_to(rng.choice(paths))
        case 2:
            victim.unlink()
            victim.mkdir()
        case 3:
            victim.write_bytes(rng.choice([each for each in paths if each.is_file()]).read_bytes())
        case _:
            pass
    return paths[0] if rng.random() < 0.8 else folder


CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": FFN, "vocab_size": VOCAB,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2,
}  # fmt: skip
ODD_JSON: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**80, 1.5, -1e308, "", "x", "llama", [], [1], [[]] * 3, {}, {"a": 1},
    [1] * 1000, "x" * 1000, {"rope_type": "yarn", "factor": 0}, {"rope_type": "llama3"}, {"rope_type": 3},
)  # fmt: skip


def folder_tensors() -> dict[str, list[int]]:
    shapes = {
        "model.embed_tokens.weight": [VOCAB, HIDDEN],
        "model.norm.weight": [HIDDEN],
        "lm_head.weight": [VOCAB, HIDDEN],
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + f"{norm}_layernorm.weight": [HIDDEN] for norm in ("input", "post_attention")}
        shapes |= {prefix + "self_attn.q_proj.weight": [HEADS * HEAD_DIM, HIDDEN]}
        shapes |= {prefix + f"self_attn.{part}_proj.weight": [KV_HEADS * HEAD_DIM, HIDDEN] for part in "kv"}
        shapes |= {prefix + "self_attn.o_proj.weight": [HIDDEN, HEADS * HEAD_DIM]}
        shapes |= {prefix + f"mlp.{part}_proj.weight": [FFN, HIDDEN] for part in ("gate", "up")}
        shapes |= {prefix + "mlp.down_proj.weight": [HIDDEN, FFN]}
    return shapes


def folder_case(rng: random.Random, folder: Path) -> Path:
    config = dict(CONFIG)
    shapes = folder_tensors()
    names = list(shapes)
    shards = rng.choice((1, 1, 2))
    files = ["model.safetensors"] if shards == 1 else [f"model-{n:05d}-of-00002.safetensors" for n in (1, 2)]
    index: dict[str, Any] = {"weight_map": {name: files[at % shards] for at, name in enumerate(names)}}
    for _ in range(rng.choice((0, 1, 1, 2))):
        key = rng.choice((*config, "rope_scaling", "quantization_config", "layer_types", "rope_parameters", "x"))
        config[key] = rng.choice((*ODD_JSON, *ARCHITECTURES))
    for at, file in enumerate(files):
        header, data = safetensors_header({name: shapes[name] for name in names[at::shards]})
        if rng.random() < 0.6:
            damage_header(rng, header)
        (folder / file).write_bytes(safetensors(rng, header, data))
    if shards == 2 or rng.random() < 0.1:
        if rng.random() < 0.4:
            name = rng.choice(names)
            odd = (*ODD_JSON, "../x.safetensors", "/etc/passwd", "none.safetensors", files[-1])
            index["weight_map"][rng.choice((name, "x", ""))] = rng.choice(odd)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = json.dumps(config).encode()
    (folder / "config.json").write_bytes(damage_bytes(rng, text) if rng.random() < 0.15 else text)
    if rng.random() < 0.2:
        odd = {rng.choice(("bos_token", "chat_template", "add_bos_token")): rng.choice(ODD_JSON)}
        (folder / "tokenizer_config.json").write_text(json.dumps(odd))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": rng.choice(ODD_JSON)}))
    return folder


def safetensors_header(shapes: dict[str, list[int]]) -> tuple[dict[str, Any], int]:
    header, at = {}, 0
    for name, shape in shapes.items():
        length = 4
        for dim in shape:
            length *= dim
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + length]}
        at += length
    return header, at


def damage_header(rng: random.Random, header: dict[str, Any]) -> None:
    name = rng.choice(list(header))
    entry = header[name]
    match rng.randrange(8):
        case 0:
            entry["dtype"] = rng.choice(("BF16", "F16", "F64", "I8", "U8", "F8_E4M3", "", 3, None))
        case 1:
            entry["shape"] = rng.choice(
                ([], [0], [-1], [2**40, 2**40], [1] * 40, "x", entry["shape"][::-1], [1.5], None)
            )
        case 2:
            entry["data_offsets"] = rng.choice(([0, 0], [-1, 4], [4, 0], [0, 2**63], [1, 2, 3], [0], None, [0.5, 1]))
        case 3:
            header[rng.choice(("", "x", "model.layers.7.x", "__metadata__"))] = rng.choice((entry, 3, {}, None, []))
        case 4:
            del header[name]
        case 5:
            other = header[rng.choice(list(header))]
            entry["data_offsets"] = other["data_offsets"] if isinstance(other, dict) else 1
        case 6:
            entry[rng.choice(("x", "dtype", "shape"))] = rng.choice(ODD_JSON)
        case _:
            header[name] = rng.choice(ODD_JSON)


def safetensors(rng: random.Random, header: dict[str, Any], data: int) -> bytes:
    text = json.dumps(header).encode()
    if rng.random() < 0.1:
        text = rng.choice(
            (b"[" * 5000, b'{"a":' * 3000, text[:-1], text + b"}", b"{" + b'"a":0,' * 3000 + b'"b":0}', b"")
        )
    length = len(text) if rng.random() < 0.9 else rng.choice(ODD_COUNTS)
    raw = struct.pack("<Q", length % 2**64) + text + bytes(max(0, data + rng.choice((0, 0, 0, 0, -4, 4, -data))))
    return damage_bytes(rng, raw) if rng.random() < 0.2 else raw


CASES = (gguf_case, gguf_case, gguf_case, split_case, folder_case)


def make(seed: int, number: int, folder: Path) -> Path:
    """The input `number`: its files in `folder`, and the path to open."""
    rng = random.Random(seed * 1_000_003 + number)
    return rng.choice(CASES)(rng, folder)


# ---------------------------------------------------------------------------------------------------------- the child


def use(path: Path) -> str:
    """Open, read, bind, tokenize, as a load does. The answer is what came of it; raises what no file may cause."""
    from homeserve import checkpoint
    from homeserve.errors import InvalidModelFile, ModelNotFound, UnknownArchitecture, UnsupportedModel, told_of
    from homeserve.models import registry, shape
    from homeserve.models.bind import bind
    from homeserve.text.tokenizer import Tokenizer

    try:
        opened = checkpoint.open(str(path), registry.folder_families)
        try:
            with told_of(opened.path):
                family = registry.family(opened.arch)
                config = family.config_from(opened.metadata)
                shape.shape_of(family, config, opened.tensors, name="m", quant=opened.quant_label)
                bind(family, config, opened.tensors)
                if "tokenizer.ggml.model" in opened.tokenizer.metadata:
                    tokenizer = Tokenizer.from_checkpoint(opened)
                    tokenizer.decode(tokenizer.encode("a </s> ab\u00e9 <0x41>"))
        finally:
            opened.close()
    except InvalidModelFile as error:
        assert error.path.startswith(str(path.parent)), f"no path: {error}"
        assert error.where and error.reason and len(str(error)) < 100_000, f"no place or reason: {error}"
        return "InvalidModelFile"
    except (ModelNotFound, UnknownArchitecture, UnsupportedModel) as error:
        assert error.message
        return type(error).__name__
    return "opened"


def main(argv: list[str]) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if argv[0] == "--open":
        return report([(Path(argv[1]), argv[1])])
    seed, first, count, base = int(argv[0], 16), int(argv[1]), int(argv[2]), Path(argv[3])
    folder = base / f"from-{first}"

    def inputs() -> Iterator[tuple[Path, object]]:
        for number in range(first, first + count):
            folder.mkdir()
            (base / f"at-{first}").write_text(str(number))
            yield make(seed, number, folder), number
            shutil.rmtree(folder)

    return report(inputs())


def report(inputs: Iterable[tuple[Path, object]]) -> int:
    """Use each file, and print what came of them all; ends at the first that breaks a rule."""
    outcomes: collections.Counter[str] = collections.Counter()
    for path, name in inputs:
        signal.setitimer(signal.ITIMER_PROF, SECONDS_EACH)  # its default action ends the process
        try:
            outcomes[use(path)] += 1
        except BaseException as error:  # noqa: BLE001  whatever else there may be is what is looked for
            traceback.print_exc()
            print(json.dumps({"failed": name, "error": repr(error)[:500]}), flush=True)
            return 1
        signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps({"outcomes": dict(outcomes), "peak_kib": peak_kib()}), flush=True)
    return 0


def peak_kib() -> int:
    """The most memory that was resident. The kernel's `ru_maxrss` starts with that of the process which forked this."""
    status = Path("/proc/self/status")
    if status.exists():
        return int(status.read_text().partition("VmHWM:")[2].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
