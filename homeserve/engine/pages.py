"""Pages of the KV pool: who holds each one, and the prefix tree that keeps the useful ones after their request ended.

A page is PAGE_LEN consecutive slots. Layers that keep the same tokens form a *group* with pages of its own: group 0
keeps every token, the others the last `window` ones. Every page of a group is at any time in exactly one of four
places, and their sum is the group's capacity (the *census*):

    free       nobody's: on the free list
    live       owned by one sequence alone
    protected  in the prefix tree, and some running sequence reads it (it is locked)
    cached     in the prefix tree, unlocked: handed out again, least recently used first, when the free list is empty

The tree has one node for each page of tokens. Its edge is the page's token ids, so a path from the root spells a
prefix, and two requests that begin alike walk the same nodes. A node has a page of group 0 as long as it lives, and of
the other groups while theirs are kept. A sequence locks every node of its path in group 0, so a locked node's ancestors
are locked too, unlocked nodes form whole subtrees, and eviction takes leaves first, with their pages of all groups. In
a group with a window a sequence locks what its window covers, and lets go of it page by page as it moves on; such a
page is evicted by itself and leaves a gap in the node. A newcomer can therefore begin only behind nodes that have the
whole window before that place in every group (`usable`).

A page may enter the tree as soon as the plan that fills it is drafted: every rank runs plans in order, and within one
it stores all rows of a layer before any attention of that layer reads (`backends.base`). So whoever is given the page,
in that plan or a later one, reads it filled. For the same reason a page that a sequence's next row does not see any
more can be given to somebody else in the very plan that holds that row.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backends.base import PAGE_LEN

NO_PAGE = -1
"""In place of a page that is not kept: before a window, or evicted."""


class Node:
    """One page of a prefix: `key` is its PAGE_LEN token ids as int32 bytes. Lists have an entry for each group."""

    __slots__ = ("children", "key", "locks", "pages", "parent", "queued", "state", "used")

    def __init__(self, key: bytes, pages: list[int], parent: Node | None) -> None:
        self.key = key
        self.pages = pages
        """Where its rows lie, NO_PAGE where they are not kept."""
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = [0] * len(pages)
        self.used = [0] * len(pages)
        self.state = -1
        """Slot of the recurrent state behind this page, where one is kept (`engine.states`)."""
        self.queued = [False] * len(pages)
        """It has its one entry in the group's eviction order."""


@dataclass(frozen=True)
class PageCensus:
    """Pages of a group by place; `free + live + protected + cached == capacity`. `window` 0: it keeps every token."""

    window: int
    capacity: int
    free: int
    live: int
    protected: int
    cached: int


class _Group:
    """Free list and eviction order of one group."""

    def __init__(self, capacity: int, window: int) -> None:
        self.capacity = capacity
        self.window = window
        self.free = list(range(capacity - 1, -1, -1))
        self.in_tree = 0
        self.locked = 0
        self.order: list[tuple[int, int, Node]] = []
        self.order_count = 0

    @property
    def available(self) -> int:
        """Pages that could be handed out now, cached ones included."""
        return len(self.free) + self.in_tree - self.locked

    def census(self) -> PageCensus:
        free, cached = len(self.free), self.in_tree - self.locked
        return PageCensus(self.window, self.capacity, free, self.capacity - free - self.in_tree, self.locked, cached)


class PagePool:
    """The free lists and the prefix tree over pages 0..capacity-1 of each group.

    `groups` are (pages, window), group 0 with window 0 first."""

    def __init__(self, groups: Sequence[tuple[int, int]], on_evict: Callable[[Node], None] = lambda node: None) -> None:
        if not groups or groups[0][1] or any(pages < 1 for pages, _ in groups):
            raise ValueError(f"a KV pool needs pages, and a group that keeps every token first: {list(groups)}")
        self._groups = [_Group(*each) for each in groups]
        self._on_evict = on_evict
        self._root = Node(b"", [NO_PAGE] * len(groups), None)
        self._tick = 0

    @property
    def root(self) -> Node:
        """Start of every path; holds no page."""
        return self._root

    @property
    def capacity(self) -> int:
        """Pages of group 0, so many that no sequence is longer."""
        return self._groups[0].capacity

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(group.window for group in self._groups)

    def available(self, group: int) -> int:
        """Pages that `take` could hand out now in a group, cached ones included."""
        return self._groups[group].available

    @property
    def room(self) -> int:
        """Pages that `take` could hand out now in every group."""
        return min(group.available for group in self._groups)

    def census(self) -> tuple[PageCensus, ...]:
        return tuple(group.census() for group in self._groups)

    def census_by_owner(self, owner: Callable[[int], int], ranks: int) -> list[tuple[PageCensus, ...]]:
        """The same for each rank, of the pages that it keeps (`owner(page)`)."""
        counts = [[[0, 0, 0, 0] for _ in self._groups] for _ in range(ranks)]  # capacity, free, protected, cached
        for index, group in enumerate(self._groups):
            for page in range(group.capacity):
                counts[owner(page)][index][0] += 1
            for page in group.free:
                counts[owner(page)][index][1] += 1
        nodes = list(self._root.children.values())
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            for index, page in enumerate(node.pages):
                if page != NO_PAGE:
                    counts[owner(page)][index][2 if node.locks[index] else 3] += 1
        return [
            tuple(
                PageCensus(group.window, have, free, have - free - protected - cached, protected, cached)
                for group, (have, free, protected, cached) in zip(self._groups, of_rank, strict=True)
            )
            for of_rank in counts
        ]

    def held(self, group: int) -> bytes:
        """Bit map (bit i of byte i // 8, lowest first) of a group's pages that are not free: live, protected or
        cached."""
        owner = self._groups[group]
        digits = bytearray(b"1") * owner.capacity
        for page in owner.free:
            digits[page] = 0x30
        digits.reverse()
        return int(digits, 2).to_bytes(-(-owner.capacity // 8), "little")  # a bit at a time holds the loop up

    def cached(self) -> list[int]:
        """Cached pages of each group: what `census` says of them, and quick enough to be asked behind each drop."""
        return [group.in_tree - group.locked for group in self._groups]

    def drop_cached(self, group: int) -> bool:
        """Free the least recently used cached page of a group; False where there is none."""
        owner = self._groups[group]
        if owner.in_tree == owner.locked:
            return False
        self._evict_one(group)
        return True

    def take(self, count: int) -> list[list[int]] | None:
        """`count` pages of each group for one owner, evicting cached ones if it must; None, and nothing changed, if
        too few."""
        if count > self.room:
            return None
        for index, group in enumerate(self._groups):
            while len(group.free) < count:
                self._evict_one(index)
        return [[group.free.pop() for _ in range(count)] for group in self._groups]

    def give_back(self, group: int, pages: list[int]) -> None:
        """Return pages that one owner held alone."""
        self._groups[group].free.extend(reversed(pages))

    # --------------------------------------------------------------------------------------------------- the tree

    def match(self, tokens: array[int], page_limit: int) -> list[Node]:
        """The longest known path along `tokens`, at most `page_limit` pages of it."""
        path: list[Node] = []
        node = self._root
        for index in range(min(page_limit, len(tokens) // PAGE_LEN)):
            child = node.children.get(page_key(tokens, index))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def usable(self, path: list[Node], *, with_state: bool) -> int:
        """How many pages of a path somebody can begin behind: the most after which every group still has the window
        before that place, and (`with_state`) a recurrent state is kept."""
        runs = [0] * len(self._groups)
        best = 0
        for depth, node in enumerate(path, 1):
            good = node.state >= 0 or not with_state
            for group in range(1, len(runs)):
                runs[group] = runs[group] + 1 if node.pages[group] != NO_PAGE else 0
                good = good and runs[group] >= depth - self.first_seen(group, depth * PAGE_LEN)
            if good:
                best = depth
        return best

    def first_seen(self, group: int, position: int) -> int:
        """The first page that a row at `position` reads in a group."""
        window = self._groups[group].window
        return max(0, position - window + 1) // PAGE_LEN if window else 0

    def lock(self, node: Node, group: int = 0) -> None:
        if node.locks[group] == 0:
            self._groups[group].locked += 1
        node.locks[group] += 1

    def unlock(self, path: Sequence[Node], group: int = 0, *, first: bool = False) -> None:
        """Undo one `lock` of each node. The path counts as used now, its deepest node being evicted before the others;
        or, with `first`, as unused for ever."""
        self._tick += 1
        for node in reversed(path):
            assert node.locks[group] > 0, "a prefix node was unlocked more often than locked"
            node.locks[group] -= 1
            node.used[group] = 0 if first else self._tick
            if node.locks[group] == 0:
                self._groups[group].locked -= 1
                self._offer(node, group)

    def insert(self, parent: Node, key: bytes, pages: list[int]) -> Node:
        """Put filled pages under `parent`. Returns their node; or, where the same prefix is known already, the node
        that spells it (its pages are others then, and the given ones stay their owner's)."""
        known = parent.children.get(key)
        if known is not None:
            return known
        node = Node(key, list(pages), parent)
        parent.children[key] = node
        for group, page in zip(self._groups, pages, strict=True):
            group.in_tree += page != NO_PAGE
        return node

    def adopt(self, node: Node, group: int, page: int) -> None:
        """Fill a gap of the node with a page that an owner gives up. It enters the eviction order with the next
        unlock."""
        assert node.pages[group] == NO_PAGE and not node.locks[group]
        node.pages[group] = page
        self._groups[group].in_tree += 1

    # --------------------------------------------------------------------------------------------------- eviction

    def _offer(self, node: Node, group: int) -> None:
        """Enter an unlocked page into the group's eviction order, once; in group 0 only that of a leaf."""
        if node.locks[group] or node.queued[group] or node.parent is None or (group == 0 and node.children):
            return
        owner = self._groups[group]
        node.queued[group] = True
        owner.order_count += 1
        heapq.heappush(owner.order, (node.used[group], owner.order_count, node))

    def _evict_one(self, group: int) -> None:
        """Free the least recently used cached page of a group. An entry that is out of date (used again, locked, gone,
        or no leaf any more) leaves the order; one that is merely used later goes back to its new place."""
        while True:
            used, _, node = heapq.heappop(self._groups[group].order)
            node.queued[group] = False
            stale = node.parent is None or node.locks[group] or node.pages[group] == NO_PAGE
            if stale or (group == 0 and node.children):
                continue
            if used != node.used[group]:
                self._offer(node, group)
                continue
            if group:
                self._drop_page(node, group)
            else:
                self._remove(node)
            return

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.parent = None
        self._on_evict(node)
        for group, page in enumerate(node.pages):
            if page != NO_PAGE:
                self._drop_page(node, group)
        self._offer(parent, 0)

    def _drop_page(self, node: Node, group: int) -> None:
        assert not node.locks[group], "a page that somebody reads was evicted"
        owner = self._groups[group]
        owner.free.append(node.pages[group])
        owner.in_tree -= 1
        node.pages[group] = NO_PAGE


def page_key(tokens: array[int], index: int) -> bytes:
    """The token ids of page `index` of a sequence, as bytes."""
    return tokens[index * PAGE_LEN : (index + 1) * PAGE_LEN].tobytes()


def pages_for(token_count: int) -> int:
    """Pages that hold `token_count` rows."""
    return -(-token_count // PAGE_LEN)
