"""The fused kernels against the plain reference in float64: on a GPU where there is one, else in Triton's interpreter."""

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.kernels import Blocked, Dense, Mask, dispatch, linearize
from howsmooth.maps import attention as layer_module
from marks import first, sample
from problems.layers import MASK_NAMES, Problem, gaussian, masks, problem

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")

from howsmooth.kernels.triton import Fused, fused, operands  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = 1e-3  # relative error in norm of products whose operands have eleven bits, about two of their roundings


def allowed(precision: fused.Precision, want: Tensor, logit: float) -> float:
    """Few numbers do not average their roundings out, and a logit's error moves `P` by its size."""
    return 2e-5 if precision == "strict" else HALF * (1 if want.numel() > 1000 else 3) * (1 + logit / 8)


def relative(got: Tensor, want: Tensor, scale: float = 0.0) -> float:
    """Error in norm; `scale` is the size of terms that cancel in `want`."""
    return float((got.double().cpu() - want).norm()) / max(float(want.norm()), scale, 1e-300)


def make(p: Problem, precision: fused.Precision = "half") -> Fused:
    q, k, v = (t.float().to(DEVICE) for t in p.qkv)
    return Fused(q, k, v, p.scores, precision)


def check(p: Problem, precision: fused.Precision, probes: int = 1) -> None:
    p = p.to(torch.float32).to(torch.float64)
    kernel = make(p, precision)
    truth = Dense(*p.qkv, p.scores)
    tangents = [gaussian(probes, *t.shape, seed=i).float() for i, t in enumerate(p.qkv)]
    g = gaussian(probes, *truth.output.shape, seed=9).float()
    pairs = [
        (kernel.output, truth.output),
        (kernel.jvp(*(t.to(DEVICE) for t in tangents)), truth.jvp(*(t.double() for t in tangents))),
        *zip(kernel.vjp(g.to(DEVICE)), truth.vjp(g.double()), strict=True),
        (kernel.attention_received(), truth.attention_received()),
    ]
    logit = float((p.scores.scale * p.q @ p.k.repeat_interleave(p.q.shape[1] // p.k.shape[1], 1).mT).abs().max())
    size = float(pairs[4][1].norm())  # of dv: queries and keys may have a derivative of zero
    for i, (got, want) in enumerate(pairs):
        assert got.shape == want.shape
        error = relative(got, want, size if i in (2, 3) else 0.0)
        assert error <= allowed(precision, want, logit), f"{precision}: error {error:.1e}"


VISIBLE = [name for name in MASK_NAMES if "ties" not in name]


@pytest.mark.slow
@pytest.mark.parametrize(  # masks are the same code in every precision
    ("name", "precision"),
    [
        *sample([(name, "half") for name in VISIBLE], None, pytest.mark.weekly, pytest.mark.weekly),
        *((name, precision) for name in ("full", "causal window", "everything") for precision in ("strict", "mixed")),
        *first([(name, "strict") for name in VISIBLE if name not in ("full", "causal window", "everything")], 0),
    ],
)
def test_every_mask(name, precision):
    check(problem(batch=2, heads=2, n=45, d=16, d_v=16, mask=masks(2, 2, 45)[name]), precision)


def test_masks_by_positions_are_refused_or_go_elsewhere():
    p = problem(n=9, mask=masks(2, 2, 9)["ties"]).to(torch.float32)
    with pytest.raises(BadInputError, match="a mask by order"):
        make(p)
    q, k, v = (t.to(DEVICE) for t in p.qkv)
    with pytest.raises(BadInputError, match="a mask by positions"):
        linearize(q, k, v, p.scores, kernel="triton")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not isinstance(linearize(q, k, v, p.scores), Fused)


@pytest.mark.slow
@pytest.mark.parametrize("precision", first(["half", "strict"]))
@pytest.mark.parametrize("mask", [Mask(), Mask(causal=True), Mask(causal=True, window=50), Mask(window=70)])
def test_several_blocks(mask, precision):
    check(problem(batch=1, heads=1, n=300, d=16, d_v=16, mask=mask), precision)


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 200), (130, 3)])
def test_lengths_that_are_no_multiple_of_a_block(n, m):
    check(problem(batch=1, heads=1, n=n, m=m, d=5, d_v=3), "half")


@pytest.mark.parametrize(("d", "d_v"), [(1, 1), (24, 40), (96, 33), (256, 16), (256, 256)])
def test_head_widths(d, d_v):
    check(problem(batch=1, heads=1, n=17, d=d, d_v=d_v), "half")


@pytest.mark.slow
@pytest.mark.parametrize("probes", [1, 2, 3, 4])
def test_probes_share_a_launch(probes):
    check(problem(batch=2, heads=2, n=33, d=16, d_v=8, mask=Mask(causal=True)), "half", probes)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["half", "strict"])
@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap, precision):
    check(problem(batch=1, heads=2, n=40, d=16, d_v=16, softcap=softcap, logit=10.0, mask=Mask(causal=True)), precision)


@pytest.mark.slow
@pytest.mark.parametrize("group", [2, 4])
def test_grouped_heads(group):
    check(problem(batch=2, heads=4, kv_heads=4 // group, n=30, d=16, d_v=16, mask=Mask(causal=True)), "half", 2)


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1e6])
def test_inputs_of_any_size(size):
    """Half precision has little range: operands are brought into it, item by item and probe by probe."""
    p = problem(batch=2, heads=1, n=20, d=8, d_v=8).to(torch.float32).to(torch.float64)
    p = Problem(p.q / 30, p.k * 30, size * p.v, p.scores)
    kernel, truth = make(p), Dense(*p.qkv, p.scores)
    tangents = [
        gaussian(2, *t.shape, seed=i).float() * s for i, (t, s) in enumerate(zip(p.qkv, (1e-5, 1.0, size), strict=True))
    ]
    tangents = [torch.stack([t[0], 1e-4 * t[1]]) for t in tangents]
    g = gaussian(2, *truth.output.shape, seed=9).float() * size
    got, want = kernel.jvp(*(t.to(DEVICE) for t in tangents)), truth.jvp(*(t.double() for t in tangents))
    assert all(relative(got[i], want[i]) <= HALF for i in range(2))
    assert all(relative(a, b) <= HALF for a, b in zip(kernel.vjp(g.to(DEVICE)), truth.vjp(g.double()), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_inputs_are_taken_as_they_are(dtype):
    p = problem(batch=1, heads=2, n=40, d=16, d_v=16)
    q, k, v = (t.to(dtype) for t in p.qkv)
    kernel = Fused(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), p.scores)
    assert relative(kernel.output, Dense(q.double(), k.double(), v.double(), p.scores).output) <= HALF


def test_every_entry_is_written(monkeypatch):
    empty = torch.empty

    def poisoned(*args, **kwargs):
        t = empty(*args, **kwargs)
        return t.fill_(torch.nan) if t.is_floating_point() else t

    monkeypatch.setattr(torch, "empty", poisoned)
    check(problem(batch=2, heads=2, n=45, d=16, d_v=16, mask=masks(2, 2, 45)["everything"]), "half", 2)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "logit"), [("half", 1.0), ("half", 40.0), ("mixed", 40.0)])
def test_noise_is_the_error_of_products(precision, logit):
    p = problem(batch=1, heads=2, n=200, d=16, d_v=16, logit=logit).to(torch.float32).to(torch.float64)
    kernel, truth = make(p, precision), Dense(*p.qkv, p.scores)
    errors = []
    for seed in range(4):
        t = [
            gaussian(1, *x.shape, seed=100 + 3 * seed + i).float() * x.float().square().mean().sqrt()
            for i, x in enumerate(p.qkv)
        ]
        errors.append(relative(kernel.jvp(*(x.to(DEVICE) for x in t)), truth.jvp(*(x.double() for x in t))))
    assert 0.5 * max(errors) <= kernel.noise <= 2 * max(errors)


@pytest.mark.slow
def test_refinement_ends_with_strict():
    kernel = make(problem(n=9, d=16, d_v=16))
    finer = kernel.refined()
    assert finer is not None
    assert finer.precision == "mixed"
    finest = finer.refined()
    assert finest is not None
    assert finest.precision == "strict"
    assert finest.refined() is None
    assert finest.noise < 1e-4 < finer.noise


def test_select_and_tiled():
    p = problem(batch=3, heads=2, n=20, d=8, d_v=8, mask=masks(3, 2, 20)["keys"])
    kernel = make(p)
    assert relative(kernel.select(torch.tensor([2, 0], device=DEVICE)).output, kernel.output[[2, 0]].double().cpu()) == 0
    assert isinstance(kernel.tiled(), Blocked)
    assert relative(kernel.output, kernel.tiled().output.double().cpu()) <= HALF


@pytest.fixture
def fused_layers(monkeypatch):
    monkeypatch.setattr(layer_module, "linearize", partial(linearize, kernel="triton"))


def layer(causal: bool = True, scale: float = 1.0) -> tuple[hs.Attention, Tensor]:
    weights = [scale * gaussian(32, 32, seed=i).float() / 32**0.5 for i in range(4)]
    return hs.Attention(*weights, heads=2, causal=causal), gaussian(40, 32, seed=9).float()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heavy", "certify"), [(False, None), (True, 0.02)], ids=["lower in float64", "lower in strict float32"]
)
def test_lipschitz_on_fused_products(monkeypatch, heavy, certify):
    attn, x = layer()
    truth = hs.lipschitz(attn.to(torch.float64), x.double(), solver=hs.DenseSVD()).value
    real = linearize
    monkeypatch.setattr(
        layer_module, "linearize", lambda q, *a: real(q, *a, kernel="auto" if q.dtype.itemsize > 4 else "triton")
    )
    monkeypatch.setattr(fused, "_HEAVY", 0 if heavy else 2**60)
    estimate = hs.lipschitz(attn.to(DEVICE, torch.float32), x.to(DEVICE), certify=certify)
    assert estimate.precision == ("float32" if heavy else "float64")
    assert abs(estimate.value - truth) <= 1e-3 * truth
    assert estimate.lower <= truth * (1 + 1e-5)
    assert truth <= estimate.upper
    assert estimate.status == ("converged" if certify is None else "certified")


def test_finer_products_where_the_logits_need_them(fused_layers):
    """Logits of about fifty: half-precision products are off by more than `tol`, and say so."""
    attn, x = layer(scale=4.0)
    operator = attn.linearize(x[None].to(DEVICE))[1]
    assert operator.noise > 1e-3
    exact = operator.refined()  # projections first, then the kernel
    assert exact is not None
    assert exact.kernel is operator.kernel
    assert 1e-3 < exact.noise <= operator.noise
    finer = exact.refined()
    assert finer is not None
    assert finer.noise < exact.noise


def test_dispatch_falls_back_with_one_warning_or_raises(monkeypatch):
    p = problem(n=5, d=4, d_v=4)
    wide = torch.zeros(1, 1, 3, 300)
    for q, k, v in [(wide, wide, wide), p.qkv]:
        with pytest.raises(BadInputError, match="expected a problem for the fused kernels"):
            linearize(q, k, v, p.scores, kernel="triton")
    monkeypatch.setattr(dispatch, "_no_triton", lambda: "no installation of triton")
    with pytest.raises(BadInputError, match="no installation of triton"):
        linearize(*p.to(torch.float32).qkv, p.scores, kernel="triton")
    dispatch._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="some reason; using torch operations"):
        dispatch._warn_once("some reason")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatch._warn_once("some reason")


def test_a_kernel_asked_for_serves():
    p = problem(n=5).to(torch.float32)
    assert isinstance(linearize(*p.qkv, p.scores, kernel="dense"), Dense)
    assert isinstance(linearize(*p.qkv, p.scores, kernel="blocked"), Blocked)
    if DEVICE == "cpu":
        assert isinstance(linearize(*p.qkv, p.scores, kernel="triton"), Fused)


@pytest.mark.parametrize("size", [0.0, 1e-20, 0.7, 1.0, 4095.9, 4096.0, 1e20])
def test_powers_of_two(size):
    scaled = size * operands.power(size)
    assert scaled == 0 if size == 0 else 2**11 <= scaled < 2**12
    assert operands.power(size) == 2.0 ** round(torch.tensor(operands.power(size)).log2().item())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_long_and_wide_on_a_gpu(d):
    check(problem(batch=1, heads=2, n=3000, d=d, d_v=d, mask=Mask(causal=True)), "half", 2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("d", [64, 128])
def test_long_and_strict_on_a_gpu(d):
    check(problem(batch=1, heads=2, n=1111, d=d, d_v=d, mask=Mask(causal=True, window=300)), "strict")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("d", [32, 64, 128, 256])
@pytest.mark.parametrize(("precision", "probes"), [("half", 1), ("half", 2), ("strict", 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_fits_beside_the_keys_on_a_gpu(d, precision, probes, causal):
    mask = Mask(causal=causal, bias=gaussian(1, 2, 300, 300, seed=3))
    check(problem(batch=1, heads=2, n=300, d=d, d_v=d, mask=mask), precision, probes)
