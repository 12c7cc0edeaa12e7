"""One jvp + vjp pair on a GPU, 12 heads × 64: ours against what else gives one, and against the chip's own rate.

Every product is first compared with float64 (up to 16 384 tokens) or with our strict products, which are; nothing is timed
before. `jvp_flash_attention` is timed where it can be imported.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import WrongAnswerError
from howsmooth.kernels import AttentionKernel, Blocked, Mask, Scores
from howsmooth.kernels.triton import Fused

TITLE = "One jvp + vjp pair on a GPU (12 heads × 64)"
HEADS, WIDTH = 12, 64
FLOAT64_UP_TO = 16_384
ERROR = 1e-3


def run(quick: bool) -> list[dict[str, Any]]:
    rate = _matmul_rate(torch.float16)
    rival = _rival()
    rows = []
    for n in (1024, 4096) if quick else (1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072):
        for causal in (False, True):
            rows.append(_row(n, causal, rate, rival))
            torch.cuda.empty_cache()
    return rows


@torch.no_grad()
def _row(n: int, causal: bool, rate: float, rival: Any) -> dict[str, Any]:
    random = torch.Generator("cuda").manual_seed(n)
    normal = partial(torch.randn, 1, HEADS, n, WIDTH, generator=random, device="cuda")
    q, k, v, dq, dk, dv, g = (normal() for _ in range(7))
    scores = Scores(WIDTH**-0.5, mask=Mask(causal=causal))
    ours = Fused(q, k, v, scores)
    errors = _errors(ours, (dq, dk, dv), g, Blocked if n <= FLOAT64_UP_TO else None)
    if not max(errors) <= ERROR:
        raise WrongAnswerError(f"n = {n}: expected products within {ERROR:g}, got {max(errors):.1e}; no time is reported")

    def pair(dq: Tensor = dq, dk: Tensor = dk, dv: Tensor = dv, g: Tensor = g) -> None:
        ours.jvp(dq[None], dk[None], dv[None])
        ours.vjp(g[None])

    ms, peak = milliseconds(pair)
    products = (5 if causal else 10) * 2 * HEADS * WIDTH * n**2
    row = {
        "n": n,
        "mask": "causal" if causal else "full",
        "error": max(errors),
        "ours ms": ms,
        "TFLOP/s": products / ms / 1e9,
        "of matmul": products / ms / 1e9 / rate,
        "peak GiB": peak,
        "vjp ms": milliseconds(lambda: ours.vjp(g[None]))[0],
        "flash vjp ms": _flash_backward(q, k, v, g, causal),
    }
    del ours
    plain, plain_peak = _through_func(partial(_attend, causal=causal), (q, k, v), (dq, dk, dv), g, n <= 16_384)
    row |= {"torch.func ms": plain, "torch.func GiB": plain_peak, "torch.func/ours": ratio(plain, ms)}
    for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32)):
        cast = [t.to(dtype) for t in (q, k, v, dq, dk, dv, g)]
        time = "–"
        if rival is not None and n <= 65_536:
            f = partial(rival.fwd_dual, causal=causal)
            time = _through_func(f, tuple(cast[:3]), tuple(cast[3:6]), cast[6], True)[0]
        row |= {f"peer {name} ms": time, f"peer {name}/ours": ratio(time, ms)}
    return row


def _errors(
    ours: Fused, tangent: tuple[Tensor, Tensor, Tensor], g: Tensor, reference: type[Blocked] | None
) -> tuple[float, ...]:
    truth: AttentionKernel | None
    if reference is not None:
        q, k, v = (t.double() for t in ours.inputs)
        truth = reference(q, k, v, ours.scores)
    else:
        finer = ours.refined()
        truth = finer and finer.refined()
    assert truth is not None
    exact = truth.output.dtype
    pairs = [(ours.jvp(*(t[None] for t in tangent)), truth.jvp(*(t.to(exact)[None] for t in tangent)))]
    pairs += zip(ours.vjp(g[None]), truth.vjp(g.to(exact)[None]), strict=True)
    return tuple(float((a - b).norm() / b.norm()) for a, b in pairs)


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    s = q @ k.mT * WIDTH**-0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), -torch.inf)
    return torch.softmax(s, -1) @ v


def _through_func(
    f: Callable[..., Tensor], at: tuple[Tensor, ...], tangent: tuple[Tensor, ...], g: Tensor, fits: bool
) -> tuple[Any, Any]:
    """Time and memory of a pair through torch.func."""
    if not fits:
        return "does not fit", "–"

    def pair() -> None:
        torch.func.jvp(f, at, tangent)
        torch.func.vjp(f, *at)[1](g)

    try:
        return milliseconds(pair)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        torch.cuda.empty_cache()
        return type(error).__name__, "–"


def _flash_backward(q: Tensor, k: Tensor, v: Tensor, g: Tensor, causal: bool) -> float:
    """torch's fused backward pass in half precision: the ceiling for a vjp alone."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        inputs = [t.to(torch.float16).requires_grad_() for t in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], is_causal=causal)
        return milliseconds(lambda: torch.autograd.grad(out, inputs, g.to(torch.float16), retain_graph=True))[0]


def _matmul_rate(dtype: torch.dtype) -> float:
    a = torch.randn(8192, 8192, device="cuda", dtype=dtype)
    return 2 * 8192**3 / milliseconds(lambda: a @ a, 20)[0] / 1e9


def milliseconds(run: Callable[[], object], repeat: int = 5) -> tuple[float, float]:
    """Median time by device events after a warm-up, and the peak of memory above what was there."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(repeat):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[repeat // 2], (torch.cuda.max_memory_allocated() - before) / 2**30


def ratio(other: Any, ours: float) -> Any:
    return other / ours if isinstance(other, float) else "–"


def _rival() -> Any:
    try:
        return importlib.import_module("jvp_flash_attention.jvp_attention").JVPAttn
    except ImportError:
        return None
