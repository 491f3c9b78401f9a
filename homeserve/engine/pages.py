"""Pages of the KV pool: who holds each one, and the prefix tree that keeps the useful ones after their request ended.

A page is PAGE_LEN consecutive slots. Every page is at any time in exactly one of four places, and their sum is the
capacity (the *census*):

    free       nobody's: on the free list
    live       owned by one sequence alone
    protected  in the prefix tree, and some running sequence reads it (its node is locked)
    cached     in the prefix tree, unlocked: handed out again, least recently used first, when the free list is empty

The tree has one node for each page of tokens. Its edge is the page's token ids, so a path from the root spells a
prefix, and two requests that begin alike walk the same nodes. A sequence locks every node of its path; a locked node's
ancestors are therefore locked too, unlocked nodes form whole subtrees, and eviction takes leaves first.

A page may enter the tree as soon as the plan that fills it is drafted: every rank runs plans in order, and within one
it stores all rows of a layer before any attention of that layer reads (`backends.base`). So whoever is given the page,
in that plan or a later one, reads it filled.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from backends.base import PAGE_LEN


class Node:
    """One page of a prefix: `key` is its PAGE_LEN token ids as int32 bytes, `page` where its rows lie."""

    __slots__ = ("children", "key", "locks", "page", "parent", "queued", "state", "used")

    def __init__(self, key: bytes, page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.used = 0
        self.state = -1
        """Slot of the recurrent state behind this page, where one is kept (`engine.states`)."""
        self.queued = False
        """It has its one entry in the eviction order."""


@dataclass(frozen=True)
class PageCensus:
    """Pages by place; `free + live + protected + cached == capacity`."""

    capacity: int
    free: int
    live: int
    protected: int
    cached: int


class PagePool:
    """The free list and the prefix tree over pages 0..capacity-1."""

    def __init__(self, capacity: int, on_evict: Callable[[Node], None] = lambda node: None) -> None:
        if capacity < 1:
            raise ValueError(f"a KV pool needs at least one page, got {capacity}")
        self.capacity = capacity
        self._on_evict = on_evict
        self._free = list(range(capacity - 1, -1, -1))
        self._root = Node(b"", -1, None)
        self._nodes = 0
        self._locked = 0
        self._tick = 0
        self._leaves: list[tuple[int, int, Node]] = []
        self._leaf_order = 0

    @property
    def root(self) -> Node:
        """Start of every path; holds no page."""
        return self._root

    @property
    def available(self) -> int:
        """Pages that `take` could hand out now, cached ones included."""
        return len(self._free) + self._nodes - self._locked

    def census(self) -> PageCensus:
        cached = self._nodes - self._locked
        free = len(self._free)
        return PageCensus(self.capacity, free, self.capacity - free - self._nodes, self._locked, cached)

    def take(self, count: int) -> list[int] | None:
        """`count` pages for one owner, evicting cached ones if it must; None, and nothing changed, if too few."""
        if count > self.available:
            return None
        while len(self._free) < count:
            self._evict_one()
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        """Return pages that one owner held alone."""
        self._free.extend(reversed(pages))

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

    def lock(self, node: Node) -> None:
        if node.locks == 0:
            self._locked += 1
        node.locks += 1

    def unlock(self, path: list[Node]) -> None:
        """Undo one `lock` of each node. The path counts as used now; its deepest node is the first to be evicted."""
        self._tick += 1
        for node in reversed(path):
            assert node.locks > 0, "a prefix node was unlocked more often than locked"
            node.locks -= 1
            node.used = self._tick
            if node.locks == 0:
                self._locked -= 1
                self._offer(node)

    def insert(self, parent: Node, key: bytes, page: int) -> Node:
        """Put a filled page under `parent`. Returns its node; or, where the same prefix is known already, the node
        that spells it (its `page` is another one then, and the given page stays its owner's)."""
        known = parent.children.get(key)
        if known is not None:
            return known
        node = Node(key, page, parent)
        parent.children[key] = node
        self._nodes += 1
        return node

    def _offer(self, node: Node) -> None:
        """Enter an unlocked leaf into the eviction order, once."""
        if node.locks == 0 and not node.children and node.parent is not None and not node.queued:
            node.queued = True
            self._leaf_order += 1
            heapq.heappush(self._leaves, (node.used, self._leaf_order, node))

    def _evict_one(self) -> None:
        """Free the least recently used cached leaf. An entry that is out of date (its node was used again, locked, or
        has children now) leaves the order; one that is merely used later goes back to its new place."""
        while True:
            used, _, node = heapq.heappop(self._leaves)
            node.queued = False
            parent = node.parent
            if parent is None or node.locks or node.children:
                continue
            if used != node.used:
                self._offer(node)
                continue
            del parent.children[node.key]
            node.parent = None
            self._nodes -= 1
            self._on_evict(node)
            self._free.append(node.page)
            self._offer(parent)
            return


def page_key(tokens: array[int], index: int) -> bytes:
    """The token ids of page `index` of a sequence, as bytes."""
    return tokens[index * PAGE_LEN : (index + 1) * PAGE_LEN].tobytes()


def pages_for(token_count: int) -> int:
    """Pages that hold `token_count` rows."""
    return -(-token_count // PAGE_LEN)
