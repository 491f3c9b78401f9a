"""The command line without processes: dispatch, errors, ps, down, doctor, what up announces."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from budget.ceilings import ceilings
from budget.facts import Box, CpuFacts, MemoryFacts
from budget.plan import Plan, plan
from budget.shape import load_shape
from budget.wish import Wish
from homeserve import __version__, cli, kernels
from homeserve.commands import doctor, down, ps
from homeserve.commands.announce import Announcer, Heard, curl
from homeserve.commands.progress import ProgressLines
from homeserve.commands.pull import describe
from homeserve.errors import SettingError
from homeserve.instances import (
    CANCEL_LIMIT_S,
    TEARDOWN_LIMIT_S,
    Instance,
    Record,
    check_ready_file,
    is_alive,
    kind_of,
    process_birth,
    remove_ready_file,
    running,
    stop,
    write_atomically,
)
from homeserve.server.context import LoadProgress, ModelInfo
from homeserve.settings import Settings
from homeserve.wire import segments


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """`main` takes over SIGINT and SIGTERM; the test process wants them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No configuration, record or cache of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith(("HOMESERVE_", "XDG_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ---------------------------------------------------------------------------------------------------------- dispatch


def test_version_and_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"homeserve {__version__}\n"
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in cli.COMMANDS)
    assert cli.main([]) == 2


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: homeserve {name}" in out and len(out.splitlines()) > 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["upp"], "upp: no such command; did you mean up?"),
        (["bench", "--tests", "pp512,tg"], "--tests: 'tg' is no test"),
        (["up", "--prot", "1"], "--prot: no such flag; did you mean --port?"),
        (["up", "--port", "x"], "--port: expected a whole number"),
        (["down", "--port", "1", "--all"], "not allowed with argument --port"),
        (["down", "--port", "0"], "outside 1 to 65535"),
        (["down"], "no server runs"),
        (["chat", "m.gguf", "--url", "http://x"], "MODEL is for a temporary server"),
        (["pull", "no/such/thing"], "there is no model 'no/such/thing' here"),
    ],
)
def test_mistakes_are_one_line_and_code_2(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("homeserve: error: ") and words in err
    assert len(err.splitlines()) <= 2


@pytest.mark.parametrize("argv", [["up", "--port", "x", "--print-config"], ["ps", "--json", "--prot", "x"]])
def test_mistakes_as_json_on_stdout(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    error = json.loads(out)["error"]
    assert error["code"] == "setting" and error["field"] in ("port", "prot") and error["message"] and error["fix"]
    assert err == ""


def test_print_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOMESERVE_CHUNK", "64")
    assert cli.main(["serve", "m.gguf", "--port", "0", "--print-config"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["settings"]["chunk"] == 64 and shown["settings"]["model"] == "m.gguf"
    assert shown["sources"] == {"chunk": "HOMESERVE_CHUNK", "model": "--model", "port": "--port"}


def test_somebody_elses_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "budget").mkdir()
    (tmp_path / "budget" / "__init__.py").write_text("")
    run = "import sys; sys.path.insert(0, sys.argv[1]); from homeserve.cli import main; sys.exit(main(['ps']))"
    done = subprocess.run([sys.executable, "-c", run, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert f"the package 'budget' at {tmp_path}/budget/__init__.py is not homeserve's" in done.stderr


def test_help_imports_nothing_heavy() -> None:
    run = (
        "import sys, contextlib, io\nfrom homeserve.cli import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['--help'])\n"
        "heavy = {'asyncio', 'numpy', 'aiohttp', 'tokenizers', 'msgspec', 'rich', 'argparse'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------------------------------------------- ps and down


def instance(pid: int = 1, port: int = 8000, **more: object) -> Instance:
    fields = {"url": f"http://127.0.0.1:{port}", "model": "m", "state": "ready", "started": 100.0, "birth": 1.0}
    fields["drain_timeout_s"] = 30.0
    return Instance(pid=pid, port=port, **(fields | more))  # type: ignore[arg-type]


def test_a_record_lives_as_long_as_its_process(tmp_path: Path) -> None:
    record = Record(tmp_path / "run", 8000, "http://127.0.0.1:8000", "", 30.0)
    record.write("loading")
    assert [(i.state, i.model, i.pid) for i in running(tmp_path / "run")] == [("loading", "", os.getpid())]
    record.write("ready", "m")
    assert [(i.state, i.model) for i in running(tmp_path / "run")] == [("ready", "m")]
    record.remove()
    record.remove()
    assert running(tmp_path / "run") == []


def test_a_record_that_could_not_be_written_is_removed_without_an_error(tmp_path: Path) -> None:
    """The cache's place may be taken by a file: the server has said so, and its end is no failure."""
    (tmp_path / "cache").write_text("a file")
    record = Record(tmp_path / "cache" / "run", 8000, "http://127.0.0.1:8000", "", 30.0)
    with pytest.raises(OSError):
        record.write("loading")
    record.remove()


def test_stale_and_damaged_records_are_swept(tmp_path: Path) -> None:
    own = json.dumps({**instance(os.getpid()).as_json(), "birth": 0.5, "drain_timeout_s": 30.0})
    for name, text in {"1": own, "2": "{", "3": "[]", "4": "{}", "5": '{"pid": "x"}'}.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "note.txt").write_text("not ours")
    assert running(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_no_folder_is_no_server(tmp_path: Path) -> None:
    assert running(tmp_path / "none") == []


def test_a_process_is_known_by_its_birth() -> None:
    birth = process_birth(os.getpid())
    assert birth is not None
    assert is_alive(instance(os.getpid(), birth=birth))
    assert not is_alive(instance(os.getpid(), birth=birth + 1))
    assert process_birth(2**22 + 1) is None


def test_write_atomically_leaves_nothing_where_it_cannot(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_atomically(tmp_path / "taken", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "to-fifo").symlink_to("fifo")
    for name, kind in (("fifo", "a FIFO"), ("to-fifo", "a FIFO"), (".", "a folder")):
        with pytest.raises(OSError, match=f"it is {kind}, not a regular file"):
            write_atomically(tmp_path / name, "x")
    assert (tmp_path / "fifo").is_fifo() and (tmp_path / "to-fifo").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fifo", "to-fifo"]
    assert kind_of(os.stat(os.devnull).st_mode) == "a device"


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    for text in ("one", "two"):  # the first time there is no file yet
        write_atomically(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "file").read_text() == text
    # Nor is the part that becomes the file written through a link that lies in its place.
    (tmp_path / "other").write_text("kept")
    (tmp_path / f".new.{os.getpid()}").symlink_to("other")
    write_atomically(tmp_path / "new", "x")
    assert (tmp_path / "other").read_text() == "kept" and (tmp_path / "new").read_text() == "x"


@pytest.mark.parametrize("content", [None, "", " \n", '{"schema": 1, "url": "http://x", "pid": 4}'])
def test_a_ready_file_may_be_new_empty_or_that_of_a_server(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ready"
    if content is not None:
        path.write_text(content)
    check_ready_file(path)
    remove_ready_file(path)
    assert not path.exists()


@pytest.mark.parametrize("content", ["GGUF...", "[3]", '{"url": 1}', '{"url": "' + "x" * 70000 + '", "pid": 4}'])
def test_a_ready_file_is_never_a_model_or_a_device(tmp_path: Path, content: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_text(content)
    with pytest.raises(SettingError, match="no ready file, and it is not replaced") as caught:
        check_ready_file(path)
    assert caught.value.field == "ready_file" and caught.value.fix
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(SettingError, match="a FIFO, not a regular file"):
        check_ready_file(tmp_path / "fifo")
    for each in (path, tmp_path / "fifo"):
        remove_ready_file(each)
    assert path.read_text() == content and (tmp_path / "fifo").is_fifo()


class Full(io.StringIO):
    """A stream on a full disk."""

    def __init__(self, number: int, error: type[OSError]) -> None:
        super().__init__()
        self._number, self._error = number, error

    def write(self, text: str) -> int:
        raise self._error(28, "No space left on device")

    def fileno(self) -> int:
        return self._number


@pytest.mark.parametrize(("error", "said"), [(OSError, 1), (BrokenPipeError, 0)])
def test_a_server_outlives_its_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: type[OSError], said: int
) -> None:
    with open(tmp_path / "full", "w") as file:
        out: Any = Heard(Full(file.fileno(), error))
        for _ in range(3):
            print("something", file=out, flush=True)
    assert capsys.readouterr().err.count("standard output cannot be written: No space") == said


def test_stop_of_a_process_that_is_gone_is_done() -> None:
    assert stop(instance(2**22 + 1), patience_s=0)


def test_ps_lists_and_prints_json(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps"]) == 0
    assert "no server runs" in capsys.readouterr().out
    Record(home / ".cache/homeserve/run", 8123, "http://127.0.0.1:8123", "m", 30.0).write("ready")
    assert cli.main(["ps", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert set(found) == {"pid", "port", "url", "model", "state", "started"}
    assert (found["pid"], found["port"], found["state"]) == (os.getpid(), 8123, "ready")
    assert cli.main(["ps"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["PID", "PORT", "STATE"] and "8123" in line


def test_ps_durations() -> None:
    assert [ps.duration(s) for s in (5, 90, 7200, 200000)] == ["5s", "2m", "2h", "2d"]


def test_down_lets_a_server_drain_as_long_as_it_was_told_to(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(down, "stop", lambda instance, *, patience_s: waited.append(patience_s) or True)
    Record(home / ".cache/homeserve/run", 8123, "http://127.0.0.1:8123", "m", 600.0).write("draining")
    assert cli.main(["down"]) == 0
    assert cli.main(["down", "--wait-s", "7"]) == 0
    assert waited == [600.0 + CANCEL_LIMIT_S + TEARDOWN_LIMIT_S + 5.0, 7.0]


def test_down_says_that_it_killed_and_removes_what_the_server_left(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    folder = home / ".cache/homeserve/run"
    with subprocess.Popen([sys.executable, "-S", "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        start = segments.start_time(process.pid)
        memory = segments.folder() / f"homeserve-{process.pid}-{start}-0123abcd-plans"
        memory.touch(mode=0o600)
        birth = process_birth(process.pid)
        folder.mkdir(parents=True)
        facts = {**instance(process.pid, 8123).as_json(), "birth": birth, "drain_timeout_s": 30.0}
        (folder / f"{process.pid}.json").write_text(json.dumps(facts))
        code = cli.main(["down", "--wait-s", "0"])
    out, err = capsys.readouterr()
    assert (code, out) == (3, "") and f"(pid {process.pid}) did not end in 0 s: killed" in err
    assert process.returncode == -signal.SIGKILL
    assert not memory.exists() and list(folder.iterdir()) == []


def test_down_says_which_ports_where_it_is_not_clear() -> None:
    two = [instance(1, 8000), instance(2, 9000)]
    assert down.choose(two, 9000, False) == [two[1]]
    assert down.choose(two, None, True) == two
    assert down.choose(two[:1], None, False) == two[:1]
    assert down.choose([], None, True) == []
    for found, port, words in ((two, None, "8000, 9000"), (two, 7000, "8000, 9000"), ([], 7000, "no server runs")):
        with pytest.raises(SettingError, match=words):
            down.choose(found, port, False)


# ------------------------------------------------------------------------------------------------------------- doctor


def test_doctor_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1 and told["faults"]["steps"]
    assert all({"name", "ok", "why", "fix"} <= set(check) for check in told["checks"])
    names = [check["name"] for check in told["checks"]]
    for name in (
        "python",
        "own packages",
        "cpu kernels",
        "host library",
        "cores",
        "memory",
        "shared memory",
        "cache folder",
        "port",
    ):
        assert name in names
    assert code == (0 if told["ok"] else 2)
    assert told["ok"] == all(check["ok"] for check in told["checks"] if check["fatal"])


def test_doctor_tells_of_bad_settings_and_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checks = list(doctor.examine({"HOMESERVE_PORT": "x", "HOME": str(tmp_path)}, tmp_path))
    assert checks[0].name == "settings" and not checks[0].ok and "HOMESERVE_PORT" in checks[0].why
    assert len(checks) > 10


def test_doctor_wraps_to_the_terminal_and_keeps_its_columns() -> None:
    check = doctor.Check("packages", False, "aiohttp 3.14.5, " * 9, "see " + "/a-path" * 20)
    lines = doctor.lines_of(check, 60).splitlines()
    assert lines[0].startswith("note  packages       aiohttp 3.14.5")
    assert all(line.startswith(" " * 21) for line in lines[1:]) and all(len(line) <= 60 for line in lines[:-1])
    assert lines[-1].strip() == "/a-path" * 20, "what can be pasted is not broken"
    assert len(doctor.lines_of(check, 0).splitlines()) == 2


def test_doctors_verdict() -> None:
    fine, port = doctor.Check("memory", True, ""), doctor.Check("port", False, "taken")
    assert doctor.verdict([fine]) == "homeserve up should work here"
    assert doctor.verdict([fine, port]).endswith("homeserve up --port 0")
    assert "FAIL" in doctor.verdict([port, doctor.Check("python", False, "", fatal=True)])


# ----------------------------------------------------------------------------------------------------- what up prints

MEMORY = MemoryFacts(8 << 30, 4 << 30, "/sys/fs/cgroup/memory.max", 3 << 30, None)
BOX = Box("box", MEMORY, CpuFacts("A CPU", 8, 2, "affinity", frozenset({"avx2", "fma", "f16c"})))
MODEL = ModelInfo("small", "/m/small.gguf", "llama", "Q4_1", 2048)


def made() -> Plan:
    outcome = plan(ceilings(BOX, None), load_shape("smollm2-135m-q4_1"), Wish(context=2048))
    assert isinstance(outcome, Plan)
    return outcome


def test_up_announces_in_order() -> None:
    out = io.StringIO()
    told = Announcer(Settings(), out)
    told.on_box(BOX)
    told.on_plan(MODEL, made())
    told.on_progress(LoadProgress("weights", 0, 94 << 20))
    told.on_progress(LoadProgress("weights", 94 << 20, 94 << 20))
    told.on_progress(LoadProgress("weights", 94 << 20, 94 << 20))
    told.on_ready("http://127.0.0.1:8000", MODEL, 1.234)
    lines = out.getvalue().splitlines()
    assert lines[0] == "box    A CPU · 2 of 8 cores · 3.0 of 4.0 GiB free · avx2"
    assert lines[1] == "model  small · llama Q4_1 · 93 MiB"
    assert lines[2] == "plan   context 2 048, 8 192 tokens of f16 KV, 16 requests at once: CPU"
    assert lines[3].startswith("       A CPU: weights 92 + kv 180 + ") and lines[3].endswith(" of 2 816 MiB")
    assert lines[4] == "       1 doubt: homeserve budget tells them"
    assert lines[5].startswith("load   weights: 94 MiB in ")
    assert lines[6] == "ready  in 1.2 s: http://127.0.0.1:8000 serves small"
    assert len([line for line in lines if line.startswith("  curl http://127.0.0.1:8000/v1/")]) == 1


def test_the_curl_command_can_be_pasted(tmp_path: Path) -> None:
    keys = tmp_path / "it's keys"
    keys.write_text("# comment\nalpha\n")
    words = shlex.split(curl("http://h:1", "it's a model", None))
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's a model" and body["temperature"] == 0
    command = curl("http://h:1", "m", str(keys)).replace("curl ", "printf '%s\\n' ", 1)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Authorization: Bearer alpha" in done.stdout.splitlines()


def test_progress_without_a_terminal_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    clock = iter(float(second) for second in range(100))
    lines = ProgressLines(out, lambda: next(clock))
    lines.update("fetch", None, None)
    for done in range(11):
        lines.update("fetch", done << 20, 10 << 20)
    told = out.getvalue().splitlines()
    assert 3 <= len(told) <= 7
    assert told[-1] == "load   fetch: 10 MiB in 11.0 s"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_a_bar() -> None:
    out = Terminal()
    clock = iter(float(second) for second in range(100))
    lines = ProgressLines(out, lambda: next(clock))
    for done in range(11):
        lines.update("fetch", done << 20, 10 << 20)
    lines.close()
    assert "fetch: 10 MiB in" in out.getvalue()


# --------------------------------------------------------------------------------------------------------------- pull


def test_pull_describes_a_file_its_parts_and_a_folder(tmp_path: Path) -> None:
    one = tmp_path / "m.gguf"
    one.write_bytes(b"abc")
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert describe(one) == {"path": str(one), "bytes": 3, "sha256": digest}
    for part in (1, 2):
        (tmp_path / f"s[1]-0000{part}-of-00002.gguf").write_bytes(b"xy")
    assert describe(tmp_path / "s[1]-00001-of-00002.gguf")["bytes"] == 4
    folder = describe(tmp_path)
    assert folder["bytes"] == 7 and folder["sha256"] is None


def test_pull_of_a_path_prints_where_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"abc")
    assert cli.main(["pull", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["path"], told["bytes"], len(told["sha256"])) == (str(path), 3, 64)
    assert cli.main(["pull", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n"


def test_ranks_on_cards_need_the_library_of_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before a worker starts, with how it is built."""
    kernels.check_host_library()
    monkeypatch.setattr(kernels, "host_library", lambda: tmp_path / "libhomeserve_host.so")
    with pytest.raises(SettingError, match="no native library") as caught:
        kernels.check_host_library()
    assert "g++" in (caught.value.fix or "")


def test_kernels_that_are_compiled_are_counted_and_not_taken_for_mebibytes() -> None:
    out, clock = io.StringIO(), iter((0.0, 0.0, 3.0, 5.0))
    lines = ProgressLines(out, lambda: next(clock))
    for done in (0, 1, 20, 58):
        lines.update("compiling kernels of 2 ranks", done, 58)
    assert out.getvalue().splitlines() == [
        "load   compiling kernels of 2 ranks: 20 of 58 kernels after 3 s",
        "load   compiling kernels of 2 ranks: 58 kernels in 5.0 s",
    ]
