"""Blocks of directions, (rows, times, N): what they span, and what a Jacobian makes of it."""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_DEPENDENT = 1e-14  # squared length, by that of the longest, of what is in the others' span but for rounding

Block = Float[Tensor, "rows times N"]
Products = Float[Tensor, "rows times times"]  # of the directions of a row with each other


class Turned(NamedTuple):
    """value: by row.  gain: how far the furthest may still grow.  directions: the next ones."""

    value: Float[Tensor, " rows"]
    gain: Float[Tensor, ""]
    directions: Block


def basis(block: Block) -> tuple[Block, Products]:
    """An orthonormal basis of what each row's directions span, by Cholesky's factor of their products, and those.

    What depends on others to the last digits comes out shorter, never longer.

    >>> basis(torch.tensor([[[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]]))[0].round(decimals=6).tolist()
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


def ritz(pulled: Products, image: Block) -> Turned:
    """What the inner products of `JᵀU`, and `J V` for an orthonormal `V` in its span, say of the norm of `J`.

    The value is `max |J w|` over unit `w` in the span of `V`; the gain `value/max |Jᵀu| − 1` over `u` in that of `U`. The left
    singular vectors of `J V` are the next `U`. Where something is not finite the value is NaN and the directions are zero.
    With one direction a row, nobody waits for the device.

    >>> diagonal = torch.tensor([3.0, 2.0, 1.0])
    >>> v, products = basis(torch.eye(3)[None, :2] * diagonal)
    >>> round(ritz(products, v * diagonal).value.item(), 6)
    3.0
    """
    wide = image.double()
    if image.shape[1] == 1:
        value, before = wide[:, 0].norm(dim=-1), pulled[:, 0, 0].sqrt()
        value = torch.where(value.isfinite() & before.isfinite(), value, torch.nan)
        gain = (value / torch.where(before > 0, before, torch.inf)).nan_to_num(0.0).amax() - 1
        turned = wide * torch.where(value > 0, 1 / value, 0.0)[:, None, None]
        return Turned(value, gain, torch.where(value.isfinite()[:, None, None], turned, 0.0).to(image))
    products: Any = torch.stack([_products(wide), pulled]).numpy(force=True)  # the device is waited for once
    finite = np.isfinite(products).all((0, 2, 3))
    squares, turn = np.linalg.eigh(np.where(finite[:, None, None], products, 0.0))
    tops, turn = np.sqrt(squares[..., -1].clip(0)), turn[0, :, :, ::-1].swapaxes(-2, -1)  # rows: from the top down
    gain = (tops[0] / np.where(tops[1] > 0, tops[1], np.inf)).max() - 1
    squares = squares[0, :, ::-1]
    sizes = np.sqrt(np.where(squares > _DEPENDENT * squares[:, :1], squares, np.inf))
    turned = torch.from_numpy(turn / sizes[..., None]).to(image) @ image
    if not finite.all():
        turned = torch.where(torch.from_numpy(finite).to(image.device)[:, None, None], turned, 0.0)
    return Turned(torch.from_numpy(np.where(finite, tops[0], np.nan)), torch.tensor(gain), turned)


def _products(block: Block) -> Products:
    """Of the directions of a row with each other. A GPU takes each with all: its matrix units starve on a few long rows."""
    if block.device.type == "cpu":
        return block @ block.mT
    return torch.stack([(block * one).sum(-1) for one in block.split(1, 1)], -1)


def orthonormal(block: Block) -> Block:
    """Orthonormal vectors with the same span, the first one first; what depends on others gets lost.

    >>> orthonormal(torch.tensor([[[0.0, 2.0], [1.0, 1.0]]])).tolist()
    [[[0.0, 1.0], [1.0, 0.0]]]
    """
    done: list[Tensor] = []
    for v in block.double().unbind(-2):
        size = v.norm(dim=-1, keepdim=True)
        for _ in range(2):
            for q in done:
                v = v - (v * q).sum(-1, keepdim=True) * q
        left = v.norm(dim=-1, keepdim=True)
        done.append(torch.where(left > 1e-12 * size, v / torch.where(left > 0, left, 1.0), 0.0))
    return torch.stack(done, -2).to(block.dtype)
