"""`sdpa`'s kernels for a GPU against tiles in float64: on a GPU where there is one, else in Triton's interpreter."""

from typing import Any

import pytest
import torch
from torch.func import jvp, vjp, vmap

import howsmooth as hs
from howsmooth.kernels import dot_product, operators
from marks import first
from problems.layers import gaussian

pytest.importorskip("triton", reason="needs triton: pip install triton")

from howsmooth.kernels.triton import compiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# relative errors in norm: of float32 some roundings, of half precision about two of each operand's
ALLOWED = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
KINDS: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "causal, grouped, whole blocks": (128, 128, 16, 16, 2, {"is_causal": True}),
    "soft-capped, ragged": (17, 70, 20, 8, 1, {"softcap": 2.0, "scale": -0.3}),
    "causal window": (40, 40, 8, 8, 1, {"is_causal": True, "window": 9}),
    "mask with an empty row": (20, 30, 8, 8, 1, {"attn_mask": True}),
    "causal, from the middle on": (30, 70, 8, 8, 1, {"is_causal": True, "first": 40}),
    "causal documents": (77, 88, 8, 8, 2, {"cu": ([0, 3, 3, 60, 67, 77], [0, 4, 9, 70, 88, 88]), "window_size": (-1, 0)}),
    "documents with a window": (50, 50, 20, 8, 1, {"cu": ([0, 40, 50],), "window_size": (9, 9), "softcap": 2.0}),
    "window, from past the end on": (30, 70, 8, 8, 2, {"window": 12, "first": 60}),
}


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    monkeypatch.setattr(operators, "_fused", lambda q, v: q.dtype != torch.float64)


def products(x, t, g, first: Any = 0, cu: Any = (), **given):
    """Output, jvp, vjp, the Hessian of `⟨g, o⟩` along `t`, and a batch of vjps.

    first: where the first query stands.  cu: where documents begin.
    """

    def f(q, k, v):
        if cu:
            packed = (t[0].transpose(0, 1) for t in (q, k, v))
            return hs.varlen(*packed, *map(torch.tensor, cu), enable_gqa=True, **given).transpose(0, 1)[None]
        if first:
            how = (given.get("is_causal", False), q.shape[-1] ** -0.5, True, given.get("window"), None, 0.0, None)
            return dot_product._attention(q, k, v, None, first, how)
        return hs.sdpa(q, k, v, enable_gqa=True, **given)

    hessian = jvp(lambda *a: vjp(f, *a)[1](g), x, t)[1]
    batch = vmap(lambda u: vjp(f, *x)[1](u)[1])(torch.stack([g, -2 * g]))
    return [*jvp(f, x, t), *vjp(f, *x)[1](g), *hessian, batch]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", first([torch.float32, torch.bfloat16, torch.float16], 2))
def test_every_product(kind, dtype):
    if DEVICE == "cpu" and (dtype == torch.bfloat16 or (dtype == torch.float32) == ("whole" in kind)):
        pytest.skip("Triton's interpreter is slow, and has no bfloat16 products")
    n, m, d, d_v, group, given = KINDS[kind]
    if "attn_mask" in given:
        mask = gaussian(1, 1, n, m, seed=8) > -0.3
        mask[..., 3, :] = False
        given = {"attn_mask": mask.to(DEVICE)}
    shapes = ((1, 2, n, d), (1, 2 // group, m, d), (1, 2 // group, m, d_v))
    x, t = (tuple(gaussian(*s, seed=i + k).to(DEVICE, dtype) for i, s in enumerate(shapes)) for k in (0, 10))
    g = gaussian(1, 2, n, d_v, seed=20).to(DEVICE, dtype)
    got = products(x, t, g, **given)
    want = products(tuple(a.double() for a in x), tuple(a.double() for a in t), g.double(), **given)
    for name, a, b in zip(("o", "do", "dq", "dk", "dv", "hq", "hk", "hv", "batch"), got, want, strict=True):
        error = float((a.double() - b).norm() / b.norm())
        assert error <= ALLOWED[dtype], f"{name}: error {error:.1e}"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "from" in kind])
def test_queries_from_the_middle_on_are_those_of_a_mask(kind):
    """In float64, on tiles."""
    n, m, d, d_v, group, given = KINDS[kind]
    shapes = ((1, 2, n, d), (1, 2 // group, m, d), (1, 2 // group, m, d_v))
    x, t = (tuple(gaussian(*s, seed=i + k) for i, s in enumerate(shapes)) for k in (0, 10))
    g = gaussian(1, 2, n, d_v, seed=20)
    apart = given["first"] + torch.arange(n)[:, None] - torch.arange(m)
    visible = (apart >= 0) if "is_causal" in given else apart.abs() < given["window"]
    for a, b in zip(products(x, t, g, **given), products(x, t, g, attn_mask=visible), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="older names alone in this torch; 2.9 or newer runs this"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_precision_set_under_torchs_newer_names(dtype):
    """Which its older ones refuse to read."""
    q, setting = gaussian(1, 1, 5, 8, seed=0).to(DEVICE, dtype), torch.backends.cuda.matmul
    before, wide = setting.fp32_precision, q.double()
    try:
        setting.fp32_precision = "tf32"
        error = float((hs.sdpa(q, q, q) - hs.sdpa(wide, wide, wide)).norm())
    finally:
        setting.fp32_precision = before
    assert error < 1e-2


class Compiled:
    """What Triton gives back after a launch."""

    def __init__(self, log: list):
        self.log = log

    def __getitem__(self, grid):
        return lambda *args: self.log.append(("kept", grid, *args))


class Kernel:
    arg_names = ("X", "n", "WIDTH")

    def __init__(self, log: list):
        self.log = log

    def __getitem__(self, grid):
        def run(*args, **options):
            self.log.append(("found", grid, *args, options))
            return Compiled(self.log)

        return run


def test_a_kernel_is_kept_for_tensors_that_it_was_compiled_for(monkeypatch):
    monkeypatch.setattr(compiling, "CompiledKernel", Compiled)
    monkeypatch.setattr(compiling, "_KEEPS", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    log, options = [], {"num_warps": 4, "WIDTH": 2}
    launch, x = compiling.Launch(Kernel(log), (3, 2, 1), (5,), options), torch.zeros(8)
    ways = [x, x, x[4:], x[1:], x[1:], x.half(), x]
    for t in ways:
        launch(t)
    assert [line[0] for line in log] == ["found", "kept", "kept", "found", "kept", "found", "kept"]
    for t, line in zip(ways, log, strict=True):
        assert line[1] == (3, 2, 1)
        assert line[2].data_ptr() == t.data_ptr()
        assert line[3:] == ((5, options) if line[0] == "found" else (5, 2))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_heads_on_a_gpu(d, dtype):
    shapes = ((1, 2, 300, d),) * 3
    x, t = (tuple(gaussian(*s, seed=i + k).to(DEVICE, dtype) for i, s in enumerate(shapes)) for k in (0, 10))
    g = gaussian(1, 2, 300, d, seed=20).to(DEVICE, dtype)
    want = products(tuple(a.double() for a in x), tuple(a.double() for a in t), g.double(), is_causal=True)
    for a, b in zip(products(x, t, g, is_causal=True), want, strict=True):
        assert float((a.double() - b).norm() / b.norm()) <= ALLOWED[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(("d", "d_v"), [(20, 8), (32, 8), (24, 40), (100, 16), (192, 128), (256, 16), (16, 200)])
def test_keys_and_values_of_different_widths_on_a_gpu(d, d_v):
    shapes = ((1, 2, 70, d), (1, 2, 130, d), (1, 2, 130, d_v))
    x, t = (tuple(gaussian(*s, seed=i + k).to(DEVICE, torch.bfloat16) for i, s in enumerate(shapes)) for k in (0, 10))
    g = gaussian(1, 2, 70, d_v, seed=20).to(DEVICE, torch.bfloat16)
    want = products(tuple(a.double() for a in x), tuple(a.double() for a in t), g.double())
    for a, b in zip(products(x, t, g), want, strict=True):
        assert float((a.double() - b).norm() / b.norm()) <= ALLOWED[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_one_query_on_a_gpu():
    q, k = gaussian(1, 2, 1, 64, seed=0).to(DEVICE), gaussian(1, 2, 1, 64, seed=1).to(DEVICE)
    out = hs.sdpa(q.float(), k.float(), k.float())
    assert float((out.double() - k).norm() / k.norm()) <= ALLOWED[torch.float32]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_captured_in_a_cuda_graph():
    """Nothing waits for the device, so forward, backward and jvp are captured and replayed."""
    x = [gaussian(1, 2, 256, 64, seed=i).to(DEVICE, torch.bfloat16).requires_grad_() for i in range(3)]
    g = gaussian(1, 2, 256, 64, seed=5).to(DEVICE, torch.bfloat16)

    def step():
        plain = tuple(t.detach() for t in x)
        tangent = jvp(lambda q, k, v: hs.sdpa(q, k, v, is_causal=True), plain, plain)[1]
        return [tangent, *torch.autograd.grad(hs.sdpa(x[0], x[1], x[2], is_causal=True), x, g)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in x:
            t.mul_(0.5)
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


def test_rows_that_are_far_apart():
    q, k, v = (gaussian(1, 1, 2, 16, seed=seed).to(DEVICE, torch.float16) for seed in range(3))
    far = torch.empty(2**31 + 16, dtype=torch.float16, device=DEVICE).as_strided(q.shape, (0, 0, 2**31, 1)).copy_(q)
    assert torch.equal(hs.sdpa(far, k, v), hs.sdpa(q, k, v))
