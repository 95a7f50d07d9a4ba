"""Replay of CUDA's caching allocator with expandable segments: the bytes it reserves for the storages of a simulated step.

The rules of the allocator: it rounds sizes up to 512 bytes. Blocks of up to 1 MiB have a separate pool, and each stream has
its own pools. An allocation takes the smallest free block that is large enough, and splits it. Free neighbours are joined.
A segment grows in steps of 2 MiB. The replay was compared only with what others published (docs/development/published.md).
"""

from collections.abc import Sequence

from recipe_tools.plan.ledger import HOST, Event

SMALL, PAGE, ROUND = 2**20, 2 * 2**20, 512


class Segment:
    """Blocks of a pool in order of their addresses; each block is [size, is used]."""

    def __init__(self):
        self.blocks: list[list] = []

    def take(self, size: int) -> tuple[list, int]:
        """Use the best free block; return it, and the bytes by which the segment grew."""
        fitting = [(block[0], i) for i, block in enumerate(self.blocks) if not block[1] and block[0] >= size]
        grown = 0
        # Best fit: the smallest block that is large enough. Without one, the last block is extended to the needed size.
        if not fitting:
            if not self.blocks or self.blocks[-1][1]:
                self.blocks.append([0, False])
            grown = -(-(size - self.blocks[-1][0]) // PAGE) * PAGE
            self.blocks[-1][0] += grown
        at = min(fitting)[1] if fitting else len(self.blocks) - 1
        block = self.blocks[at]
        if (rest := block[0] - size) >= ROUND:
            self.blocks.insert(at + 1, [rest, False])
            block[0] = size
        block[1] = True
        return block, grown

    def free(self, block: list) -> None:
        block[1] = False
        at = next(i for i, other in enumerate(self.blocks) if other is block)
        for neighbour in (at + 1, at - 1):
            if 0 <= neighbour < len(self.blocks) and not self.blocks[neighbour][1]:
                block[0] += self.blocks.pop(neighbour)[0]


def reserved(events: Sequence[Event]) -> int:
    """Return the bytes that the allocator holds in the end."""
    pools: dict[tuple[int, bool], Segment] = {}
    where: dict[int, tuple[int, Segment, list]] = {}  # size and place of each storage
    total = 0
    for event in events:
        size = 0 if event.kind == HOST else -(-event.size // ROUND) * ROUND
        if event.key in where:
            old, segment, block = where[event.key]
            if size == old:
                continue
            segment.free(block)
            del where[event.key]
        if size:
            segment = pools.setdefault((event.stream, size <= SMALL), Segment())
            block, grown = segment.take(size)
            total += grown
            where[event.key] = size, segment, block
    return total
