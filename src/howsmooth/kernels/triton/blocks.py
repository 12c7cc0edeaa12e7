"""Block sizes, warps and pipeline depths of the fused kernels, by what fits the chip. Measured on an H200."""

from typing import Literal, NamedTuple

Name = Literal["forward", "jvp", "columns", "rows"]
Native = Literal["forward", "jvp", "columns", "rows", "hvp_rows", "hvp_columns"]


class Blocks(NamedTuple):
    """Rows and columns of a block of logits, warps of a program, depth of the pipeline."""

    rows: int
    cols: int
    warps: int
    stages: int


def pick(kernel: Name, width: int, passes: int, two: bool, causal: bool) -> Blocks:
    """width: the wider of the padded head widths.  passes: of the products.  two: probes at a time."""
    size = "256" if width > 128 else "128" if width > 64 else "64" if width > 32 else "32"
    if passes == 3:
        return _STRICT[size][kernel]
    if two:
        return _TWO[size][kernel]
    if causal and size == "64" and kernel == "jvp":
        return Blocks(64, 64, 4, 3)
    return _HALF[size][kernel]


def pick_received(width: int, passes: int) -> Blocks:
    """Blocks for column sums of `P`, which need queries and keys alone."""
    return Blocks(64, 64, 4, 1 if width > 128 or passes == 3 else 3)


def pick_native(kernel: Native, width: int, single: bool, causal: bool) -> Blocks:
    """For operands as they come. single: in float32, whose entries take as much room as two in half precision."""
    if kernel == "hvp_rows" or kernel == "hvp_columns":
        size = 2 if width > 128 else 1 if width > 64 else 0
        return (_HVP_SINGLE if single else _HVP)[kernel][size]
    if single and width > 64:
        return _SINGLE[kernel][int(width > 128)]
    if not single and 32 < width <= 64:
        return _NATIVE[kernel][int(causal)]
    return pick(kernel, width, 3 if single else 1, False, causal)


def _table(forward: Blocks, jvp: Blocks, columns: Blocks, rows: Blocks) -> dict[Name, Blocks]:
    return {"forward": forward, "jvp": jvp, "columns": columns, "rows": rows}


_HALF = {
    "32": _table(Blocks(128, 64, 4, 3), Blocks(128, 64, 4, 3), Blocks(64, 128, 4, 3), Blocks(64, 64, 4, 3)),
    "64": _table(Blocks(128, 64, 8, 3), Blocks(128, 128, 8, 3), Blocks(64, 64, 4, 3), Blocks(64, 128, 4, 3)),
    "128": _table(Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3)),
    "256": _table(Blocks(128, 64, 8, 1), Blocks(128, 64, 8, 1), Blocks(64, 64, 8, 2), Blocks(128, 64, 8, 1)),
}
_TWO = {
    "32": _table(Blocks(128, 64, 4, 3), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3)),
    "64": _table(Blocks(128, 64, 8, 3), Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(128, 64, 8, 3)),
    "128": _table(Blocks(128, 64, 8, 3), Blocks(64, 32, 4, 2), Blocks(32, 64, 4, 2), Blocks(64, 32, 4, 2)),
    "256": _table(Blocks(128, 64, 8, 1), Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 1), Blocks(64, 32, 8, 1)),
}
_STRICT = {
    "32": _table(Blocks(128, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    "64": _table(Blocks(128, 64, 8, 2), Blocks(128, 64, 8, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 4, 2)),
    "128": _table(Blocks(128, 32, 4, 1), Blocks(128, 32, 8, 1), Blocks(32, 64, 4, 1), Blocks(128, 32, 8, 1)),
    "256": _table(Blocks(64, 32, 8, 1), Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 1), Blocks(64, 32, 8, 1)),
}

# in float32, for heads up to 128 and wider: what fits into shared memory
_SINGLE = {
    "forward": (Blocks(128, 32, 4, 1), Blocks(64, 32, 8, 1)),
    "jvp": (Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1)),
    "columns": (Blocks(32, 64, 4, 1), Blocks(32, 32, 4, 1)),
    "rows": (Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1)),
}
# for heads of 64, without and with a causal mask
_NATIVE = {
    "forward": (Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 3)),
    "jvp": (Blocks(128, 128, 8, 3), Blocks(64, 64, 4, 3)),
    "columns": (Blocks(32, 128, 4, 3), Blocks(64, 64, 4, 3)),
    "rows": (Blocks(64, 128, 4, 3), Blocks(64, 128, 4, 3)),
}
# by width: up to 64, up to 128, wider
_HVP = {
    "hvp_rows": (Blocks(128, 64, 8, 3), Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 1)),
    "hvp_columns": (Blocks(64, 64, 4, 1), Blocks(32, 64, 4, 2), Blocks(32, 32, 4, 1)),
}
_HVP_SINGLE = {
    "hvp_rows": (Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)),
    "hvp_columns": (Blocks(32, 64, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1)),
}
