"""Lane tables: what a rank remembers of the requests that run on it, and the check that a plan fits them.

    plan.drop ─▶ lane freed      plan.new ─▶ lane taken      plan.rows ─▶ pages appended, rows for the batch

A lane is a cache of what the engine knows: the page table, the length so far, the token drawn last, and what its
settings look back at. All of it is made from plans, so a worker that is started again gets it back by prefilling.

A plan is checked whole before anything of it is applied (`check`), against the lanes as they will be after its own
drops and news. Whatever does not fit is a `LaneRefused` with the reason, and the tables stay as they were: rows of
another request than the lane's, rows that leave a gap, positions without a page, ids that do not exist.

Rows begin where the lane's last ones ended: a recurrent layer cannot compute a row a second time. A prompt whose own
log-probabilities are asked for needs, for the first token of a chunk, the logits behind the chunk before it: the lane
keeps them.

A token that another rank draws for a lane is AWAITED until it comes (`homeserve.worker.drawn`).

Rows with drafts begin at the one token that is known; what is drafted behind it is found while the plan runs
(`homeserve.worker.drafting`), and how many rows count only at its end. Until then (`settle`) the lane is what it was:
length, past and last token follow the rows that count, and no others.

When the layout changes (`turn`) lanes stay what they are: their tables are the engine's, and only the places of pages
in this rank's pools are looked up anew.

A page table has a row for each KV group of the model, and all rows of a lane are equally long. In a group that keeps
the last tokens only (a window), the pages before the window are the engine's to give to others: what stands in their
place is not read any more, and a prefix hit brings UNKNOWN there.

Lane i works in state slot i (models with recurrent layers only); slots behind the lanes' hold checkpoints that plans
save to and restore from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from backends.base import PAGE_LEN, Batch, Limits
from homeserve.wire.records import POOLINGS, LaneRows, NewLane, Plan, Sampling, needs_all_rows
from homeserve.worker.drawn import Drawn, request_bits
from homeserve.worker.guide import Guides, LaneGuide
from homeserve.worker.past import Past, TokensWith, no_vocabulary, past_of
from homeserve.worker.places import PagePlaces
from homeserve.worker.pooled import Pooled

Ints = npt.NDArray[np.int32]

UNKNOWN = -1
AWAITED = -2
"""The last token of a lane, drawn on another rank and not told here yet."""
NOTHING: Mapping[int, Sequence[int]] = {}
NO_HOLD = np.zeros(0, np.int32)


class LaneRefused(Exception):
    """A plan that does not fit the lanes. Nothing of it was applied."""


@dataclass
class Lane:
    """One running request. `length` is the number of positions computed (UNKNOWN before the first rows)."""

    request: int
    prompt_len: int
    sampling: Sampling
    history_len: int
    past: Past | None
    length: int = UNKNOWN
    page_count: int = 0
    last_token: int = UNKNOWN
    last_logits: npt.NDArray[np.float32] | None = None
    """Behind the last row of a chunk that drew nothing, where the prompt's own log-probabilities are asked for."""
    guide: LaneGuide | None = None
    """What its answer has to look like; None: anything."""
    pooling: str = ""
    """How its rows become an embedding; empty: tokens are drawn for it."""
    pooled: Pooled | None = None
    """What is known of that, on the rank that has the rows."""


@dataclass(frozen=True)
class Group:
    """The rows of one lane in a batch: `[first, first + len(inputs))`, with the batch rows whose logits come back."""

    lane: int
    rows: LaneRows
    inputs: Ints
    first: int
    logits_first: int
    logit_count: int
    pools: bool = False
    """Of a lane with pooling."""

    @property
    def draws(self) -> int:
        """The most tokens that are drawn behind its rows."""
        return 1 + self.rows.drafts if self.rows.sample and not self.pools else 0


@dataclass
class Lanes:
    """The tables of a rank. `tables` int32 `[groups, lanes, lane_pages]` holds the engine's pages, `local` their places
    in this rank's pools, which `Batch.tables` shows to the backend.

    `places` says where the engine's pages lie (None: each at its own place in pools of `pool_pages`); `pool_pages` are
    the engine's pages of each KV group, `windows` the tokens that it keeps (0: all). Where another rank `draws`, tokens
    of a lane are AWAITED and nothing looks back here; a rank that looks up no rows (not `embeds`) never learns
    them. `drafts` is the most that a row may ask for in the layout in force.
    `guides` makes those of lanes; a rank that draws has them."""

    limits: Limits
    vocab: int
    pool_pages: tuple[int, ...]
    windows: tuple[int, ...] = (0,)
    state_slots: int = 0
    places: PagePlaces | None = None
    draws: bool = True
    embeds: bool = True
    drafts: int = 0
    tokens_with: TokensWith = no_vocabulary
    guides: Guides | None = None
    """Finds DRY's breakers."""
    tables: Ints = field(init=False)
    local: Ints = field(init=False)
    lanes: list[Lane | None] = field(init=False)
    _batch: Batch = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rows = self.limits.rows
        self.tables = np.zeros((len(self.windows), self.limits.lanes, self.limits.lane_pages), np.int32)
        self.local = self.tables if self.places is None else self.tables.copy()
        self.lanes = [None] * self.limits.lanes
        tokens, positions, lanes, logit_rows = np.zeros((4, rows), np.int32)
        slots = np.zeros((len(self.windows), rows), np.int32)
        self._states = np.arange(self.limits.lanes if self.state_slots else 0, dtype=np.int32)
        self._hold = np.full(self.limits.lanes, UNKNOWN, np.int32)
        self._batch = Batch(tokens, positions, slots, lanes, self.local, logit_rows, self._states)

    def check(self, plan: Plan) -> None:
        """Raises LaneRefused unless every part of the plan fits."""
        for lane in plan.drop:
            _require(0 <= lane < len(self.lanes), lane, f"there are {len(self.lanes)} lanes")
        dropped = set(plan.drop)
        new: dict[int, NewLane] = {}
        for entry in plan.new:
            _require(entry.lane not in new, entry.lane, "is taken twice in one plan")
            self._check_new(entry, free=entry.lane in dropped)
            new[entry.lane] = entry
        named: set[int] = set()
        for rows in plan.rows:
            _require(rows.lane not in named, rows.lane, "is named twice in one plan")
            named.add(rows.lane)
            self._check_rows(rows, new.get(rows.lane), dropped=rows.lane in dropped)
        self._check_sizes(plan.rows, new)

    def apply(self, plan: Plan) -> None:
        """Drop and take lanes, and append pages. The plan was checked."""
        for index in plan.drop:
            self.lanes[index] = None
        for entry in plan.new:
            self.lanes[entry.lane] = lane = self._lane(entry)
            if lane.past is not None:
                lane.past.begin()
            if lane.guide is not None:
                lane.guide.begin()
        for rows in plan.rows:
            if rows.pages:
                lane = self[rows.lane]
                pages = self._pages(rows)
                span = slice(lane.page_count, lane.page_count + pages.shape[1])
                self.tables[:, rows.lane, span] = pages
                if self.places is not None:
                    for group in range(len(self.windows)):
                        self.local[group, rows.lane, span] = self.places.of(group, pages[group])
                lane.page_count = span.stop

    def batch(
        self, rows: Sequence[LaneRows], epoch: int = 0, seq: int = 0, drafted: Mapping[int, Sequence[int]] = NOTHING
    ) -> tuple[Batch, list[Group]]:
        """The batch of applied rows of plan `seq`, and which of its rows are whose. `drafted` has the drafts of each
        lane that has any: they follow its known token, and its states are held. Its arrays are used again by the next
        call."""
        out = self._batch
        groups: list[Group] = []
        at = logits_at = held = 0
        self._hold.fill(UNKNOWN)
        for entry in rows:
            group = self._group(entry, at, logits_at, drafted.get(entry.lane, ()))
            groups.append(group)
            count = len(group.inputs)
            span = slice(at, at + count)
            positions = np.arange(entry.start, entry.start + count, dtype=np.int32)
            out.tokens[span] = group.inputs
            out.positions[span] = positions
            out.slots[:, span] = self._slots(np.int32(entry.lane), positions)
            out.lanes[span] = entry.lane
            if entry.drafts:
                self._hold[entry.lane] = held
                held += count
            at, wanted = span.stop, slice(logits_at, logits_at + group.logit_count)
            out.logit_rows[wanted] = np.arange(at - group.logit_count, at)
            logits_at = wanted.stop
        own = out.tokens[:at], out.positions[:at], out.slots[:, :at], out.lanes[:at]
        hold = self._hold if held else NO_HOLD
        return Batch(*own, self.local, out.logit_rows[:logits_at], self._states, epoch, seq, hold), groups

    def draft_batch(
        self, rows: Sequence[LaneRows], step: int, tokens: Ints, chain: Ints, epoch: int = 0, seq: int = 0
    ) -> Batch:
        """Step `step` of drafting behind applied `rows` of plan `seq`: one row of each, whose input is that of
        `tokens`; `chain` as in `Batch`."""
        lanes = np.array([entry.lane for entry in rows], np.int32)
        positions = np.array([entry.start + step for entry in rows], np.int32)
        every = np.arange(len(rows), dtype=np.int32)
        slots = self._slots(lanes, positions)
        return Batch(tokens, positions, slots, lanes, self.local, every, self._states, epoch, seq, NO_HOLD, chain)

    def foresee(self, group: Group) -> None:
        """The group's rows are about to be computed: their inputs are known, and the mask that the first draw will need
        is due. Of a group with drafts only the known token counts yet."""
        guide = self[group.lane].guide
        if guide is not None:
            known = group.inputs[:1] if group.rows.drafts else group.inputs
            guide.told(group.rows.start - self[group.lane].prompt_len, known.tolist())
            if group.rows.sample:
                guide.prepare()

    def make_masks(self) -> None:
        """Begin to make the masks of all rows whose inputs are known and that are to be drawn next."""
        if self.guides is not None:
            self.guides.make_due()

    def advance(self, group: Group) -> None:
        """All rows of the group were computed and count: move the lane's length, and its past goes on."""
        lane = self[group.lane]
        self._count(lane, group, len(group.inputs))
        if group.draws and not self.draws:
            lane.last_token = AWAITED

    def settle(self, group: Group, tokens: Sequence[int]) -> None:
        """`tokens` were drawn behind the first rows of a group with drafts: these rows count, and no others."""
        lane = self[group.lane]
        self._count(lane, group, len(tokens))
        lane.last_token = tokens[-1]

    def take_token(self, drawn: Drawn) -> None:
        """What another rank drew for a lane; nothing where the lane is another request's by now."""
        lane = self.lanes[drawn.lane]
        if lane is not None and request_bits(lane.request) == drawn.request:
            lane.last_token = drawn.token

    def turn(self, places: PagePlaces | None, *, embeds: bool, drafts: int = 0) -> None:
        """From here on the layout is another one: where pages lie, whether this rank looks up rows, and how many drafts
        a row may ask for. What a lane's next input is has to be told with its next row: whoever did not embed has never
        learnt it."""
        self.places, self.embeds, self.drafts = places, embeds, drafts
        if places is None:
            self.local = self.tables
        else:
            self.local = np.stack([places.of(group, pages) for group, pages in enumerate(self.tables)])
        for lane in self.lanes:
            if lane is not None:
                lane.last_token = UNKNOWN

    def occupied(self) -> tuple[tuple[int, int, int], ...]:
        """(lane, request, pages in its table) of every lane that is taken."""
        return tuple((i, lane.request, lane.page_count) for i, lane in enumerate(self.lanes) if lane is not None)

    def __getitem__(self, index: int) -> Lane:
        lane = self.lanes[index]
        assert lane is not None, f"lane {index} is free"
        return lane

    # ------------------------------------------------------------------------------------------------------ checks

    def _check_new(self, entry: NewLane, *, free: bool) -> None:
        _require(0 <= entry.lane < len(self.lanes), entry.lane, f"there are {len(self.lanes)} lanes")
        holder = self.lanes[entry.lane]
        if holder is not None and not free:
            raise LaneRefused(f"lane {entry.lane} is request {holder.request}'s, {entry.request} cannot take it")
        self._check_ids(entry.lane, _ints(entry.history))
        self._check_slot(entry.lane, entry.restore)
        pooling = entry.pooling
        _require(pooling in ("", *POOLINGS), entry.lane, f"pooling {pooling!r} is none of {', '.join(POOLINGS)}")
        sampling = entry.sampling
        if sampling.guide is not None:
            for ids in (sampling.guide.ends, sampling.guide.thought_opens, sampling.guide.thought_closes):
                self._check_ids(entry.lane, _ints(ids))
        for token in (*sampling.forbidden, *(token for token, _ in sampling.logit_bias)):
            _require(0 <= token < self.vocab, entry.lane, f"token {token} is not in the vocabulary of {self.vocab}")

    def _check_rows(self, rows: LaneRows, new: NewLane | None, *, dropped: bool) -> None:
        _require(0 <= rows.lane < len(self.lanes), rows.lane, f"there are {len(self.lanes)} lanes")
        lane = self._lane(new) if new is not None else None if dropped else self.lanes[rows.lane]
        if lane is None or lane.request != rows.request:
            holder = "free" if lane is None else f"request {lane.request}'s"
            raise LaneRefused(f"lane {rows.lane} is {holder}, not request {rows.request}'s")
        if lane.length == UNKNOWN:
            looks_back = lane.past is not None or lane.guide is not None
            missing = looks_back and lane.history_len != rows.start
            _require(not missing, rows.lane, f"{lane.history_len} tokens of history where {rows.start} are needed")
        else:
            _require(rows.start == lane.length, rows.lane, f"rows from {rows.start} do not go on at {lane.length}")
        self._check_slot(rows.lane, rows.save)
        self._check_drafts(rows)
        self._check_pooling(rows, lane)
        tokens, pages = _ints(rows.tokens), self._pages(rows)
        if not len(tokens):
            _require(lane.last_token != UNKNOWN, rows.lane, "no token was drawn that could be its next input")
        self._check_ids(rows.lane, tokens)
        page_count = lane.page_count + pages.shape[1]
        _require(
            page_count <= self.limits.lane_pages,
            rows.lane,
            f"{page_count} pages are more than the {self.limits.lane_pages} of a lane",
        )
        end = rows.start + _row_count(rows)
        _require(
            0 <= rows.start and end <= page_count * PAGE_LEN,
            rows.lane,
            f"positions [{rows.start}, {end}) are not covered by {page_count} pages",
        )
        for group, window in enumerate(self.windows):
            seen = max(0, rows.start - window + 1) // PAGE_LEN if window else 0
            self._check_pages(rows.lane, group, pages[group, max(0, seen - lane.page_count) :])
            if window:  # of its older pages some may have come as nobody's
                self._check_pages(rows.lane, group, self.tables[group, rows.lane, seen : lane.page_count])

    def _check_drafts(self, rows: LaneRows) -> None:
        """Drafts are as many as there may be, and follow one known token; nothing but tokens is asked of such rows: a
        checkpoint or a prompt's own logits would be of rows that may not count."""
        lane, drafts = rows.lane, rows.drafts
        if not drafts:
            return
        _require(0 < drafts, lane, f"{drafts} drafts")
        _require(self.drafts > 0, lane, f"{drafts} drafts, and nothing is drafted here in this layout")
        _require(drafts <= self.drafts, lane, f"{drafts} drafts are more than the {self.drafts} that it was loaded for")
        known = len(rows.tokens) // 4
        _require(known == 1, lane, f"drafts follow one known token, and {known} are told")
        asks_nothing_else = rows.sample and rows.save == UNKNOWN and rows.prompt_logprobs < 0
        _require(asks_nothing_else, lane, "rows with drafts are for drawing tokens and for nothing else")

    @staticmethod
    def _check_pooling(rows: LaneRows, lane: Lane) -> None:
        """A lane with pooling has rows of its prompt alone, from the first one on where all are needed."""
        if not lane.pooling:
            return
        begins_late = lane.length == UNKNOWN and rows.start > 0 and needs_all_rows(lane.pooling)
        _require(not begins_late, rows.lane, f"{lane.pooling} pooling needs the rows before {rows.start}")
        _require(bool(rows.tokens), rows.lane, "nothing is drawn for a lane with pooling that could be its next input")
        asks_nothing_else = not rows.drafts and rows.prompt_logprobs < 0
        _require(asks_nothing_else, rows.lane, "a lane with pooling has neither drafts nor logits")

    def _check_pages(self, lane: int, group: int, pages: Ints) -> None:
        """Every page that rows will read or write lies in the group's pool."""
        if len(pages) and bool(((pages < 0) | (pages >= self.pool_pages[group])).any()):
            which = f" of the layers that see {self.windows[group]} tokens" if self.windows[group] else ""
            raise LaneRefused(f"lane {lane}: a page is outside the pool{which} of {self.pool_pages[group]}")

    def _pages(self, rows: LaneRows) -> Ints:
        """Pages that the rows append, `[groups, count]`."""
        pages = _ints(rows.pages)
        if len(pages) % len(self.windows):
            raise LaneRefused(f"lane {rows.lane}: {len(pages)} pages for {len(self.windows)} KV groups")
        return pages.reshape(len(self.windows), -1)

    def _check_slot(self, lane: int, slot: int) -> None:
        """Only checkpoint slots are saved to and restored from: a lane's own slot changes with every row."""
        known = slot == -1 or self.limits.lanes <= slot < self.state_slots
        _require(
            known, lane, f"state slot {slot} is no checkpoint's; those are {self.limits.lanes}..{self.state_slots}"
        )

    def _check_ids(self, lane: int, tokens: Ints) -> None:
        if len(tokens):
            bad = (tokens < 0) | (tokens >= self.vocab)
            _require(not bad.any(), lane, f"a token is outside the vocabulary of {self.vocab}")

    def _check_sizes(self, rows: Sequence[LaneRows], new: Mapping[int, NewLane]) -> None:
        counts = [_row_count(entry) for entry in rows]
        holders = [new.get(entry.lane) or self.lanes[entry.lane] for entry in rows]
        logits = sum(
            _logit_count(entry, count, pools=holder is not None and bool(holder.pooling))
            for entry, count, holder in zip(rows, counts, holders, strict=True)
        )
        held = sum(_row_count(entry) for entry in rows if entry.drafts)
        if sum(counts) > self.limits.rows:
            raise LaneRefused(f"a plan of {sum(counts)} rows is more than {self.limits.rows}")
        if logits > self.limits.logit_rows:
            raise LaneRefused(f"logits of {logits} rows are more than {self.limits.logit_rows}")
        if held > self.limits.held_rows:
            raise LaneRefused(f"{held} rows whose states are held are more than {self.limits.held_rows}")

    # ------------------------------------------------------------------------------------------------------- parts

    def _count(self, lane: Lane, group: Group, rows: int) -> None:
        end = group.rows.start + rows
        if lane.past is not None:
            lane.past.add(group.inputs[:rows], np.arange(group.rows.start, end) >= lane.prompt_len)
        lane.length = end

    def _slots(self, lanes: Ints | np.int32, positions: Ints) -> Ints:
        """Where the K and V of rows go, `[groups, rows]`."""
        pages = self.local[:, lanes, positions // PAGE_LEN]
        if self.places is not None:
            pages = np.stack([self.places.for_writing(index, each) for index, each in enumerate(pages)])
        slots: Ints = pages * PAGE_LEN + positions % PAGE_LEN
        return slots

    def _lane(self, entry: NewLane) -> Lane:
        history = _ints(entry.history)
        past = past_of(entry.sampling, self.vocab, self.tokens_with) if self.draws else None
        if past is not None:
            past.add(history, np.arange(len(history)) >= entry.prompt_len)
        guide = self._guide(entry, history)
        pooled = Pooled(entry.pooling) if entry.pooling and self.draws else None
        fixed = entry.request, entry.prompt_len, entry.sampling, len(history), past
        return Lane(*fixed, guide=guide, pooling=entry.pooling, pooled=pooled)

    def _guide(self, entry: NewLane, history: Ints) -> LaneGuide | None:
        asked = entry.sampling.guide
        if asked is None or not self.draws:
            return None
        assert self.guides is not None, "a rank that draws has guides"
        guide = self.guides.lane(asked)
        guide.told(-entry.prompt_len, history.tolist())
        return guide

    def _group(self, entry: LaneRows, first: int, logits_first: int, drafts: Sequence[int]) -> Group:
        if entry.tokens:
            inputs = _ints(entry.tokens)
            if drafts:
                inputs = np.array([*inputs, *drafts], np.int32)
        else:
            last = self[entry.lane].last_token
            assert last != AWAITED or not self.embeds, f"lane {entry.lane}: its token was not taken"
            inputs = np.array([max(0, last)], np.int32)
        pools = bool(self[entry.lane].pooling)
        logit_count = _logit_count(entry, len(inputs), pools=pools)
        return Group(entry.lane, entry, inputs, first, logits_first, logit_count, pools)


def _row_count(rows: LaneRows) -> int:
    return max(1, len(rows.tokens) // 4) + rows.drafts


def _logit_count(rows: LaneRows, count: int, *, pools: bool) -> int:
    """Rows of a group whose logits are needed: the last if it draws, all for the prompt's own and for drafts, none for
    an embedding."""
    if pools:
        return 0
    return count if rows.prompt_logprobs >= 0 or rows.drafts else int(rows.sample)


def _ints(data: bytes) -> Ints:
    if len(data) % 4:
        raise LaneRefused(f"{len(data)} bytes are no int32 numbers")
    return np.frombuffer(data, "<i4")


def _require(holds: bool, lane: int, why: str) -> None:
    if not holds:
        raise LaneRefused(f"lane {lane}: {why}")
