"""Arguments that nobody should pass: wrong types, numbers at the ends, tensors of every kind that torch has."""

import math
import random
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import howsmooth as hs

NAN, INF = math.nan, math.inf


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    """Three tokens of width four."""
    return torch.linspace(-1, 1, 12, dtype=dtype).reshape(3, 4)


def _fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3, 4)


def _with(entry: float, dtype: torch.dtype = torch.float32) -> Tensor:
    t = tokens(dtype)
    t[0, 1] = entry
    return t


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    **{repr(b): lambda b=b: b for b in (True, False)},
    **{str(k): lambda k=k: k for k in (0, 1, 2, 3, -1, -(10**30), 2**31, 2**63, 10**18)},
    "10**400": lambda: 10**400,
    "10**9999": lambda: 10**9999,
    **{str(r): lambda r=r: r for r in (0.0, -0.0, 0.5, 2.5, -1.5, 3.0, 1e-3, 1e-320, 1e-16, 1e200, 1e308, NAN, INF, -INF)},
    "complex": lambda: 1 + 1j,
    "Fraction": lambda: Fraction(1, 3),
    "Decimal": lambda: Decimal("0.1"),
    "np.int64": lambda: np.int64(1),
    "np.uint8": lambda: np.uint8(2),
    "np.float32": lambda: np.float32(0.5),
    "np.float64 nan": lambda: np.float64(NAN),
    "np.bool": lambda: np.True_,
    "np 0-d": lambda: np.array(1.0),
    "np vector": lambda: np.array([1, 2]),
    "np matrix": lambda: np.zeros((3, 4)),
    "np strings": lambda: np.array(["a"]),
    **{repr(s): lambda s=s: s for s in ("", "a", "False", "dense", "cpu", "cuda:99", "\0", "\n", "~nouser/x", "../..")},
    "lone surrogate": lambda: "a \ud800 b",
    "long text": lambda: "x" * 5000,
    "bytes": lambda: b"text",
    "[]": list,
    "[1]": lambda: [1],
    "[0, 1]": lambda: [0, 1],
    "[-1, 2]": lambda: [-1, 2],
    "[2.5]": lambda: [2.5],
    "['a']": lambda: ["a"],
    "[[1, [2]]]": lambda: [[1, [2]]],
    "[None]": lambda: [None],
    "[nan]": lambda: [NAN],
    "[True]": lambda: [True],
    "[huge]": lambda: [10**30],
    "()": tuple,
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "set": lambda: {1, 2},
    "range": lambda: range(3),
    "iterator": lambda: iter([1]),
    "object": object,
    "type": lambda: hs.Measure,
    "function": lambda: lambda x: x,
    "dtype": lambda: torch.float32,
    "int dtype": lambda: torch.int64,
    "float8 dtype": lambda: torch.float8_e5m2,
    "meta device": lambda: torch.device("meta"),
    "module": lambda: nn.Linear(4, 4),
    "Attention": lambda: hs.Attention(torch.eye(4), torch.eye(4), torch.eye(4)),
    "Measure": lambda: hs.Measure(tokens()),
    "LayerNorm": lambda: hs.LayerNorm(torch.ones(4)),
    "Estimate": lambda: hs.lipschitz(torch.sin, torch.ones(2)),
}

TENSORS: dict[str, Callable[[], Tensor]] = {
    "sparse": lambda: tokens().to_sparse(),
    "csr": lambda: tokens().to_sparse_csr(),
    "csc": lambda: tokens().to_sparse_csc(),
    "mkldnn": lambda: tokens().to_mkldnn(),
    "meta": lambda: tokens().to("meta"),
    "nested": lambda: torch.nested.nested_tensor([tokens()[0], tokens()[1, :2]]),
    "jagged": lambda: torch.nested.nested_tensor([tokens(), tokens()[:2]], layout=torch.jagged),
    "fake": _fake,
    "masked": lambda: torch.masked.masked_tensor(tokens(), tokens() > 0),
    "lazy": lambda: nn.LazyLinear(2).weight,
    "float8": lambda: tokens().to(torch.float8_e4m3fn),
    "quantised": lambda: torch.quantize_per_tensor(tokens(), 0.1, 0, torch.quint8),
    "complex": lambda: tokens() + 0j,
    "conjugate part": lambda: torch.complex(tokens(), tokens()).conj().imag,
    "half": lambda: tokens().half(),
    "bfloat16": lambda: tokens().bfloat16(),
    "float64": lambda: tokens(torch.float64),
    "integers": lambda: tokens().long(),
    "bools": lambda: tokens() > 0,
    "uint8": lambda: tokens().to(torch.uint8),
    "parameter": lambda: nn.Parameter(tokens()),
    "requires grad": lambda: tokens().requires_grad_(),
    "of a graph": lambda: tokens().requires_grad_() * 2,
    "expanded": lambda: torch.ones(1, 4).expand(3, 4),
    "strided": lambda: torch.linspace(-1, 1, 48).reshape(6, 8)[::2, ::2],
    "no rows": lambda: torch.zeros(0, 4),
    "no columns": lambda: torch.zeros(3, 0),
    "one number": lambda: torch.tensor(0.5),
    "one whole number": lambda: torch.tensor(1),
    "vector": lambda: torch.ones(4),
    "three axes": lambda: tokens()[None],
    "square": lambda: torch.eye(4),
    "wide": lambda: torch.ones(3, 5),
    "nan": lambda: _with(NAN),
    "inf": lambda: _with(INF),
    "huge": lambda: tokens(torch.float64) * 1e300,
    "huge float32": lambda: tokens() * 1e38,
    "tiny": lambda: tokens(torch.float64) * 1e-300,
    "subnormal": lambda: tokens() * 1e-42,
    "zero": lambda: torch.zeros(3, 4),
    "one huge": lambda: _with(1e150, torch.float64),
}


def stretched(value: Any, choose: random.Random) -> Any:
    """A value of the same kind that somebody might pass: another size, precision or layout, numpy's instead of Python's."""
    if isinstance(value, Tensor) and value.is_floating_point():
        dtype = choose.choice((torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float64))
        most = math.log10(torch.finfo(dtype).max) * choose.choice((0.02, 0.02, 0.2, 0.5, 0.95))
        t = torch.randn(value.shape, generator=torch.Generator().manual_seed(choose.randrange(2**32)), dtype=torch.float64)
        t = t * 10 ** choose.uniform(-most, most)
        if choose.random() < 0.2:
            t.view(-1)[choose.randrange(t.numel())] *= 10 ** choose.uniform(0, most)
        if choose.random() < 0.1:
            t = t[..., :1].expand(t.shape)
        t = t.to(dtype)
        return choose.choice((t, t, nn.Parameter(t), t.mT.contiguous().mT if t.ndim > 1 else t))
    if isinstance(value, bool):
        return choose.choice((True, False, np.True_, np.False_))
    if isinstance(value, int):
        return choose.choice((np.int64(value), np.uint16(value), value + 1, value + 2))
    if isinstance(value, float):
        return choose.choice((np.float32, np.float64, float))(value * 10 ** choose.uniform(-3, 3))
    if isinstance(value, list) and all(isinstance(v, int) for v in value):
        return choose.choice((tuple, np.array, iter, torch.tensor))(value)
    return value


def draw(name: str) -> Any:
    """A fresh value by its name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, on kinds of tensors that it calls prototypes
        return (VALUES | TENSORS)[name]()


NAMES = (*VALUES, *TENSORS)
