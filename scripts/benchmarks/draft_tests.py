"""What drafting is worth to one stream: `draft` of scripts/bench. It needs no llama-server.

    draft_2               2 drafts a round, both of which count, beside a server that drafts nothing
    draft_3               3 drafts, of which 2 count: three tokens for each round, as above
    draft_3of0, 3of1, 3of3    0, 1 and all 3 of 3 count
    ..._ms                milliseconds of such a round, beside those of a token that is decoded plainly
    draft_new             `--draft auto` on text that nobody can foresee, behind its first 64 tokens
    draft_counting, ...   `--draft auto` by what the text is
    ..._len               tokens for each round there, with 3 drafts in each

How many drafts count is forced (`HOMESERVE_DRAFTS`, which servers take for tests alone): the time of a round does not
depend on whether they were right, and weights that were drawn at random foresee nothing. That is what makes them good
for `draft_new`. By content a real drafting block is needed; the model that counts has one, and knows counts, series and
copies. Prose and code it has never read: what it says to them is nonsense, and so is what it foresees. On a model that
has learnt them (`--model`) these rows mean what they say.

The plain server runs all the time and the others one after another beside it; a pair is one answer of each, who goes
first changing. `draft_new` has the plain server's answer twice in each pair: what the machine's noise is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from measures import RESULTS
from rank_tests import Keep
from servers import Server, homeserve

from homeserve.bench.client import HeldBack, Timing, complete
from homeserve.bench.measures import DRAWS, SHORT_PROMPT
from homeserve.bench.prompts import Prompts

PLAIN = "homeserve-plain"
NEW = "draft_new"
LEARN, TIMED = 64, 96
"""Tokens of an answer that adaptation may learn from, and those behind them that are timed."""
DRAFTS = 3
"""Of each round where the tokens of a round are told by content: adaptation may well have none."""
SLOT_TOKENS = 512
ANSWER_OF_A_CONTENT = 128
RANDOM = ("qwen35-nextn.Q4_K_M",)
"""Where no other models are asked for: random weights, of more than 1 GB, ..."""
COUNTER = Path(__file__).resolve().parents[2] / "tests" / "data" / "counter.gguf"
"""... and for what depends on the content the model that counts."""


@dataclass(frozen=True)
class Forced:
    """`accepted` of `drafts` count in each round, whatever is drawn."""

    name: str
    drafts: int
    accepted: int

    @property
    def words(self) -> str:
        return f"accept:{self.accepted}" if self.accepted else "wrong"


FORCED = (
    Forced("draft_2", 2, 2),
    Forced("draft_3", 3, 2),
    *(Forced(f"draft_3of{accepted}", 3, accepted) for accepted in (0, 1, 3)),
)

PROSE = (
    "The road to the mill went along the river, and in spring, when the snow in the hills began to melt, it was under "
    "water for days. Then the miller's daughter took the boat to school, and her brother, who was afraid of the boat,",
    "Whoever has kept bees for a few years knows that they are never quite the same. A swarm that was gentle in May "
    "may be cross in July, and nobody can say whether it was the rain or the",
    "We had been told that the library would close at six. At a quarter to six the lights went out one after another, "
    "beginning with the reading room, and an old man in a grey coat walked from table to table and",
)
CODE = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(values)"
    "\n\n\ndef variance(values):\n    middle = mean(values)\n    total = 0\n    for value in values:\n",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n        if (i % 2 == 0) {\n"
    '            printf("%d is even\\n", i);\n        } else {\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
    "        self.items.append(item)\n\n    def pop(self):\n",
)
WORDS = ("lighthouse", "wheelbarrow", "marmalade", "porcupine", "umbrella", "chandelier", "hedgehog", "strawberry")


@dataclass(frozen=True)
class Content:
    """Texts of one kind, and how many tokens of an answer are asked for at most."""

    name: str
    prompts: tuple[str, ...]
    tokens: int = ANSWER_OF_A_CONTENT


KNOWN = (
    Content("draft_counting", tuple(f"count {start}:" for start in (8, 773, 2370))),
    Content("draft_series", tuple(f"series {start} step {step}:" for start, step in ((17, 4), (98, 7), (640, 3)))),
    Content("draft_copying", tuple(f"copy {word}:" for word in WORDS), 9),
)
"""In the words that the model that counts was trained on."""
COUNTING = Content(
    "draft_counting",
    tuple("Counting:" + "".join(f" {at}," for at in range(start, start + 12)) for start in (1, 86, 730)),
)
TEXTS = (Content("draft_prose", PROSE), Content("draft_code", CODE))


def contents(path: Path) -> tuple[Content, ...]:
    return (*(KNOWN if path.stem.startswith("counter") else (COUNTING,)), *TEXTS)


BY_TIME = frozenset((*(each.name for each in FORCED), NEW))
"""Parts that weights drawn at random are good for."""


def parts(path: Path, asked: frozenset[str], *, every: bool) -> frozenset[str]:
    """Those of `asked` that are measured on a model: `every`, or what this one is for."""
    kinds = frozenset(each.name for each in contents(path))
    able = BY_TIME | kinds if every else kinds if path == COUNTER else BY_TIME
    return asked & able


def of_model(name: str) -> str:
    """What the samples of these tests on a model are under."""
    return f"{name}, drafting"


def server_of(
    path: Path, threads: int, folder: Path, program: Sequence[str], isa: str, draft: str, forced: str = ""
) -> Server:
    """One that drafts as `draft` says; `forced`: what HOMESERVE_DRAFTS is."""
    engine = PLAIN if draft == "off" else "homeserve"
    found = homeserve(str(path), threads, SLOT_TOKENS, folder, program, engine)
    found.command += ["--draft", draft, *(("--isa", isa) if isa else ())]
    found.environ = {"HOMESERVE_TESTING": "1", "HOMESERVE_DRAFTS": forced} if forced else {}
    found.settings = f"--draft {draft}" + (f" HOMESERVE_DRAFTS={forced}" if forced else "")
    return found


@dataclass
class Drafting:
    """The tests `wanted` of one model: pairs of an answer of `plain` and one of a server that drafts, which `start`
    makes for a setting of --draft and of HOMESERVE_DRAFTS."""

    plain: Server
    start: Callable[[str, str], Server]
    pairs: int
    prompts: Prompts
    keep: Keep
    wanted: frozenset[str]

    def forced(self) -> None:
        for each in FORCED:
            if each.name in self.wanted:
                with self.running(str(each.drafts), each.words) as ours:
                    self._forced(each, ours)

    def _forced(self, each: Forced, ours: Server) -> None:
        for run, order in self.turns(ours):
            prompt = self.prompts.draw(SHORT_PROMPT)
            for server in order:
                timing = answered(server, prompt, self.prompts)
                if server is ours:
                    check(each, timing)
                self.say(server, each.name, run, timing.decode_tok_s)
                self.say(server, f"{each.name}_ms", run, 1000 * step_s(timing, server is ours))

    def new(self) -> None:
        """Behind the first tokens of an answer, and the plain one once more on the other side of ours."""
        if NEW not in self.wanted:
            return
        asked = self.prompts.shorter(LEARN + TIMED)
        with self.running("auto") as ours:
            for run, _ in self.turns(ours):
                prompt = asked.draw(SHORT_PROMPT)
                first, last = (NEW, f"noise:{NEW}") if run % 2 == 0 else (f"noise:{NEW}", NEW)
                for server, name in ((self.plain, first), (ours, NEW), (self.plain, last)):
                    timing = answered(server, prompt, asked)
                    self.say(server, name, run, timing.tok_s_after(LEARN), RESULTS[NEW].unit)

    def by_content(self, chosen: Sequence[Content]) -> None:
        chosen = [each for each in chosen if each.name in self.wanted]
        if not chosen:
            return
        with self.running("auto") as ours:
            for each in chosen:
                for run, order in self.turns(ours):
                    for server in order:
                        self.say(server, each.name, run, together(self._texts(server, each)))
        with self.running(str(DRAFTS)) as ours:
            for each in chosen:
                self.say(ours, f"{each.name}_len", 0, accept_length(self._texts(ours, each)))

    def _texts(self, server: Server, of: Content) -> list[Timing]:
        return [complete(server, text, of.tokens, counted=True) for text in of.prompts]

    @contextmanager
    def running(self, draft: str, forced: str = "") -> Iterator[Server]:
        """A server beside the plain one; each has answered once, which does not count."""
        ours = self.start(draft, forced)
        try:
            ours.start()
            for server in (self.plain, ours):
                complete(server, self.prompts.draw(SHORT_PROMPT), 16)
            yield ours
        finally:
            ours.stop()

    def turns(self, ours: Server) -> Iterator[tuple[int, tuple[Server, Server]]]:
        """Number of the run, and who goes first in it."""
        for run in range(self.pairs):
            self.keep("machine", "load", "processes", run, os.getloadavg()[0])
            yield run, (ours, self.plain) if run % 2 == 0 else (self.plain, ours)

    def say(self, server: Server, name: str, run: int, value: float, unit: str = "") -> None:
        self.keep(server.engine, name, unit or RESULTS[name].unit, run, value, server.settings)


def answered(server: Server, prompt: list[int], prompts: Prompts) -> Timing:
    """An answer of exactly as many tokens as `prompts` say. One that is held back to its end is asked for with another
    prompt."""
    for _ in range(DRAWS):
        timing = complete(server, prompt, prompts.answer, counted=True)
        try:
            _ = timing.decode_tok_s
        except HeldBack:
            prompt = prompts.draw(SHORT_PROMPT)
            continue
        return timing
    raise HeldBack(f"{server.engine} held back the answers to {DRAWS} prompts")


def step_s(timing: Timing, drafts: bool) -> float:
    """Seconds of a round, or of a token where none is drafted: the first token was drawn before the first event."""
    return (timing.last - timing.first) / (timing.draft["rounds"] if drafts else timing.tokens - timing.first_tokens)


def check(forced: Forced, timing: Timing) -> None:
    """That as many drafts counted as were to: in every round but the last ones, which may have fewer. Raises
    RuntimeError."""
    rounds, accepted = timing.draft.get("rounds", 0), timing.draft.get("accepted", 0)
    missing = rounds * forced.accepted - accepted
    if rounds == 0 or not 0 <= missing <= forced.drafts * (forced.drafts + 1):
        raise RuntimeError(f"{accepted} drafts counted in {rounds} rounds, where {forced.accepted} of each were to")


def together(timings: Sequence[Timing]) -> float:
    """Tokens per second of several answers, one after another: tokens behind their first events."""
    tokens = sum(timing.tokens - timing.first_tokens for timing in timings)
    return tokens / sum(timing.last - timing.first for timing in timings)


def accept_length(timings: Sequence[Timing]) -> float:
    """Tokens for each round; 1 where nothing was drafted."""
    rounds = sum(timing.draft.get("rounds", 0) for timing in timings)
    return 1.0 + (sum(timing.draft.get("accepted", 0) for timing in timings) / rounds if rounds else 0.0)
