"""One step of subspace iteration in several maps at once, to follow maps that change slowly.

A call has a block of output directions `U` from the call before. `JᵀU` is orthonormalised to `V`, and the left singular vectors
of `J V` are the next `U`: two block products for a value that is attained, and no wait for the device between them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from howsmooth.spectral.ritz import Block

_DEPENDENT = 1e-14  # squared length, by that of the longest, of what is in the others' span but for rounding

Products = Float[Tensor, "items times times"]  # of the directions of an item with each other


class Turned(NamedTuple):
    """value: by item, `max |J w|` over unit `w` in the span of `V`.  gain: how far the furthest may still grow, the largest
    `value/max |Jᵀu| − 1` over unit `u` in the span of `U`.  directions: the next `U`."""

    value: Float[Tensor, " items"]
    gain: Float[Tensor, ""]
    directions: Block


def block_step(back: Block, forward: Callable[[Block], Block]) -> Turned:
    """One step for every item of `back`, which is `JᵀU`; items may be rows and maps of any kind. forward: `J` on a block.

    Where something is not finite the value is NaN and the directions are zero. With one direction an item, nobody waits for
    the device.

    >>> diagonal = torch.tensor([3.0, 2.0, 1.0])
    >>> turned = block_step(torch.eye(3)[None, :2] * diagonal, lambda v: v * diagonal)
    >>> round(turned.value.item(), 6)
    3.0
    """
    v, before = spanned(back)
    image = forward(v)
    wide = image.double()
    if image.shape[1] == 1:
        value, before = wide[:, 0].norm(dim=-1), before[:, 0, 0].sqrt()
        value = torch.where(value.isfinite() & before.isfinite(), value, torch.nan)
        gain = (value / torch.where(before > 0, before, torch.inf)).nan_to_num(0.0).amax() - 1
        turned = wide * torch.where(value > 0, 1 / value, 0.0)[:, None, None]
        return Turned(value, gain, torch.where(value.isfinite()[:, None, None], turned, 0.0).to(image))
    products = torch.stack([_products(wide), before]).cpu()  # the device is waited for once
    finite = products.isfinite().all(-1).all(-1).all(0)
    squares, turn = torch.linalg.eigh(torch.where(finite[:, None, None], products, 0.0))
    tops = squares[..., -1].clamp_min(0).sqrt()
    gain = (tops[0] / torch.where(tops[1] > 0, tops[1], torch.inf)).max() - 1
    squares, turn = squares[0].flip(-1), turn[0].flip(-1).mT  # rows: from the top down
    sizes = torch.where(squares > _DEPENDENT * squares[:, :1], squares, torch.inf).sqrt()
    directions = (turn / sizes[..., None]).to(image) @ image
    if not bool(finite.all()):
        directions = torch.where(finite.to(image.device)[:, None, None], directions, 0.0)
    return Turned(torch.where(finite, tops[0], torch.nan), gain, directions)


def spanned(block: Block) -> tuple[Block, Products]:
    """An orthonormal basis of what each item's directions span, by Cholesky's factor of their products, and those.

    What depends on others to the last digits comes out shorter, never longer.

    >>> spanned(torch.tensor([[[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]]))[0].round(decimals=6).tolist()
    [[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]
    """
    wide = block.double()
    products = _products(wide)
    shift = _DEPENDENT * products.diagonal(dim1=-2, dim2=-1).sum(-1) + torch.finfo(torch.float64).tiny
    one = torch.eye(block.shape[1], dtype=wide.dtype, device=wide.device)
    factor = torch.linalg.cholesky_ex(products + shift[:, None, None] * one)[0]
    # the small factor is inverted, not solved for long directions: a GPU takes seconds to solve for a million columns
    inverse = torch.linalg.solve_triangular(factor, one.expand_as(factor), upper=False)
    return (inverse @ wide).to(block.dtype), products


def _products(block: Block) -> Products:
    """Of the directions of an item with each other. A GPU takes each with all: its matrix units starve on a few long rows."""
    if block.device.type == "cpu":
        return block @ block.mT
    return torch.stack([(block * one).sum(-1) for one in block.split(1, 1)], -1)
