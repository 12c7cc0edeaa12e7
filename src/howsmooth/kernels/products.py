"""How exact torch's own float32 matrix products are on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_products(*, coarse: bool = False) -> Iterator[None]:
    """Inside it, matrix products in float32 on a GPU keep all bits of their operands; coarse: eleven of them, which tensor
    cores take about seven times as fast. Whatever torch was told before holds again afterwards.

    >>> with float32_products(coarse=True):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).tolist()
    [[2.0, 2.0], [2.0, 2.0]]
    """
    if not torch.cuda.is_initialized():
        yield
        return
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    try:
        before, mixed = torch.get_float32_matmul_precision(), False
    except RuntimeError:  # set under torch's newer names only, in a way that its older ones refuse to read
        before, mixed = "highest", True
    torch.set_float32_matmul_precision("high" if coarse else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        if mixed:
            torch.backends.cuda.matmul.fp32_precision = newer


def whole_float32() -> bool:
    """Whether torch was told that matrix products in float32 keep all bits of their operands, as they do by default.

    >>> whole_float32()
    True
    """
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # set under torch's newer names only
        return torch.backends.cuda.matmul.fp32_precision != "tf32"
