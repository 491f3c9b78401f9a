"""Tools that bring much with them: libraries of agents, and load tests that others trust. Of the slow tier.

They live in an environment of their own, made of requirements-slow.txt (every version pinned, some 6 GB) below
`build/clients`. The load tests cut texts with the model's own tokenizer, which is written as files for them.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from homeserve.checkpoint import opening
from homeserve.text.assembly import assemble
from homeserve.text.vocabulary import read_vocabulary

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
REQUIREMENTS = HERE / "requirements-slow.txt"
MODEL = "smollm2"
TIER = "slow"
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_COLOR": "1", "TERM": "dumb"}
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        os.environ.get("HOMESERVE_TEST_TIER") != "slow", reason="tools of the slow tier bring gigabytes of packages"
    ),
]


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder of commands of the tools' environment. HOMESERVE_TEST_TOOLS names one that is there already."""
    named = os.environ.get("HOMESERVE_TEST_TOOLS")
    if named:
        return Path(named) / "bin"
    folder = BUILD / f"tools-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]}"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=300)
        # Every package is pinned, so nothing has to be resolved.
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-deps", "-q", "-r", str(REQUIREMENTS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        (folder / "complete").touch()
    return folder / "bin"


@pytest.fixture(scope="session")
def tokenizer(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer as the folder that `transformers` reads."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with closing(opening.open(smollm2)) as checkpoint:
        source = checkpoint.tokenizer
        vocabulary = read_vocabulary(smollm2, source.metadata)
    assemble(vocabulary).save(str(folder / "tokenizer.json"))
    end = vocabulary.tokens[vocabulary.eos_id] if vocabulary.eos_id is not None else None
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A long text, served from here."""
    folder = tmp_path_factory.mktemp("book")
    lines = (f"Chapter {n}. The ferry left at {n % 12 + 1} and the keeper counted {n * 7} waves." for n in range(4000))
    (folder / "book.txt").write_text("\n".join(lines))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as shelf:
        thread = threading.Thread(target=shelf.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{shelf.server_address[1]}/book.txt"
        shelf.shutdown()
        thread.join()


def version_of(tools: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([tools / "python", "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    ("package", "script", "least"),
    [
        ("litellm", "litellm_python.py", 5),
        ("langchain-openai", "langchain_python.py", 6),
        ("instructor", "instructor_python.py", 2),
        ("pydantic-ai-slim", "pydantic_ai_python.py", 6),
    ],
)
def test_libraries(
    server: Any, visit: Callable[..., Any], tools: Path, tmp_path: Path, package: str, script: str, least: int
) -> None:
    argv = [str(tools / "python"), str(HERE / "scripts" / script), server.url, MODEL]
    shown = f"python tests/clients/scripts/{script} URL {MODEL}"
    visit(package, version_of(tools, package), argv, shown=shown, least=least, cwd=tmp_path, environ=OFFLINE)


def test_llm(server: Any, visit: Callable[..., Any], tools: Path, tmp_path: Path) -> None:
    models = f"- model_id: home\n  model_name: {MODEL}\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    argv = [str(tools / "llm"), "-m", "home", "-o", "max_tokens", "8", "Say hello."]
    environ = OFFLINE | {"LLM_USER_PATH": str(tmp_path)}
    shown = 'llm -m home -o max_tokens 8 "Say hello."'
    visit("llm", version_of(tools, "llm"), argv, shown=shown, cwd=tmp_path, environ=environ)


def load_tests(url: str, tokenizer: Path, book: str) -> dict[str, tuple[str, list[str], int]]:
    """Name -> package, command, least requests."""
    cut = str(tokenizer)
    data = "kind=synthetic_text,prompt_tokens=64,output_tokens=16"
    return {
        "llama-benchy": (
            "llama-benchy",
            [
                *("llama-benchy", "--base-url", f"{url}/v1", "--model", MODEL, "--tokenizer", cut, "--book-url", book),
                *("--pp", "64", "--tg", "16", "--depth", "0", "128", "--runs", "2", "--concurrency", "1", "2"),
                *("--exact-tg", "--skip-coherence", "--exit-on-first-fail"),
            ],
            8,
        ),
        "servebench": (
            "servebench",
            [
                *("servebench", "run", "--url", f"{url}/v1", "--model", MODEL, "--concurrency", "1,4"),
                *("--num-requests", "8", "--scrape-metrics", "auto"),
                *("--input-len", "64", "--output-len", "16"),
            ],
            16,
        ),
        "guidellm": (
            "guidellm",
            [
                *("guidellm", "run", "--backend", f"kind=openai_http,target={url},model={MODEL}"),
                *("--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"),
                *("--tokenizer", f"kind=hf_auto,model={cut}", "--data", data),
            ],
            6,
        ),
        "aiperf, chat": ("aiperf", aiperf(url, cut, "chat"), 8),
        "aiperf, responses": ("aiperf", aiperf(url, cut, "responses"), 8),
        "aiperf, messages": ("aiperf", aiperf(url, cut, "messages"), 8),
    }


def aiperf(url: str, tokenizer: str, kind: str) -> list[str]:
    return [
        *("aiperf", "profile", "--model", MODEL, "--url", url, "--endpoint-type", kind, "--streaming"),
        *("--tokenizer", tokenizer, "--concurrency", "2", "--request-count", "8", "--isl", "64", "--osl", "16"),
        *("--ui", "none"),
    ]


PROBING = ("servebench",)
"""Tools that ask for paths of other servers, to find out which engine they have before them."""
SAYS = {"servebench": ("c=1  8 ok, 0 failed", "c=4  8 ok, 0 failed", "Server Prometheus Telemetry")}
"""What tools print of requests that went well; one that was cut off in its stream fails no tool."""


@pytest.mark.parametrize("tool", list(load_tests("", Path(), "")))
def test_load_tests(
    server: Any, visit: Callable[..., Any], tools: Path, tmp_path: Path, tokenizer: Path, book: str, tool: str
) -> None:
    package, argv, least = load_tests(server.url, tokenizer, book)[tool]
    environ = {name: value for name, value in OFFLINE.items() if package != "aiperf" or name != "HF_HUB_OFFLINE"}
    shown = " ".join(argv).replace(str(tokenizer), "TOKENIZER").replace(book, "BOOK")
    argv[0] = str(tools / argv[0])
    visit(
        tool,
        version_of(tools, package),
        argv,
        shown=shown,
        least=least,
        cwd=tmp_path,
        environ=environ,
        probes=tool in PROBING,
        says=SAYS.get(tool, ()),
        timeout_s=600,
    )
    if package == "aiperf":
        (told,) = (json.loads(file.read_text()) for file in tmp_path.rglob("profile_export_aiperf.json"))
        assert told["request_count"]["avg"] == 8 and told["error_summary"] == [] and told["is_complete"]
        (scraped,) = (json.loads(file.read_text())["metrics"] for file in tmp_path.rglob("server_metrics_export.json"))
        (latency,) = scraped["vllm:e2e_request_latency_seconds"]["series"]
        assert latency["labels"] == {"model_name": MODEL} and latency["stats"]["count"] >= 8
