"""Page tables of sequences: what each one holds of the KV pool, from its admission to its end.

    begin    the pages of a cached prefix, locked in the tree
    advance  pages that no further row of the sequence sees go back, once a plan is issued (groups with a window)
    grow     pages for the next rows
    share    full pages enter the prefix tree
    release  everything goes back, what is worth it into the tree

A sequence has one table for each KV group, all equally long: entry i holds positions [16 i, 16 i + 16), NO_PAGE where
the group does not keep them for this sequence any more (`Sequence.kept` is the first entry that it holds). Entry i is
the tree's where `chain[i]` has that very page, else the sequence's alone.

*Anchors* are the places of a sequence where somebody else may want to go on: the end of what it shares with the tree,
and the end of its prompt. The window before an anchor, like the one before its end, is kept as long as any cached page;
what else lies before a window is the first to be used again, so that a long prompt does not cost others their windows.

Pages go back at once, without waiting for the plans in flight that name them: ranks run plans in order, so whoever gets
the page writes it in a later plan, or in the plan whose rows do not see it any more. Only the end of a sequence waits
(`scheduler`), because its lane goes with it.

Pure.
"""

from __future__ import annotations

from backends.base import PAGE_LEN
from homeserve.engine.pages import NO_PAGE, Node, PagePool, page_key, pages_for
from homeserve.engine.sequence import Sequence
from homeserve.wire.records import pack_ints


class PageTables:
    """The tables of all sequences over one pool."""

    def __init__(self, pool: PagePool, *, shared: bool) -> None:
        self._pool = pool
        self._shared = shared
        """Full pages enter the prefix tree."""
        self._groups = len(pool.windows)

    def begin(self, sequence: Sequence, path: list[Node], known: int) -> None:
        """Hold a cached prefix: all of it in group 0, the window before its end in the others. `known` pages of the
        prompt are in the tree, more than those of the path where windows are gone."""
        start = len(path) * PAGE_LEN
        sequence.anchors = (known, sequence.prompt_len // PAGE_LEN)
        sequence.chain = list(path)
        sequence.tables = []
        sequence.kept = [self._pool.first_seen(group, start) for group in range(self._groups)]
        for group, first in enumerate(sequence.kept):
            for node in path[first:]:
                self._pool.lock(node, group)
            sequence.tables.append([NO_PAGE] * first + [node.pages[group] for node in path[first:]])

    def advance(self, sequence: Sequence) -> None:
        """Let go of what the next row, at position `issued`, does not see."""
        for group in range(1, self._groups):
            table, first = sequence.tables[group], self._pool.first_seen(group, sequence.issued)
            for index in range(sequence.kept[group], first):
                self._give_up(sequence, group, index, keep=self._is_before_anchor(sequence, group, index))
                table[index] = NO_PAGE
            sequence.kept[group] = max(sequence.kept[group], first)

    def grow(self, sequence: Sequence, token_count: int) -> bool:
        """Let the tables cover `token_count` rows; False, and nothing changed, where no pages are left."""
        need = pages_for(token_count) - len(sequence.tables[0])
        if need <= 0:
            return True
        taken = self._pool.take(need)
        if taken is None:
            return False
        for table, pages in zip(sequence.tables, taken, strict=True):
            table.extend(pages)
        return True

    def covered(self, sequence: Sequence) -> int:
        """Rows that the tables cover."""
        return len(sequence.tables[0]) * PAGE_LEN

    def room(self, sequence: Sequence) -> int:
        """Rows that the tables could cover without taking anything from another sequence."""
        return (len(sequence.tables[0]) + self._pool.room) * PAGE_LEN

    def fits(self, target: int, path: list[Node], chunk: int, others: int) -> bool:
        """Whether a newcomer of `target` tokens behind `path` finds room, one page being left to each of the `others`:
        without, it would be preempted at once. In a group with a window nobody grows: it needs room for the window and
        a chunk, less what the path brings, and the others have theirs."""
        for group, window in enumerate(self._pool.windows):
            first = self._pool.first_seen(group, len(path) * PAGE_LEN)
            need = pages_for(target + 1) - len(path)
            if window:
                need = min(need, pages_for(window + chunk) + 1 - (len(path) - first))
            else:
                need += others
            locking = sum(node.locks[group] == 0 for node in path[first:])
            if need > self._pool.available(group) - locking:
                return False
        return True

    def unsent(self, sequence: Sequence) -> bytes:
        """The entries that the ranks do not know yet, `[groups, n]` as int32 bytes; from now on they do."""
        first, sequence.sent_pages = sequence.sent_pages, len(sequence.tables[0])
        if first == sequence.sent_pages:
            return b""
        return pack_ints([page for table in sequence.tables for page in table[first:]])

    def share(self, sequence: Sequence, *, leaving: bool = False) -> None:
        """Enter the full pages into the prefix tree, as far as their tokens are known and their rows issued.

        Where another sequence computed the same page meanwhile, a running sequence stops sharing: locking that page
        beside its own would make it hold two pages for one, and one alone could outgrow the pool. One that is leaving
        goes on, since it gives its double back at once, and fills gaps of the node with what it has.
        """
        if not self._shared:
            return
        full = min(sequence.issued, len(sequence.tokens)) // PAGE_LEN
        chain = sequence.chain
        while len(chain) < full:
            index = len(chain)
            pages = [table[index] for table in sequence.tables]
            node = self._pool.insert(chain[-1] if chain else self._pool.root, page_key(sequence.tokens, index), pages)
            if node.pages[0] != pages[0] and not leaving:
                return
            self._pool.lock(node)
            for group in range(1, self._groups):
                if pages[group] == NO_PAGE:
                    continue
                if node.pages[group] == NO_PAGE:
                    self._pool.adopt(node, group, pages[group])
                if node.pages[group] == pages[group]:
                    self._pool.lock(node, group)
            chain.append(node)

    def release(self, sequence: Sequence) -> None:
        """Give everything back. Nothing in flight names the sequence, and it has shared what it could, `leaving`."""
        chain = sequence.chain
        for group in range(1, self._groups):
            for index in reversed(range(sequence.kept[group], len(sequence.tables[group]))):
                self._give_up(sequence, group, index)
        own = [page for i, page in enumerate(sequence.tables[0]) if i >= len(chain) or chain[i].pages[0] != page]
        self._pool.unlock(chain)
        self._pool.give_back(0, own)

    def _is_before_anchor(self, sequence: Sequence, group: int, index: int) -> bool:
        """Whether a row at one of the anchors would see the page."""
        return any(self._pool.first_seen(group, at * PAGE_LEN) <= index < at for at in sequence.anchors)

    def _give_up(self, sequence: Sequence, group: int, index: int, *, keep: bool = True) -> None:
        """One entry of a group with a window: back to the tree, to be kept there or to be used again first, or to the
        free list. What is to be kept fills the gap of a node that another sequence made."""
        page = sequence.tables[group][index]
        node = sequence.chain[index] if index < len(sequence.chain) else None
        if node is None and keep and self._shared:
            path = self._pool.match(sequence.tokens, index + 1)
            if len(path) == index + 1 and path[index].pages[group] == NO_PAGE:
                node = path[index]
                self._pool.adopt(node, group, page)
                self._pool.lock(node, group)
        if node is not None and node.pages[group] == page:
            self._pool.unlock([node], group, first=not keep)
        else:
            self._pool.give_back(group, [page])
