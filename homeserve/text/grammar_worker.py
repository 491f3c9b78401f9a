"""The helper process that checks grammars: `python -m homeserve.text.grammar_worker PARENT_PID`.

A grammar comes with a request and may take a compiler any time and memory. So it is compiled here first, in a process
with bounds (`homeserve.text.helper_child`); what a rank gets has been through here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from homeserve.text.grammar_compile import Compiler
from homeserve.text.grammar_wire import Check, Setup
from homeserve.text.helper_child import serve
from homeserve.text.helper_wire import frame


def main() -> int:
    """Serve until standard input ends."""
    return serve(Setup, _answers)


def _answers(setup: Setup) -> Callable[[bytes], bytes]:
    compiler = Compiler(setup.vocab, setup.special)
    return lambda body: frame(compiler.check(msgspec.json.decode(body, type=Check)))


if __name__ == "__main__":
    sys.exit(main())
