"""Blocks of directions, (rows, times, N): what they span, and what a Jacobian makes of it."""

from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

_DEPENDENT = 1e-14  # squared length, by that of the longest, of what is in the others' span but for rounding

Block = Float[Tensor, "rows times N"]


class Turned(NamedTuple):
    """value: by row.  gain: how far the furthest may still grow.  directions: the next ones."""

    value: Float[Tensor, " rows"]
    gain: float
    directions: Block


def basis(block: Block) -> Block:
    """An orthonormal basis of what each row's directions span, by Cholesky's factor of their products.

    What depends on others to the last digits comes out shorter, never longer.

    >>> basis(torch.tensor([[[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]]])).round(decimals=6).tolist()
    [[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]]
    """
    wide = block.double()
    products = wide @ wide.mT
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    diagonal += _DEPENDENT * diagonal.sum(-1, keepdim=True) + torch.finfo(torch.float64).tiny
    factor = torch.linalg.cholesky_ex(products)[0]
    return torch.linalg.solve_triangular(factor, wide, upper=False).to(block.dtype)


def ritz(pulled: Block, v: Block, image: Block) -> Turned:
    """What `JᵀU`, `V` that is orthonormal in its span, and `J V` say of the norm of `J`.

    The value is `max |J w|/|w|` over `w` in the span of `V`; the gain `value/max |Jᵀu| − 1` over `u` in that of `U`. The left
    singular vectors of `J V` are the next `U`. Where something is not finite the value is NaN and the directions are zero.

    >>> diagonal = torch.tensor([3.0, 2.0, 1.0])
    >>> v = torch.eye(3)[None, :2]
    >>> ritz(v * diagonal, v, v * diagonal).value.tolist()
    [3.0]
    """
    wide = torch.stack([image, v, pulled]).double()
    products: Any = (wide @ wide.mT).numpy(force=True)  # the device is waited for once; what follows is tiny
    finite = np.isfinite(products).all((0, 2, 3))
    products = np.where(finite[:, None, None], products, 0.0)
    squares, turn = np.linalg.eigh(products[::2])  # ascending, of `J V` and `JᵀU`
    squares, turn = squares[..., ::-1].clip(0), turn[0, :, :, ::-1].swapaxes(-2, -1)  # rows: from the top Ritz vector down
    length = (turn[:, 0] * (products[1] @ turn[:, 0, :, None])[..., 0]).sum(-1)
    value = np.sqrt(squares[0, :, 0] / np.where(length > 0, length, 1.0))
    before = np.sqrt(squares[1, :, 0])
    gain = np.where(before > 0, value / np.where(before > 0, before, 1.0) - 1, 0.0).max()
    sizes = np.sqrt(np.where(squares[0] > _DEPENDENT * squares[0, :, :1], squares[0], np.inf))
    turn = torch.from_numpy(np.ascontiguousarray(turn / sizes[..., None])).to(image)
    image = image if finite.all() else torch.where(torch.from_numpy(finite).to(image.device)[:, None, None], image, 0.0)
    return Turned(torch.from_numpy(np.where(finite, value, np.nan)), float(gain), turn @ image)


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
