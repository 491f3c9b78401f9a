"""homeserve against a llama-server, side by side in one run; scripts/bench calls this inside its environment.

For each model both run at the same time, on the same file, with as many threads and room for as many tokens, and only
one is asked at a time. Runs alternate A B A B, so that what changes on the machine meanwhile meets both; ratios are
of paired runs, and their median and spread are what is reported. Before, with --full, the peer shows which of its
settings is its best for each result (search.py); what the machine can do at most is measured within every pair
(limits.py). A goal that is missed is reported, and the exit code is 0 all the same; it is 1 where a server did not
work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import document
import draft_tests
import flip_tests
import limits
import psutil
import rank_tests
import search
import step_tests
from measures import MEASURES, RESULTS, Measure
from origin import command, commit
from report import MACHINE, OURS, Sample, SampleFile, report, table
from servers import Server, homeserve, is_homeserve, llama_server, peer_isa, peer_version, realtime
from subjects import SUBJECTS, Work, folder, work

from budget.host import read_cpu
from homeserve.bench.origin import today
from homeserve.bench.prompts import Prompts, ids_below
from homeserve.checkpoint import gguf
from homeserve.errors import HomeserveError

ROOT = Path(__file__).resolve().parents[2]
LARGE_BYTES = 350_000_000
"""Files above this answer half as many tokens: they take long enough."""


def main() -> int:
    options = arguments()
    if options.doc and not options.peer and not rank_tests.no_peer_needed(options.tests):
        document.write(ROOT / "docs")
        return 0
    if not options.no_realtime and realtime(2):
        # Above the servers, so that an event is timed when it arrives and not when the servers next pause.
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    started = time.monotonic()
    kept = SampleFile.read(Path(options.resume)) if options.resume and Path(options.resume).exists() else []
    run = Run(options, wanted(options), [sample for sample in kept if sample.commit == commit()])
    tests = rank_tests.wanted(options.tests, full=options.full)
    if run.measures:
        for name, path in models(options):
            run.model(name, path)
    if rank_tests.SUM in tests:
        run.sums()
    if rank_tests.TENSOR in tests:
        for name, path in models(options, rank_tests.MODELS):
            run.tensor(name, path)
    if rank_tests.FLIP in tests:
        for name, path in models(options, flip_tests.MODELS):
            run.flips(name, path)
    if rank_tests.STEP in tests:
        for name, path in models(options, step_tests.MODELS):
            run.steps(name, path)
    if rank_tests.DRAFT in tests:
        for name, path in drafting_models(options):
            run.drafting(name, path)
    document_ = report(run.samples)
    for model in document_["models"]:
        print(f"\n{model['model']}\n\n{table(model)}")
    print(f"\n{(time.monotonic() - started) / 60:.1f} minutes", file=sys.stderr)
    if options.json:
        Path(options.json).write_text(json.dumps(document_, indent=1) + "\n")
    if options.doc:
        document.write(ROOT / "docs")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Compare with a llama-server in one run.")
    parser.add_argument("--peer", help="path of a llama-server program, or of another homeserve")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="3 models, 3 pairs, the shortest measures (the default)")
    size.add_argument("--full", action="store_true", help="all models and measures, 7 pairs, the peer's best settings")
    parser.add_argument("--models", help="only these of the table, by comma: parts of their names")
    parser.add_argument("--model", help="a GGUF file instead of the table's")
    parser.add_argument("--tests", help=f"only these, by comma: {', '.join(RESULTS)}")
    parser.add_argument("--repeat", type=int, help="runs of each measure")
    parser.add_argument("--answer", type=int, help="tokens of each answer (128; 64 for large files)")
    parser.add_argument("--ours", nargs="+", default=(), help="a homeserve command other than this checkout's")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="one that has torch, for gloo")
    parser.add_argument("--no-realtime", action="store_true", help="leave the scheduler alone: to try, not to measure")
    parser.add_argument("--isa", default="", help="ISA level of homeserve, where not the best")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--vocab", type=int, default=30000, help="prompts are drawn from token ids below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--csv", help="append each run here")
    parser.add_argument("--resume", help="take this commit's finished runs from this CSV, append the others to it")
    parser.add_argument(
        "--doc", action="store_true", help="write the pages in docs/ from docs/benchmarks.csv; without --peer only that"
    )
    options = parser.parse_args()
    options.repeat = options.repeat or (7 if options.full or rank_tests.no_peer_needed(options.tests) else 3)
    if not options.peer and not options.doc and not rank_tests.no_peer_needed(options.tests):
        parser.error("--peer is needed; docs/benchmarks.md says how to get a llama-server")
    if options.peer and not os.access(options.peer, os.X_OK):
        parser.error(f"{options.peer} is no program; docs/benchmarks.md says how to get a llama-server")
    return options


def models(options: argparse.Namespace, usual: Sequence[str] = ()) -> list[tuple[str, Path]]:
    """Names and files of the models that are measured: those that are asked for, else the `usual` ones, else those of
    the run's size. Raises RuntimeError for a name that fits none."""
    if options.model:
        return [(Path(options.model).stem, Path(options.model))]
    if options.models:
        words = options.models.split(",")
        unknown = [word for word in words if not any(word in subject.name for subject in SUBJECTS)]
        if unknown:
            raise RuntimeError(f"no such model: {', '.join(unknown)}; there is {', '.join(s.name for s in SUBJECTS)}")
        chosen = [subject for subject in SUBJECTS if any(word in subject.name for word in words)]
    elif usual:
        chosen = [subject for subject in SUBJECTS if subject.name in usual]
    else:
        chosen = [subject for subject in SUBJECTS if subject.size <= (1 if options.full else 0)]
    return [(subject.name, subject.file()) for subject in chosen]


def drafting_models(options: argparse.Namespace) -> list[tuple[str, Path]]:
    """As `models`; where none are asked for, one of random weights, and the one that counts for what depends on the
    content, if any such thing is asked for."""
    asked = rank_tests.drafting(options.tests)
    if options.model or options.models:
        return models(options)
    counter = [(draft_tests.COUNTER.stem, draft_tests.COUNTER)]
    some = [*(models(options, draft_tests.RANDOM) if asked & draft_tests.BY_TIME else []), *counter]
    return [(name, path) for name, path in some if draft_tests.parts(path, asked, every=False)]


def wanted(options: argparse.Namespace) -> list[Measure]:
    """The measures of a quick or full run, or those that give the results named by --tests."""
    if not options.tests:
        return [measure for measure in MEASURES if measure.size <= (1 if options.full else 0)]
    names = set(options.tests.split(","))
    # Those of several ranks are no measures of a running server; `rank_wanted` takes them.
    if unknown := names - RESULTS.keys() - rank_tests.TESTS:
        raise RuntimeError(f"no such test: {', '.join(sorted(unknown))}; there is {', '.join((*RESULTS, 'draft'))}")
    return [measure for measure in MEASURES if names & set(measure.gives)]


@dataclass
class RankSubject:
    """What is measured of several ranks, and what stands in every sample of it. `versions`: of each engine, with its
    ISA level."""

    name: str
    facts: dict[str, Any]
    versions: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass
class Subject:
    """One model while it is measured: what stands in every sample of it, and its two sides."""

    name: str
    facts: dict[str, Any]
    versions: dict[str, tuple[str, str]]
    path: Path
    ours: Server
    peers: dict[search.Settings, Server]
    found: search.Found
    work: Work

    def theirs(self, result: str) -> Server:
        """The peer with the settings that are its best for `result`."""
        if len(self.peers) == 1:
            return next(iter(self.peers.values()))
        return self.peers[search.best(self.found, result)]


class Run:
    """Every model, one after the other: each measure `repeat` times by both sides, who goes first changing."""

    def __init__(self, options: argparse.Namespace, measures: list[Measure], kept: list[Sample]) -> None:
        self.options = options
        self.measures = measures
        self.samples = kept
        path = options.resume or options.csv
        self.file = SampleFile(Path(path) if path else None)
        self.slot_tokens = 2304 if any("pp2048" in measure.gives for measure in measures) else 1024
        self.command = command(options)

    def model(self, name: str, path: Path) -> None:
        """Measure one model. Raises RuntimeError where a server does not work."""
        done = {(sample.engine, sample.test, sample.run) for sample in self.samples if sample.model == name}
        last = self.options.repeat - 1
        if all((OURS, result, last) in done for measure in self.measures for result in measure.gives):
            return
        answer = self.options.answer or (64 if path.stat().st_size > LARGE_BYTES else 128)
        prompts = Prompts(random.Random(self.options.seed), ids_below(self.options.vocab), answer)
        with tempfile.TemporaryDirectory(prefix="homeserve-bench-") as scratch:
            subject = self.prepare(name, path, Path(scratch), prompts)
            servers = [subject.ours, *subject.peers.values()]
            try:
                for server in servers:
                    server.realtime = not self.options.no_realtime
                    server.start()
                self.introduce(subject)
                for measure in self.measures:
                    self.measure(subject, measure, prompts, done)
            finally:
                for server in servers:
                    server.stop()

    def sums(self) -> None:
        """Sums between two processes, beside gloo where there is a torch."""
        name = rank_tests.SUMS_MODEL
        if any((sample.model, sample.run) == (name, self.options.repeat - 1) for sample in self.samples):
            return
        facts = self.facts(name, "")
        torch = rank_tests.torch_version(self.options.torch)
        if torch is None:
            print("gloo is not compared: no torch; --torch names a Python that has it", file=sys.stderr)
        subject = RankSubject(name, facts, {rank_tests.GLOO: (f"torch {torch}", "")})
        rank_tests.measure_sums(
            self.options.repeat, self.options.torch, self.keeper(subject), with_gloo=torch is not None
        )

    def tensor(self, name: str, path: Path) -> None:
        """Two ranks in the tensor layout beside one rank with as many threads."""
        model = rank_tests.of_model(name)
        if any((sample.model, sample.run) == (model, self.options.repeat - 1) for sample in self.samples):
            return
        options = self.options
        answer = options.answer or (64 if path.stat().st_size > LARGE_BYTES else 128)
        prompts = Prompts(random.Random(options.seed), ids_below(options.vocab), answer)
        subject = RankSubject(model, self.facts(model, name.rpartition(".")[2]))
        with tempfile.TemporaryDirectory(prefix="homeserve-bench-") as scratch:
            servers = rank_tests.two_sides(path, options.threads, Path(scratch), options.ours, options.isa)
            try:
                for server in servers:
                    server.realtime = not options.no_realtime
                    server.start()
                    status = server.get("/v1/homeserve/status")
                    subject.facts["quant"] = status["model"]["quant"]
                    subject.versions[server.engine] = (status["version"], status["ranks"][0]["isa"])
                rank_tests.measure_tensor(
                    *servers, options.repeat, prompts, self.keeper(subject), lambda run: self.limits(subject, run)
                )
            finally:
                for server in servers:
                    server.stop()

    def flips(self, name: str, path: Path) -> None:
        """Flips of two ranks, with nothing live and with rows and states."""
        model, options = f"{rank_tests.of_model(name)}, flips", self.options
        done = (flip_tests.PER_MIB, options.repeat - 1)
        if any(sample.model == model and (sample.test, sample.run) == done for sample in self.samples):
            return
        prompts = Prompts(random.Random(options.seed), ids_below(options.vocab))
        subject = RankSubject(model, self.facts(model, name.rpartition(".")[2]))
        with tempfile.TemporaryDirectory(prefix="homeserve-bench-") as scratch:
            server = flip_tests.server_of(path, options.threads, Path(scratch), options.ours, options.isa)
            try:
                server.realtime = not options.no_realtime
                server.start()
                status = server.get("/v1/homeserve/status")
                subject.facts["quant"] = status["model"]["quant"]
                subject.versions[server.engine] = (status["version"], status["ranks"][0]["isa"])
                flip_tests.measure_flips(server, options.repeat, prompts, rank_tests.RANKS, self.keeper(subject))
            finally:
                server.stop()

    def steps(self, name: str, path: Path) -> None:
        """What the engine process costs beside the computing."""
        model, options = step_tests.of_model(name), self.options
        if any((sample.model, sample.run) == (model, options.repeat - 1) for sample in self.samples):
            return
        prompts = Prompts(random.Random(options.seed), ids_below(options.vocab))
        subject = RankSubject(model, self.facts(model, name.rpartition(".")[2]))
        with tempfile.TemporaryDirectory(prefix="homeserve-bench-") as scratch:
            server = step_tests.server_of(path, Path(scratch), options.ours, options.isa)
            try:
                server.realtime = not options.no_realtime
                server.start()
                status = server.get("/v1/homeserve/status")
                subject.facts["quant"] = status["model"]["quant"]
                subject.versions[server.engine] = (status["version"], status["ranks"][0]["isa"])
                step_tests.measure_steps(server, options.repeat, prompts, self.keeper(subject))
            finally:
                server.stop()

    def drafting(self, name: str, path: Path) -> None:
        """One stream with drafting, beside one without."""
        model, options = draft_tests.of_model(name), self.options
        done = {sample.test for sample in self.samples if (sample.model, sample.run) == (model, options.repeat - 1)}
        parts = draft_tests.parts(path, rank_tests.drafting(options.tests), every=bool(options.model)) - done
        if not parts:
            return
        tokens = gguf.read(str(path)).metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, gguf.Array)
        vocab, answer = min(options.vocab, len(tokens) // 2), options.answer or 96
        prompts = Prompts(random.Random(options.seed), ids_below(vocab), answer)
        subject = RankSubject(model, self.facts(model, name.rpartition(".")[2]))
        with tempfile.TemporaryDirectory(prefix="homeserve-bench-") as scratch:

            def made(draft: str, forced: str = "") -> Server:
                facts = (options.threads, Path(scratch), options.ours, options.isa)
                server = draft_tests.server_of(path, *facts, draft, forced)
                server.realtime = not options.no_realtime
                return server

            plain = made("off")
            try:
                plain.start()
                status = plain.get("/v1/homeserve/status")
                subject.facts["quant"] = status["model"]["quant"]
                version = status["version"], status["ranks"][0]["isa"]
                subject.versions |= {plain.engine: version, OURS: version}
                test = draft_tests.Drafting(plain, made, options.repeat, prompts, self.keeper(subject), parts)
                test.forced()
                test.new()
                test.by_content(draft_tests.contents(path))
            finally:
                plain.stop()

    def facts(self, name: str, quant: str) -> dict[str, Any]:
        """What stands in every sample of a model."""
        facts = {"commit": commit(), "date": today(), "command": self.command, "device": read_cpu().name, "model": name}
        return facts | {"quant": quant, "threads": self.options.threads}

    def keeper(self, subject: RankSubject) -> rank_tests.Keep:
        def keep(engine: str, test: str, unit: str, run: int, value: float, settings: str = "") -> None:
            self.add(subject, engine, settings, test, unit, run, value)

        return keep

    def prepare(self, name: str, path: Path, scratch: Path, prompts: Prompts) -> Subject:
        """Both sides, not started; the peer's best settings searched with --full."""
        options = self.options
        file = gguf.read(str(path))
        size = (options.threads, self.slot_tokens, scratch)
        extra = ("--isa", options.isa) if options.isa else ()
        ours = homeserve(str(path), *size, options.ours)
        ours.command += extra
        found: search.Found = {}
        peers: dict[search.Settings, Server]
        versions: dict[str, tuple[str, str]] = {}
        if is_homeserve(options.peer):
            peers = {(): homeserve(str(path), *size, (options.peer,), "homeserve-peer")}
        else:
            start = lambda settings: llama_server(options.peer, str(path), *size, settings)  # noqa: E731
            versions["llama-server"] = (peer_version(options.peer), peer_isa(options.peer, str(path), scratch))
            if options.full:
                deep = any("tg@2048" in measure.gives for measure in self.measures)
                found = search.search(start, prompts, deep)
            results = [result for measure in self.measures for result in measure.gives]
            chosen = dict.fromkeys(search.best(found, result) for result in results)
            peers = {settings: start(settings) for settings in chosen}
        facts = self.facts(name, name.rpartition(".")[2])
        return Subject(name, facts, versions, path, ours, peers, found, work(file.tensors, file.metadata))

    def introduce(self, subject: Subject) -> None:
        """What the servers say of themselves; the constants of the file; what the search found, into the CSV."""
        for server in (subject.ours, *subject.peers.values()):
            if server.engine != "llama-server":
                status = server.get("/v1/homeserve/status")
                subject.facts["quant"] = status["model"]["quant"]
                subject.versions[server.engine] = (status["version"], status["ranks"][0]["isa"])
        kept = {
            (sample.engine, sample.test, sample.settings) for sample in self.samples if sample.model == subject.name
        }
        for settings, values in subject.found.items():
            for test, value in values.items():
                if ("llama-server", f"search:{test}", " ".join(settings)) not in kept:
                    unit = RESULTS[test].unit
                    self.add(subject, "llama-server", " ".join(settings), f"search:{test}", unit, 0, value)
        if (MACHINE, "bytes_per_token", "") not in kept:
            self.add(subject, MACHINE, "", "bytes_per_token", "B", 0, subject.work.bytes_per_token)
            self.add(subject, MACHINE, "", "ops_per_token", "OP", 0, subject.work.ops_per_token)

    def measure(self, subject: Subject, measure: Measure, prompts: Prompts, done: set[tuple[str, str, int]]) -> None:
        for run in range(self.options.repeat):
            if (MACHINE, "read_gb_s", run) not in done:
                self.limits(subject, run)
                done.add((MACHINE, "read_gb_s", run))
            for ours in (True, False) if run % 2 == 0 else (False, True):
                sides: dict[int, tuple[Server, list[str]]] = {}
                for result in measure.gives:
                    server = subject.ours if ours else subject.theirs(result)
                    if (server.engine, result, run) not in done:
                        sides.setdefault(id(server), (server, []))[1].append(result)
                for server, results in sides.values():
                    self.take(subject, measure, server, results, run, prompts)

    def take(
        self, subject: Subject, measure: Measure, server: Server, results: list[str], run: int, prompts: Prompts
    ) -> None:
        if run == 0 and measure.warm:
            # The first request of a shape touches memory for the first time; neither server's counts.
            measure.run(server, prompts)
        values = measure.run(server, prompts)
        for result in results:
            self.add(subject, server.engine, server.settings, result, RESULTS[result].unit, run, values[result])

    def limits(self, subject: Subject | RankSubject, run: int) -> None:
        found = limits.measure(self.options.threads, folder())
        for test, unit in (("read_gb_s", "GB/s"), ("int16_gop_s", "GOP/s"), ("int8_gop_s", "GOP/s")):
            self.add(subject, MACHINE, "", test, unit, run, getattr(found, test), found.instructions)

    def add(
        self,
        subject: Subject | RankSubject,
        engine: str,
        settings: str,
        test: str,
        unit: str,
        run: int,
        value: float,
        isa: str = "",
    ) -> None:
        version, known = subject.versions.get(engine, ("", isa))
        sample = Sample(
            **subject.facts,
            engine=engine,
            version=version,
            isa=known,
            settings=settings,
            test=test,
            unit=unit,
            run=run,
            value=round(value, 4),
        )
        self.samples.append(sample)
        self.file.add(sample)
        print(f"{subject.name:<28} {test:<14} {run}  {engine:<13} {value:12.2f} {unit}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RuntimeError, OSError, urllib.error.URLError, HomeserveError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
