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
    """The equation of a product of two tensors; nothing where a node is none, or where an axis is repeated.

    The axes that dots stand for, or those in front of matrices, are numbered from behind.
    """
    if name(n) in MATMULS:
        equation, given = "...id,...dj->...ij", n.args[:2]
    elif name(n) == "einsum":
        equation, given = str(n.args[0]).replace(" ", ""), n.args[1]
    else:
        return None
    inputs, arrow, out = equation.partition("->")
    operands, sides = tuple(m for m in given if isinstance(m, Node)), inputs.split(",")  # pyright: ignore
    if not arrow or len(operands) != 2 or len(sides) != 2:
        return None
    ranks = [len(shape(m) or ()) for m in operands]
    counts = [rank - len(side.replace("...", "")) for rank, side in zip(ranks, sides, strict=True)]
    dots = max((c for c, side in zip(counts, sides, strict=True) if "..." in side), default=0)

    def letters(side: str, count: int) -> tuple[str, ...]:
        before, found, behind = side.partition("...")
        return (*before, *(str(dots - count + i) for i in range(count if found else 0)), *behind)

    left, right, whole = letters(sides[0], counts[0]), letters(sides[1], counts[1]), letters(out, dots)
    repeated = any(len(set(side)) != len(side) for side in (left, right, whole))
    return None if repeated or [len(left), len(right)] != ranks else Equation(*operands, left=left, right=right, out=whole)
