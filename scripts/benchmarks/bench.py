"""homeserve against a llama-server, side by side in one run; scripts/bench calls this inside its environment.

Both servers run at the same time, on the same file, with as many threads and room for as many tokens, and only one is
asked at a time. Runs alternate A B A B, so that what changes on the machine meanwhile meets both; ratios are of paired
runs, and their median and spread are what is reported. The peer first shows which of its settings is its best.
A goal that is missed is reported, and the exit code is 0 all the same; it is 1 where a server did not work.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import urllib.error
from pathlib import Path
from typing import Any

import psutil
from measures import MEASURES, Measure, Prompts
from report import Sample, SampleFile, plot, report, table
from servers import Server, homeserve, llama_server, peer_isa, peer_version, realtime

ROOT = Path(__file__).resolve().parents[2]
CANDIDATES = (("-fa", "on"), ("-fa", "off"), ("-fa", "on", "-kvu"), ("-fa", "on", "-ub", "256"))
"""Settings of the peer that are tried; the best by prefill and decode together is compared."""


def main() -> int:
    options = arguments()
    model = options.model or default_model()
    measures = wanted(options)
    slot_tokens = 2304 if options.full else 1024
    with tempfile.TemporaryDirectory(prefix="homeserve-bench-") as scratch:
        folder = Path(scratch)
        isa = peer_isa(options.peer, model, folder)
        prompts = Prompts(random.Random(options.seed), options.vocab)
        settings = CANDIDATES[0]
        if options.full:
            settings = best_settings(options, model, slot_tokens, folder, prompts)
        ours = homeserve(model, options.threads, slot_tokens, folder)
        theirs = llama_server(options.peer, model, options.threads, slot_tokens, folder, settings)
        try:
            for server in (ours, theirs):
                server.start()
            facts = common_facts(options, model, ours)
            bench = Bench(options, facts, (ours, theirs), {"llama-server": (peer_version(options.peer), isa)})
            document = bench.run(measures, prompts)
        finally:
            ours.stop()
            theirs.stop()
    print(table(document), file=sys.stderr)
    if options.json:
        Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    if options.doc:
        write_document(document, options)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Compare with a llama-server in one run.")
    parser.add_argument("--peer", required=True, help="path of a llama-server program")
    parser.add_argument("--model", help="a GGUF file; the default model where none is named")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="3 runs, short prompts (the default)")
    size.add_argument("--full", action="store_true", help="7 runs, long prompts too, the peer's best setting searched")
    parser.add_argument("--tests", help="only these, by comma; see scripts/benchmarks/measures.py")
    parser.add_argument("--repeat", type=int, help="runs of each measure")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--vocab", type=int, default=30000, help="prompts are drawn from token ids below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--csv", help="append each run here")
    parser.add_argument("--resume", help="take finished runs from this CSV, append the others to it")
    parser.add_argument("--doc", action="store_true", help="write docs/benchmarks.md and docs/benchmarks.svg")
    options = parser.parse_args()
    options.repeat = options.repeat or (7 if options.full else 3)
    if not os.access(options.peer, os.X_OK):
        parser.error(f"{options.peer} is no program; docs/benchmarks.md says how to get a llama-server")
    return options


def wanted(options: argparse.Namespace) -> list[Measure]:
    """The measures of a quick or full run, or those named by --tests."""
    if not options.tests:
        return [measure for measure in MEASURES if options.full or not measure.full_only]
    names = options.tests.split(",")
    unknown = set(names) - {measure.name for measure in MEASURES}
    if unknown:
        raise RuntimeError(
            f"no such test: {', '.join(sorted(unknown))}; there is {', '.join(m.name for m in MEASURES)}"
        )
    return [measure for measure in MEASURES if measure.name in names]


class Bench:
    """The alternation: every measure `repeat` times, each time by both servers, who goes first changing each time."""

    def __init__(
        self,
        options: argparse.Namespace,
        facts: dict[str, Any],
        servers: tuple[Server, Server],
        peers: dict[str, tuple[str, str]],
    ) -> None:
        self.options = options
        self.facts = facts
        self.servers = servers
        self.versions = {"homeserve": (facts.pop("version"), facts.pop("isa")), **peers}
        self.device = facts.pop("device_facts")
        self.samples: list[Sample] = SampleFile.read(Path(options.resume)) if options.resume else []
        path = options.resume or options.csv
        self.file = SampleFile(Path(path) if path else None)

    def run(self, measures: list[Measure], prompts: Prompts) -> dict[str, Any]:
        done = {(sample.engine, sample.test, sample.run) for sample in self.samples}
        for measure in measures:
            for run in range(self.options.repeat):
                for server in self.servers if run % 2 == 0 else reversed(self.servers):
                    if (server.engine, measure.name, run) not in done:
                        self.take(measure, server, run, prompts)
        facts = self.facts
        return report(self.samples, facts["commit"], facts["date"], facts["command"], self.device)

    def take(self, measure: Measure, server: Server, run: int, prompts: Prompts) -> None:
        if run == 0 and not measure.restarts and measure.unit == "tok/s":
            # The first request of a shape touches memory for the first time; neither server's counts.
            measure.run(server, prompts)
        value = measure.run(server, prompts)
        version, isa = self.versions[server.engine]
        sample = Sample(
            **self.facts,
            engine=server.engine,
            version=version,
            isa=isa,
            settings=server.settings,
            threads=self.options.threads,
            test=measure.name,
            unit=measure.unit,
            run=run,
            value=round(value, 4),
        )
        self.samples.append(sample)
        self.file.add(sample)
        print(
            f"{measure.name:<12} {run}  {server.engine:<13} {value:10.2f} {measure.unit}", file=sys.stderr, flush=True
        )


def best_settings(
    options: argparse.Namespace, model: str, slot_tokens: int, folder: Path, prompts: Prompts
) -> tuple[str, ...]:
    """The candidate with the highest product of prefill and decode speed, each the better of two runs."""
    tried = [measure for measure in MEASURES if measure.name in ("pp512", "tg128@0")]
    scores: dict[tuple[str, ...], float] = {}
    for settings in CANDIDATES:
        server = llama_server(options.peer, model, options.threads, slot_tokens, folder, settings)
        server.start()
        try:
            scores[settings] = 1.0
            for measure in tried:
                scores[settings] *= max(measure.run(server, prompts) for _ in range(2))
        finally:
            server.stop()
        print(f"llama-server {' '.join(settings)}: score {scores[settings]:.0f}", file=sys.stderr, flush=True)
    return max(scores, key=scores.__getitem__)


def common_facts(options: argparse.Namespace, model: str, ours: Server) -> dict[str, Any]:
    """What every sample carries: commit, date, command, device, model; and what homeserve says of itself."""
    status = ours.get("/v1/homeserve/status")
    isa = status["ranks"][0]["isa"]
    cpu = cpu_name()
    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": f"scripts/bench --peer llama-server {'--full' if options.full else '--quick'}"
        + (f" --model {Path(model).name}" if options.model else "")
        + (f" --tests {options.tests}" if options.tests else ""),
        "device": cpu,
        "model": Path(model).stem,
        "quant": status["model"]["quant"],
        "version": status["version"],
        "isa": isa,
        "device_facts": {
            "cpu": cpu,
            "isa": isa,
            "cores": psutil.cpu_count(logical=False),
            "threads": options.threads,
            "scheduler": "fifo" if realtime(1) else "normal",
            "read_gb_s": None,
        },
    }


def default_model() -> str:
    from homeserve.checkpoint.names import default_model_path

    return default_model_path()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def write_document(document: dict[str, Any], options: argparse.Namespace) -> None:
    """docs/benchmarks.md has one section per model between two markers; this one's is replaced or added."""
    path = ROOT / "docs" / "benchmarks.md"
    head, begin, rest = path.read_text().partition("<!-- tables -->\n")
    inside, end, tail = rest.partition("<!-- end of tables -->")
    device = document["device"]
    peer = next(row for row in document["rows"] if row["engine"] == "llama-server")
    caption = (
        f"{device['cpu']}, {device['threads']} threads, {device['scheduler']} scheduler · "
        f"commit {document['commit']} · "
        f"{document['date']} · `{document['command']}` · {options.repeat} paired runs each, median (p10-p90) · "
        f"homeserve: {device['isa']} · llama-server {peer['version']}: {peer['isa']}; "
        f"its setting: `{peer['settings']}`"
    )
    sections = [section for section in inside.split("\n### ") if section.strip()]
    mine = f"{peer['model']}\n\n{caption}\n\n{table(document)}\n"
    places = [index for index, section in enumerate(sections) if section.startswith(f"{peer['model']}\n")]
    if places:
        sections[places[0]] = mine
    else:
        sections.append(mine)
    inside = "".join(f"\n### {section.strip()}\n" for section in sections)
    path.write_text(f"{head}{begin}{inside}\n{end}{tail}")
    if not options.model:
        (ROOT / "docs" / "benchmarks.svg").write_text(plot(document))


if __name__ == "__main__":
    # Above the servers, so that an event is timed when it arrives and not when the servers next pause.
    if realtime(2):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    try:
        sys.exit(main())
    except (RuntimeError, OSError, urllib.error.URLError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
