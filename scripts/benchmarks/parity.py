"""The same greedy answers from two programs, up to where even the exact arithmetic is undecided.

Two implementations that round differently part sooner or later: at a place where the two best tokens are almost equal,
either is right. So a parting counts as a tie only where the oracle (the reference backend, dense float32 weights) sees
a gap below `TIE` between the logits of its two best tokens; every parting is listed with that gap. Token ids are
compared, not text. The peer runs without its prompt cache and with an f32 KV cache, homeserve with f32 KV rows as well.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))

from servers import Server  # noqa: E402

TIE = 0.05
"""Nats between the two best tokens, in the oracle, below which a parting is a tie."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three primary colours are",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "List of planets in order from the sun:\n1.",
    "To make a good cup of tea, first",
    "The meaning of the word 'serendipity' is",
    "In 1969, humans first",
    "Question: What is 7 times 8?\nAnswer:",
    "Die Hauptstadt von Deutschland ist",
    "Le chat est assis sur",
    "import numpy as np\n\nx = np.",
    "The best way to learn a new language is",
    "Roses are red, violets are blue,",
    "A list of fruits: apple, banana,",
    "Photosynthesis is the process by which",
    "The quick brown fox jumps over",
    "Albert Einstein was born in",
)


@dataclass(frozen=True)
class Parting:
    """Where two answers differ first. `gap` is of the oracle's two best logits there."""

    prompt: str
    at: int
    ours: int
    theirs: int
    gap: float
    oracle: int
    """The token that the oracle takes there."""


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


class Ours:
    """A homeserve that answers with token ids, and scores a sequence."""

    def __init__(self, server: Server) -> None:
        self.url = server.url
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=60) as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def tokens(self, prompt: str) -> list[int]:
        return list(post(f"{self.url}/tokenize", {"prompt": prompt, "add_special": True})["tokens"])

    def answer(self, prompt: list[int], count: int) -> list[int]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": count, "temperature": 0}
        body["return_token_ids"] = True
        return list(post(f"{self.url}/v1/completions", body)["choices"][0]["token_ids"])

    def gap(self, tokens: list[int]) -> float:
        """Between the two best tokens behind `tokens`."""
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "logprobs": 2}
        best = post(f"{self.url}/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
        first, second = sorted(best.values(), reverse=True)[:2]
        return float(first - second)


def theirs(url: str, prompt: list[int], count: int) -> list[int]:
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "top_k": 1, "cache_prompt": False}
    return list(post(f"{url}/completion", body | {"return_tokens": True})["tokens"])


def dense_copy(model: Path, target: Path) -> Path:
    """The same GGUF with every tensor as float32."""
    import gguf

    reader = gguf.GGUFReader(str(model))
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        sub = kinds[1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kinds[0], sub_type=sub)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype("float32")
        writer.add_tensor(tensor.name, values.reshape(tuple(int(n) for n in reversed(tensor.shape))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, type=Path)
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dense", action="store_true", help="compare on a float32 copy, where neither rounds weights")
    parser.add_argument("--record", type=Path)
    args = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="parity-"))
    if args.dense:
        args.model = dense_copy(args.model, logs / f"{args.model.stem}.f32.gguf")
    up = [sys.executable, "-P", "-m", "homeserve", "up", str(args.model), "--context", "2048", "--kv-type", "f32"]
    peer = [str(args.peer), "-m", str(args.model), "-c", "2048", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "-t", "2"]
    commands = {"ours": up, "peer": peer, "oracle": [*up, "--backend", "reference", "--max-running", "1"]}
    servers = {
        name: Server(name, command, logs / f"{name}.log", "/health" if name == "peer" else "/ready", realtime=False)
        for name, command in commands.items()
    }
    equal, partings = 0, list[Parting]()
    try:
        answers = {}
        for name in ("ours", "peer"):
            servers[name].start()
        ours = Ours(servers["ours"])
        for prompt in PROMPTS[: args.prompts]:
            ids = ours.tokens(prompt)
            answers[prompt] = (ids, ours.answer(ids, args.tokens), theirs(servers["peer"].url, ids, args.tokens))
        for name in ("ours", "peer"):
            servers[name].stop()
        servers["oracle"].start()
        oracle = Ours(servers["oracle"])
        for prompt, (ids, mine, other) in answers.items():
            at = next((n for n, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), None)
            if at is None:
                equal += 1
            else:
                before = ids + mine[:at]
                (best,) = oracle.answer(before, 1)
                partings.append(Parting(prompt, at, mine[at], other[at], oracle.gap(before), best))
    finally:
        for server in servers.values():
            server.stop()
    text = told(args, equal, partings)
    print(text)
    if args.record is not None:
        args.record.write_text(text + "\n")
    return 0 if all(parting.gap < TIE for parting in partings) else 1


def told(args: argparse.Namespace, equal: int, partings: list[Parting]) -> str:
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    ties = sum(parting.gap < TIE for parting in partings)
    lines = [
        f"scripts/parity --model {args.model.name} --prompts {args.prompts} --tokens {args.tokens}",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {commit.stdout.strip()}, {platform.machine()}",
        f"{equal} of {args.prompts} prompts equal for {args.tokens} tokens; {len(partings)} part,"
        f" {ties} of them at a tie (the oracle's two best logits closer than {TIE})",
    ]
    lines += [
        f"  {parting.prompt!r}: at token {parting.at} {parting.ours} against {parting.theirs}, gap {parting.gap:.4f},"
        f" the oracle takes {'ours' if parting.oracle == parting.ours else 'theirs'}"
        for parting in partings
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
