"""Products of two tensors as equations: a letter for each axis of both operands and of what comes out."""

from dataclasses import dataclass

from torch.fx import Node

from howsmooth.program.nodes import name, shape

MATMULS = {"matmul", "bmm", "mm", "linalg_matmul"}


@dataclass(frozen=True)
class Equation:
    """A product `a, b -> out`: its operands, and the letters of their axes and of its own."""

    a: Node
    b: Node
    left: tuple[str, ...]
    right: tuple[str, ...]
    out: tuple[str, ...]

    def turned(self) -> "Equation":
        """The same with its operands in the other order."""
        return Equation(self.b, self.a, self.right, self.left, self.out)

    def size(self, letter: str) -> int:
        """The length of an axis, which one operand may broadcast."""
        sides = ((self.a, self.left), (self.b, self.right))
        return max((shape(n) or ())[letters.index(letter)] for n, letters in sides if letter in letters)


def equation_of(n: Node) -> Equation | None:
    """The equation of a product of two tensors; nothing where a node is none, or where an axis is repeated."""
    if name(n) == "einsum" and isinstance(n.args[1], list | tuple) and len(n.args[1]) == 2:
        a, b = n.args[1]
        return _einsum(str(n.args[0]), a, b) if isinstance(a, Node) and isinstance(b, Node) else None
    if name(n) not in MATMULS:
        return None
    a, b = n.args[:2]
    if not isinstance(a, Node) or not isinstance(b, Node):
        return None
    rank_a, rank_b = len(shape(a) or ()), len(shape(b) or ())
    if min(rank_a, rank_b) < 2:
        return None
    lead = tuple(str(i) for i in range(max(rank_a, rank_b) - 2))
    front_a, front_b = (lead[len(lead) - rank + 2 :] for rank in (rank_a, rank_b))
    return Equation(a, b, (*front_a, "i", "d"), (*front_b, "d", "j"), (*lead, "i", "j"))


def _einsum(equation: str, a: Node, b: Node) -> Equation | None:
    """The letters of an equation, the axes that dots stand for numbered from behind."""
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    if not arrow or not comma or "," in right:
        return None
    counts = [len(shape(n) or ()) - len(side.replace("...", "")) for n, side in ((a, left), (b, right))]
    dots = max((c for c, side in zip(counts, (left, right), strict=True) if "..." in side), default=0)

    def letters(side: str, count: int) -> tuple[str, ...]:
        before, found, behind = side.partition("...")
        return (*before, *(str(dots - count + i) for i in range(count if found else 0)), *behind)

    sides = letters(left, counts[0]), letters(right, counts[1]), letters(out, dots)
    repeated = any(len(set(side)) != len(side) for side in sides)
    fits = len(sides[0]) == len(shape(a) or ()) and len(sides[1]) == len(shape(b) or ())
    return None if repeated or not fits else Equation(a, b, *sides)
