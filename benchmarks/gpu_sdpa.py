"""`hs.sdpa` on a GPU: a pair of a jvp and a vjp against the one package that has them, a MeanFlow step, and HVPs.

Answers are compared with float64 before anything is timed. `jvp_flash_attention` is timed where it can be imported. Times are
those of calls as they come, with the host's part of them, and "replayed" of the same as one CUDA graph, without it.
"""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import howsmooth as hs
from benchmarks.gpu import milliseconds, ratio
from benchmarks.harness import WrongAnswerError

TITLE = "hs.sdpa on a GPU, bf16 (pairs and HVPs: 12 heads × 64; MeanFlow: a DiT of 12 layers × 768)"
HEADS, WIDTH, DEPTH = 12, 64, 12
ERROR = 1.5e-2  # of bf16 answers against float64: about two roundings of the operands
CHECKED = 2048  # the length at which answers are compared with float64, tile by tile

Attend = Callable[..., Tensor]


def run(quick: bool) -> list[dict[str, Any]]:
    lengths = (1024, 8192) if quick else (1024, 2048, 4096, 8192, 16_384, 32_768)
    cases = [partial(_pair, n, causal) for n in lengths for causal in (False, True)]
    cases += [partial(_hvp, 16_384, causal) for causal in (False, True)]
    cases += [partial(_meanflow, n, batch) for n, batch in ((1024, 16), (4096, 4))]
    rows = []
    for case in cases:
        row = case()
        print(row, flush=True)
        rows.append(_columns(row))
    return rows


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    names = ("what", "n", "mask", "error", "ours ms", "replayed ms", "GiB", "together ms", "peer ms", "peer/ours",
             "peer/ours, replayed", "peer/ours, together", "math ms", "math GiB", "math/ours", "plain ms", "ours/plain",
             "ours/plain, replayed", "pair ms")  # fmt: skip
    return {name: row.get(name, "–") for name in names}


def _inputs(n: int) -> list[Tensor]:
    random = torch.Generator("cuda").manual_seed(n)
    normal = partial(torch.randn, 1, HEADS, n, WIDTH, generator=random, device="cuda")
    return [normal().bfloat16() for _ in range(7)]


def _pair(n: int, causal: bool) -> dict[str, Any]:
    """Two ways: `torch.func.jvp` and `torch.func.vjp` apart, and together: dual numbers, then a backward pass."""
    f = partial(hs.sdpa, is_causal=causal)
    error = _check(f, min(n, CHECKED), causal)
    q, k, v, dq, dk, dv, g = _inputs(n)
    place = (q, k, v), (dq, dk, dv), g
    ms, peak = milliseconds(lambda: apart(f, *place))
    replayed, together = replay(lambda: apart(f, *place)), milliseconds(lambda: _together(f, *place))[0]
    row = {"what": "pair", "n": n, "mask": "causal" if causal else "full", "error": error, "ours ms": ms, "GiB": peak}
    row |= {"replayed ms": replayed, "together ms": together}
    peer = _peer()
    if peer is not None:
        other = partial(peer.fwd_dual, causal=causal)
        theirs = _timed(lambda: apart(other, *place))
        row |= {"peer ms": theirs, "peer/ours": ratio(theirs, ms)}
        row |= {
            "peer/ours, replayed": ratio(replay(lambda: apart(other, *place)), replayed) if isinstance(replayed, float) else "–"
        }
        row |= {"peer/ours, together": ratio(_timed(lambda: _together(other, *place)), together)}
    return row


def replay(run: Callable[[], Any]) -> Any:
    """Milliseconds of a CUDA graph of `run`, whose answers must be those of a plain call; or why there is none."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            run()
            want = run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run()
        ms = milliseconds(graph.replay)[0]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return type(error).__name__
    pairs = zip(*((t,) if isinstance(t, Tensor) else t for t in (got, want)), strict=True)
    error = max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)
    if not error <= ERROR:
        raise WrongAnswerError(f"expected a replay to answer as a plain call, got {error:.1e} off; nothing is timed")
    return ms


def apart(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    return torch.func.jvp(f, x, t)[1], *torch.func.vjp(f, *x)[1](g)


def _together(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    leaves = tuple(a.detach().requires_grad_() for a in x)
    both: Any = torch.func.jvp(f, leaves, t)
    out, tangent = both
    return tangent, *torch.autograd.grad(out, leaves, g)


def _hessian(f: Attend, x: tuple, t: tuple, g: Tensor) -> tuple[Tensor, ...]:
    return torch.func.jvp(lambda *a: torch.func.vjp(f, *a)[1](g), x, t)[1]


def _check(f: Attend, n: int, causal: bool) -> float:
    """The largest relative error of a pair and of a Hessian-vector product against float64."""
    q, k, v, dq, dk, dv, g = _inputs(n)
    return checked(f, (q, k, v), (dq, dk, dv), g)


def checked(f: Attend, x: tuple, t: tuple, g: Tensor) -> float:
    """The largest relative error of every product of a pair and of a Hessian-vector product against float64."""
    error = 0.0
    for products in (apart, _together, _hessian):
        got = products(f, x, t, g)
        place, along = (tuple(a.double() for a in part) for part in (x, t))
        want = products(f, place, along, g.double())
        error = max([error, *(float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True))])
    if not error <= ERROR:
        raise WrongAnswerError(f"{x[0].shape}: expected products within {ERROR:g}, got {error:.1e}; no time is reported")
    return error


def _hvp(n: int, causal: bool) -> dict[str, Any]:
    f = partial(hs.sdpa, is_causal=causal)
    error = _check(f, CHECKED, causal)
    q, k, v, dq, dk, dv, g = _inputs(n)
    ms, peak = milliseconds(lambda: _hessian(f, (q, k, v), (dq, dk, dv), g))
    pair = milliseconds(lambda: apart(f, (q, k, v), (dq, dk, dv), g))[0]
    mask = "causal" if causal else "full"
    return {"what": "HVP", "n": n, "mask": mask, "error": error, "ours ms": ms, "GiB": peak, "pair ms": pair}


class _Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        # in float32, as autocast has them; torch's own forward mode of a norm of half precision mixes the two on a GPU
        self.norm1, self.norm2 = nn.LayerNorm(width, dtype=torch.float32), nn.LayerNorm(width, dtype=torch.float32)
        linear = partial(nn.Linear, dtype=torch.bfloat16)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.mlp = nn.Sequential(linear(width, 4 * width), nn.GELU(approximate="tanh"), linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x.float()).to(x.dtype)).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x.float()).to(x.dtype))


def _meanflow(n: int, batch: int) -> dict[str, Any]:
    """A jvp and a backward pass through the primal, the tangent detached; plain: a forward pass, then a flash training step."""
    torch.manual_seed(0)
    net = nn.Sequential(*(_Block(HEADS * WIDTH) for _ in range(DEPTH))).to("cuda")
    x, t = (torch.randn(batch, n, HEADS * WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def step() -> Tensor:
        net.zero_grad(set_to_none=True)
        both: Any = torch.func.jvp(net, (x,), (t,))
        u, du = both
        loss = (u - (t - du).detach()).float().square().mean()
        loss.backward()
        return loss.detach()

    def plain() -> Tensor:
        net.zero_grad(set_to_none=True)
        with torch.no_grad():
            target = net(x)
        loss = (net(x) - target - t).float().square().mean()
        loss.backward()
        return loss.detach()

    def math() -> AbstractContextManager[Any]:
        return sdpa_kernel(SDPBackend.MATH)

    with hs.use_sdpa():
        ours = float(step())
        ms, peak = milliseconds(step)
        replayed = replay(step)
    row = {"what": f"MeanFlow step, batch {batch}", "n": n, "mask": "full", "ours ms": ms, "replayed ms": replayed, "GiB": peak}
    try:
        with math():
            theirs = float(step())
            if not abs(ours - theirs) <= ERROR * abs(theirs):
                raise WrongAnswerError(f"n = {n}: expected a loss of {theirs:.4g}, got {ours:.4g}; no time is reported")
            slow, slow_peak = milliseconds(step, 3)
        row |= {"math ms": slow, "math GiB": slow_peak, "math/ours": slow / ms}
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        row |= {"math ms": "does not fit"}
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        quickest = milliseconds(plain)[0]
        again = replay(plain)
    compared = replayed / again if isinstance(replayed, float) and isinstance(again, float) else "–"
    return row | {"plain ms": quickest, "ours/plain": ms / quickest, "ours/plain, replayed": compared}


def _timed(run: Callable[[], object]) -> Any:
    try:
        return milliseconds(run)[0]
    except (torch.OutOfMemoryError, RuntimeError) as error:
        torch.cuda.empty_cache()
        return type(error).__name__


def _peer() -> Any:
    try:
        return importlib.import_module("jvp_flash_attention.jvp_attention").JVPAttn
    except ImportError:
        return None
