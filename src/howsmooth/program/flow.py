"""What depends on what in a recorded run: sets of nodes as bits, so that unions cost little."""

import functools
from collections.abc import Iterable, Sequence

from torch.fx import Node

from howsmooth.program.operations import reads
from howsmooth.program.tracing import Program


class Flow:
    """The nodes of a program that depend on some `begins`, and how.

    A node is live where a begin reaches it through floating-point tensors; all others stay as they are while an input moves.
    """

    def __init__(self, program: Program, begins: Iterable[Node]):
        self.program, self.nodes = program, program.nodes
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.begins = tuple(dict.fromkeys(begins))
        first = {self.index[n] for n in self.begins}
        self._up: list[int] = []
        for i, (n, read) in enumerate(zip(self.nodes, program.reads, strict=True)):
            bits = 1 << i if i in first else 0
            if not bits and n.op != "output":
                for m in read:
                    bits |= self._up[self.index[m]]
                bits |= (1 << i) * bool(bits)
            self._up.append(bits)

    @functools.cached_property
    def _down(self) -> list[int]:
        down = [0] * len(self.nodes)
        for i in reversed(range(len(self.nodes))):
            if self._up[i]:
                down[i] |= 1 << i
                for m in self.feeds(self.nodes[i]):
                    down[self.index[m]] |= down[i]
        return down

    def live(self, n: Node) -> bool:
        """Whether a begin reaches a node."""
        return bool(self._up[self.index[n]])

    def feeds(self, n: Node) -> list[Node]:
        """The live nodes that a node reads."""
        return [] if n in self.begins else [m for m in reads(n) if self._up[self.index[m]]]

    def only(self, n: Node) -> Node | None:
        """The only live node that a node reads; nothing where there are more, or none."""
        feeds = self.feeds(n)
        return feeds[0] if len(feeds) == 1 else None

    def users(self, n: Node) -> list[Node]:
        """The live nodes that read a node."""
        return [u for u in n.users if self.live(u)]

    def up(self, *nodes: Node) -> int:
        """The live nodes that some of these depend on, themselves among them, as bits."""
        bits = 0
        for n in nodes:
            bits |= self._up[self.index[n]]
        return bits

    def down(self, *nodes: Node) -> int:
        """The live nodes that depend on some of these, themselves among them, as bits."""
        bits = 0
        for n in nodes:
            bits |= self._down[self.index[n]]
        return bits

    def bit(self, n: Node) -> int:
        """A node as bits."""
        return 1 << self.index[n]

    def bits(self, nodes: Iterable[Node]) -> int:
        """Some nodes as bits."""
        return sum(1 << i for i in {self.index[n] for n in nodes})

    def unpack(self, bits: int) -> list[Node]:
        """The nodes of some bits, in order."""
        found: list[Node] = []
        while bits:
            low = bits & -bits
            found.append(self.nodes[low.bit_length() - 1])
            bits ^= low
        return found

    def between(self, starts: Sequence[Node], ends: Sequence[Node]) -> list[Node]:
        """The nodes on the ways from some nodes to others, without the starts."""
        return self.unpack(self.down(*starts) & self.up(*ends) & ~self.bits(starts))

    @functools.cached_property
    def outputs(self) -> tuple[Node, ...]:
        """The returned tensors that are live."""
        return tuple(dict.fromkeys(n for n in self.program.outputs if self.live(n)))

    def waists(self, ends: Sequence[Node]) -> list[Node]:
        """The nodes that every way from the begins to `ends` goes through, in order."""
        need = self.up(*ends)
        return self._narrow(need, [b for b in self.begins if need & self.bit(b)], ends)

    def after(self, starts: Sequence[Node], ends: Sequence[Node]) -> list[Node]:
        """The nodes that every way from `starts` to `ends` goes through, in order, the starts left out."""
        found = self._narrow(self.down(*starts) & self.up(*ends), starts, ends)
        return [n for n in found if n not in starts]

    def _narrow(self, need: int, starts: Sequence[Node], ends: Sequence[Node]) -> list[Node]:
        """The nodes of some bits that no edge among them jumps over."""
        far = len(self.nodes)
        last = max((self.index[e] for e in ends if need & self.bit(e)), default=far)
        reach = max((self.index[s] for s in starts), default=far)
        found: list[Node] = []
        for n in self.unpack(need):
            i = self.index[n]
            if i >= reach:
                found.append(n)
            if n in ends and i < last:
                break
            reach = max([reach, *(self.index[u] for u in n.users if u.op != "output" and need & self.bit(u))])
        return found
