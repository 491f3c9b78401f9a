"""A helper process, seen from the server: it does what is too hostile to be done here.

What comes with a model file or with a request may be a program (a chat template) or as good as one (a grammar): it may
loop, or eat memory. So a helper does it, within bounds (`homeserve.text.helper_child`), one request at a time. One that
takes too long, or whose caller went away in the middle, costs the helper its life, and the next request gets a new one.
Hostile input can fail requests, never the server.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TypeVar

import msgspec

from homeserve.errors import WorkerStartError
from homeserve.text.helper_wire import LENGTH, MESSAGE_BYTES_MAX, Bounds, Ready, frame
from homeserve.wire.children import environment

_Message = TypeVar("_Message", bound=msgspec.Struct)

_KEPT_VARIABLES = (
    "PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT",
)  # fmt: skip
"""What a helper sees of the environment: what Python needs to start, and the clock's zone. No tokens or keys."""


class HelperSlow(Exception):
    """No answer in time. The helper is gone."""


class HelperEnded(Exception):
    """The helper ended in the middle of a request, or said what is none of its messages."""


class HelperProcess:
    """One helper, of the program `module`, `called` so in messages. `setup` may be set until it starts.

    `ask` may be called from any number of tasks, which take turns, and starts the helper if there is none; `stop` once.
    """

    def __init__(self, module: str, called: str, *, start_s: float) -> None:
        self.setup: Bounds | None = None
        self._module = module
        self._called = called
        self._start_s = start_s
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """The helper's process id, None while there is none."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Ahead of the first request. Raises WorkerStartError."""
        async with self._turn:
            await self._ensure()

    async def ask(self, request: bytes, kind: type[_Message], seconds: float) -> _Message:
        """The answer to a framed request. Raises HelperSlow, HelperEnded, WorkerStartError."""
        async with self._turn:
            process = await self._ensure()
            try:
                async with asyncio.timeout(seconds):
                    return await _exchange(process, request, kind)
            except TimeoutError:
                await self._give_up(process)
                raise HelperSlow(f"{self._called} took longer than {seconds:g} s") from None
            except (EOFError, ConnectionError, msgspec.MsgspecError) as error:
                await self._give_up(process)
                raise HelperEnded(f"{type(error).__name__} {error}") from error
            except BaseException:
                # The caller is going away. An answer that nobody reads would be taken for the next one's.
                await self._give_up(process)
                raise

    async def stop(self) -> None:
        """End the helper and wait for it. Requests in progress fail."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "it was started with pipes"
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), 1.0)
        except TimeoutError:
            await _kill(process)

    async def _ensure(self) -> asyncio.subprocess.Process:
        """The running helper, started if there is none. Call with the turn held."""
        assert self.setup is not None, "a helper is set up before it is asked"
        if self._process is not None and not await _has_ended(self._process):
            return self._process
        self._process = None
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-B", "-m", self._module, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment({name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}),
            # The terminal's Ctrl-C is not for the helper, least of all before it has come to ignore it.
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(self._start_s):
                await _exchange(process, frame(self.setup), Ready)
        except (TimeoutError, EOFError, ConnectionError, msgspec.MsgspecError) as error:
            await _kill(process)
            raise WorkerStartError(f"{self._called} did not start: {type(error).__name__} {error}") from error
        except BaseException:
            await _kill(process)
            raise
        self._process = process
        return process

    async def _give_up(self, process: asyncio.subprocess.Process) -> None:
        if self._process is process:
            self._process = None
        await _kill(process)


async def _exchange(process: asyncio.subprocess.Process, request: bytes, kind: type[_Message]) -> _Message:
    """Send a framed message and read the answer. Raises EOFError or ConnectionError where the helper has ended."""
    assert process.stdin is not None and process.stdout is not None, "it was started with pipes"
    process.stdin.write(request)
    await process.stdin.drain()
    (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    if length > MESSAGE_BYTES_MAX:
        raise ConnectionError(f"a message of {length} bytes")
    return msgspec.json.decode(await process.stdout.readexactly(length), type=kind)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    """Asks the kernel where it tells: the loop hears of a death a moment later."""
    if process.returncode is not None:
        return True
    try:
        if not hasattr(os, "waitid") or os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
    except ChildProcessError:
        pass  # it was waited for already
    await process.wait()
    return True


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill, and reap even if the caller is being cancelled: a zombie must not stay."""
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            pass
    await asyncio.shield(process.wait())
