"""What a user would write without howsmooth."""

from collections.abc import Callable

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def power_iteration(
    f: Function, x: Tensor, truth: float, accuracy: float, seed: int = 0, limit: int = 1000
) -> tuple[float, int]:
    """Power iteration on `JᵀJ` through torch.func, stopped by an oracle as soon as it is within `accuracy` of the truth."""
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    value = 0.0
    for step in range(1, limit + 1):
        v = v / v.norm()
        u = torch.func.jvp(f, (x,), (v,))[1]
        value = u.norm().item()
        if abs(value - truth) <= accuracy * truth:
            return value, step
        v = torch.func.vjp(f, x)[1](u)[0]
    return value, limit


def scipy_svds(f: Function, x: Tensor, accuracy: float) -> tuple[float, int]:
    """ARPACK through scipy on torch.func products."""
    products = 0

    def tensor(a: np.ndarray) -> Tensor:
        return torch.from_numpy(np.asarray(a, dtype=np.float32)).reshape(x.shape)

    def jvp(v: np.ndarray) -> np.ndarray:
        nonlocal products
        products += 1
        return torch.func.jvp(f, (x,), (tensor(v),))[1].flatten().numpy()

    def vjp(u: np.ndarray) -> np.ndarray:
        return torch.func.vjp(f, x)[1](tensor(u))[0].flatten().numpy()

    operator = LinearOperator((x.numel(), x.numel()), matvec=jvp, rmatvec=vjp, dtype=np.float32)  # pyright: ignore[reportCallIssue]
    start = np.random.default_rng(0).standard_normal(x.numel()).astype(np.float32)
    values = svds(operator, k=1, tol=accuracy, v0=start, return_singular_vectors=False)  # pyright: ignore[reportArgumentType]
    return float(np.asarray(values)[0]), products


def full_jacobian(f: Function, x: Tensor) -> float:
    """The whole Jacobian by autograd, then its singular values."""
    jacobian = torch.autograd.functional.jacobian(f, x)
    assert isinstance(jacobian, Tensor)
    return torch.linalg.svdvals(jacobian.reshape(x.numel(), x.numel()))[0].item()
