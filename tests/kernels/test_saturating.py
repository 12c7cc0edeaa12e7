"""Derivatives where sigmoids and soft-caps are flat, against `e/(1 + e)²` with `e = exp(−|s|)`, entry by entry in float64."""

import itertools
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jvp, vmap

import howsmooth as hs
from howsmooth.kernels import Mask, Scores, linearize, plain_attention, tensors
from howsmooth.kernels.kinds import Sigmoid, Softmax
from howsmooth.maps import Attention
from howsmooth.maps.scalars import SCALARS
from howsmooth.theory.kinds import block_norms
from problems.kind_saturated import fuzz_saturated
from problems.layers import gaussian

FAR = [0.0, 1e-3, 1.0, 10.0, 16.0, 36.0, 42.25, 100.0, 300.0, 700.0]
S = torch.tensor([sign * s for s in FAR for sign in (1.0, -1.0)], dtype=torch.float64)
CLOSE = 1e-12  # relative: the slope of logits of 700 carries 700 units in the last place of them
HUGE = 1e20


def flat(s: Tensor) -> Tensor:
    """`σ'(s)`."""
    e = torch.exp(-s.abs())
    return e / (1 + e) ** 2


def flat_tanh(t: Tensor) -> Tensor:
    return 4 * flat(2 * t)


def apart(got: Tensor, want: Tensor) -> float:
    """The largest relative error of an entry."""
    assert got.shape == want.shape
    return float(((got - want).abs() / want.abs().clamp_min(1e-300)).max())


@pytest.mark.parametrize(("f", "slope"), [(tensors.sigmoid, flat), (tensors.tanh, flat_tanh)])
def test_derivatives_taken_automatically(f, slope):
    s = S / (1 if f is tensors.sigmoid else 2)
    torchs = torch.sigmoid if f is tensors.sigmoid else torch.tanh
    assert apart(f(s), torchs(s)) <= 1e-15
    assert apart(vmap(grad(f))(s), slope(s)) <= CLOSE
    assert apart(jvp(f, (s,), (torch.ones_like(s),))[1], slope(s)) <= CLOSE
    bend = torch.tanh(s / 2) if f is tensors.sigmoid else 2 * torch.tanh(s)
    for second in (vmap(grad(grad(f))), vmap(hessian(f)), vmap(jacfwd(jacfwd(f)))):
        assert float((second(s) + bend * slope(s)).abs().div(slope(s)).max()) <= CLOSE  # zero at zero


@pytest.mark.parametrize(("f", "slope"), [(tensors.sigmoid_slope, flat), (tensors.tanh_slope, flat_tanh)])
def test_slopes(f, slope):
    s = S / (1 if f is tensors.sigmoid_slope else 2)
    assert apart(f(s), slope(s)) <= CLOSE
    assert apart(f(s.float()).double(), slope(s)) <= 1e-5 or bool((s.abs() > 80).any())
    assert f(torch.tensor([math.inf, -math.inf])).tolist() == [0.0, 0.0]


def exactly(scalar: str, x: float) -> tuple[float, float]:
    """The first two derivatives of an activation in 80 digits."""
    with localcontext() as context:
        context.prec = 80
        t = Decimal(x)
        e = (-abs(t)).exp()
        s = 1 / (1 + e) if x >= 0 else e / (1 + e)
        s1 = e / (1 + e) ** 2
        s2 = s1 * (1 - 2 * s)
        e2 = (-2 * abs(t)).exp()
        th, th1 = (1 - e2) / (1 + e2) * (1 if x >= 0 else -1), 4 * e2 / (1 + e2) ** 2
        return {
            "sigmoid": (float(s1), float(s2)),
            "tanh": (float(th1), float(-2 * th * th1)),
            "x·sigmoid(1x)": (float(s + t * s1), float(2 * s1 + t * s2)),
        }[scalar]


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "x·sigmoid(1x)"])
def test_activations(name):
    scalar = next(s for s in SCALARS if s.name == name)
    for x in (-300.0, -60.0, -40.0, -20.0, -3.0, 0.5, 3.0, 20.0, 40.0, 300.0):
        at = torch.tensor(x, dtype=torch.float64)
        slope, second = exactly(name, x)
        assert float(scalar.slope(at)) == pytest.approx(slope, rel=1e-13, abs=0)
        assert float(scalar.second(at)) == pytest.approx(second, rel=1e-13, abs=0)
        least, most = scalar.curvature(at - 1e-3, at + 1e-3)
        assert float(least) < second < float(most)


@pytest.mark.parametrize("name", ["gelu", "tanh gelu"])
def test_slopes_of_gelu_far_to_the_left(name):
    """`Φ(x) + x φ(x) = φ(x)(x − 1/x + …)`; with tanh, `y + x g'(x) 2y(1 − y)` with `y = 1/(1 + exp(−2g))`."""
    scalar = next(s for s in SCALARS if s.name == name)
    for x in (-6.0, -9.0, -12.0):
        if name == "gelu":
            phi = math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
            want = 0.5 * math.erfc(-x / math.sqrt(2)) + x * phi
        else:
            c = math.sqrt(2 / math.pi)
            y, g1 = math.exp(2 * c * (x + 0.044715 * x**3)), c * (1 + 3 * 0.044715 * x * x)
            want = (y + x * g1 * 2 * y / (1 + y)) / (1 + y)
        assert float(scalar.slope(torch.tensor(x, dtype=torch.float64))) == pytest.approx(want, rel=1e-12, abs=0)


def by_hand(at: list[Tensor], along: list[Tensor], bias: float, cap: float | None) -> tuple[Tensor, Tensor]:
    """One head of sigmoid attention at `q, k, v`, and its derivative along `dq, dk, dv`."""
    (q, k, v), (dq, dk, dv) = ([t[0, 0] for t in ts] for ts in (at, along))
    u, du = q @ k.mT, dq @ k.mT + q @ dk.mT
    s = u if cap is None else cap * torch.tanh(u / cap)
    ds = du if cap is None else du * flat_tanh(u / cap)
    s = s + bias
    return torch.sigmoid(s) @ v, (flat(s) * ds) @ v + torch.sigmoid(s) @ dv


def saturated(logit: float, n: int = 9):
    """Queries and keys of two entries whose logits are about `logit`, of either sign by row."""
    root = abs(logit) ** 0.5
    q = root * torch.stack([torch.ones(n), 0.1 * torch.arange(n)], -1).double() * (-1) ** torch.arange(n)[:, None]
    k = root * torch.stack([torch.ones(n), 0.01 * torch.arange(n)], -1).double()
    return q[None, None], k[None, None], HUGE * gaussian(1, 1, n, 2, seed=1).abs()


@pytest.mark.parametrize("kernel", ["dense", "blocked"])
@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize("logit", [10.0, 16.0, 36.0, 60.0, 300.0, 600.0])
def test_products_of_saturated_sigmoids(kernel, cap, logit):
    q, k, v = saturated(logit)
    bias = 0.5
    made = linearize(q, k, v, Scores(1.0, cap, kind=Sigmoid(bias)), kernel)
    along = (gaussian(*q.shape, seed=2), gaussian(*k.shape, seed=3), torch.zeros_like(v))
    value, moved = by_hand([q, k, v], [*along], bias, cap)
    assert apart(made.output[0, 0], value) <= 1e-10
    got = made.jvp(*(t[None] for t in along))[0, 0, 0]
    size = moved.abs().amax(-1, keepdim=True)  # of a row: its terms have either sign
    assert float(((got - moved).abs() / size).max()) <= 1e-10
    g = gaussian(*made.output.shape, seed=4)
    dq, dk, _ = made.vjp(g[None])
    left, right = float((dq[0] * along[0]).sum() + (dk[0] * along[1]).sum()), float((g[0, 0] * moved).sum())
    assert left == pytest.approx(right, rel=1e-9)


@pytest.mark.parametrize("cap", [None, 30.0])
def test_the_plain_formula_differentiated(cap):
    q, k, v = saturated(36.0)
    along = tuple(gaussian(*t.shape, seed=i) for i, t in enumerate((q, k)))
    got = jvp(lambda q, k: plain_attention(q, k, v, Scores(1.0, cap, kind=Sigmoid(0.5))), (q, k), along)[1][0, 0]
    want = by_hand([q, k, v], [*along, torch.zeros_like(v)], 0.5, cap)[1]
    assert float(((got - want).abs() / want.abs().amax(-1, keepdim=True)).max()) <= 1e-10


@pytest.mark.parametrize("kernel", ["dense", "blocked"])
def test_a_hidden_key_of_a_sigmoid_has_no_derivative(kernel):
    q, k, v = saturated(40.0)
    hidden = torch.zeros(1, 1, 9, 9).double()
    hidden[..., 4:] = -torch.inf
    made = linearize(q, k, v, Scores(1.0, kind=Sigmoid(0.0), mask=Mask(bias=hidden)), kernel)
    few = linearize(q, k[:, :, :4], v[:, :, :4], Scores(1.0, kind=Sigmoid(0.0)), kernel)
    assert torch.equal(made.output, few.output)
    assert bool((made.vjp(torch.ones_like(made.output)[None])[1][..., 4:, :] == 0).all())


def layer(w: float, b_v: float, **more) -> Attention:
    one = torch.ones(1, 1, dtype=torch.float64)
    return Attention(w * one, one, 0 * one, one, b_v=torch.tensor([b_v], dtype=torch.float64), scale=1.0, **more)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("logit", [10.0, 16.0, 36.0, 42.25, 100.0, 400.0, 680.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_intervals_and_bounds_of_saturated_layers(n, logit, sign):
    """One entry, `n` equal tokens `x`, values `b`: `y_i = b Σ_j σ(w x_i x_j)`, `J = b w σ'(w x²)(n x I + x 11ᵀ)`, norm `2n`."""
    x = torch.full((n, 1), math.sqrt(logit), dtype=torch.float64)
    b_v = math.exp(min(logit, 690.0)) * 3.0
    attn = layer(sign, b_v, kind=Sigmoid(0.0))
    truth = b_v * float(flat(x[:1] ** 2)) * 2 * n * float(x[0])
    found = hs.lipschitz(attn, x)
    assert found.lower <= truth * (1 + 1e-10)
    assert truth * (1 - 1e-10) <= found.upper <= truth * (1 + 1e-2)
    rows = [*hs.bounds(attn, x), *hs.bounds(attn, n=n, radius=float(x[0]))]
    checked = [b for b in rows if b.side == "upper" and b.value is not None]
    assert {b.id for b in checked} >= {"D7", "S2"}
    for b in checked:
        assert b.value >= truth * (1 - 1e-10), b
    for b in rows:
        if b.side == "lower" and b.id == "C1" and b.value:
            assert b.value <= b_v * n * float(x[0])


@pytest.mark.slow
def test_intervals_and_bounds_of_many_saturated_layers():
    """`python -m benchmarks kind_bounds` looks at 20 000 inputs."""
    tally = fuzz_saturated("", range(30))
    assert tally.wrong == []
    assert tally.inputs >= 100
    assert tally.upper > tally.infinite + 100


def test_the_fuzz_catches_slopes_that_cancel(monkeypatch):
    def cancelling(self, s, row, cap):
        weights = s.sigmoid_()
        slope = weights * (1 - weights)
        return weights, slope if cap is None else slope * cap

    monkeypatch.setattr(Sigmoid, "tile", cancelling)
    wrong = fuzz_saturated("", range(30)).wrong
    assert any("closed form off" in w for w in wrong)
    assert any("outside [" in w for w in wrong)


def test_the_fuzz_catches_bounds_that_cancel(monkeypatch):
    monkeypatch.setattr(block_norms, "sigmoid_slope", lambda s: s.sigmoid() * (1 - s.sigmoid()))
    assert any(w.startswith("D7 ") for w in fuzz_saturated("", range(30)).wrong)


def test_the_block_norms_of_a_saturated_sigmoid_are_tight():
    attn = layer(1.0, HUGE, kind=Sigmoid(0.0))
    d7 = next(b for b in hs.bounds(attn, torch.tensor([[6.5]], dtype=torch.float64)) if b.id == "D7")
    assert d7.value == pytest.approx(float(13 * HUGE * flat(torch.tensor(42.25, dtype=torch.float64))), rel=1e-6)


@pytest.mark.parametrize("kind", [Sigmoid(0.0), Softmax(torch.zeros(1).double())])
@pytest.mark.parametrize("logit", [5.0, 20.0, 60.0, 300.0])
def test_saturated_soft_caps(kind, logit):
    """With one token, values `b` and a soft-cap `c`: `y = b σ(c tanh(x²/c))`, also with a sink of zero beside it."""
    cap, x = 1.0, math.sqrt(logit)
    attn = layer(1.0, HUGE, kind=kind, softcap=cap)
    truth = HUGE * float(flat(cap * torch.tanh(torch.tensor(x * x / cap, dtype=torch.float64))))
    truth *= float(flat_tanh(torch.tensor(x * x / cap, dtype=torch.float64))) * 2 * x
    at = torch.tensor([[x]], dtype=torch.float64)
    found = hs.lipschitz(attn, at)
    assert found.lower <= truth * (1 + 1e-10)
    # of a softmax all rounding is proved, of values as large as these that is much
    assert truth * (1 - 1e-10) <= found.upper <= (math.inf if isinstance(kind, Softmax) else truth * (1 + 1e-2))
    for b in itertools.chain(hs.bounds(attn, at), hs.bounds(attn, n=1, radius=x)):
        assert b.side != "upper" or b.value is None or b.value >= truth * (1 - 1e-10), b


def test_second_derivatives_of_a_saturated_soft_cap():
    """`hs.sdpa` along `q`, twice: `s = c tanh(u/c)` at `u = 20 c`, with values that make it visible."""
    q, k = torch.full((1, 1, 1, 1), 20.0).double(), torch.tensor([1.0, 1.5, -1.0]).double().reshape(1, 1, 3, 1)
    v = 1e16 * torch.tensor([1.0, 0.0, 0.0]).double().reshape(1, 1, 3, 1)

    def f(q):
        return hs.sdpa(q, k, v, scale=1.0, softcap=1.0).sum()

    def exact(q):
        return torch.softmax(tensors.tanh(q @ k.mT), -1) @ v

    want_first, want_second = grad(lambda t: exact(t).sum())(q), grad(lambda t: grad(lambda r: exact(r).sum())(t).sum())(q)
    tangent = torch.ones_like(q)
    for first in (grad(f)(q), jvp(f, (q,), (tangent,))[1].reshape(q.shape)):
        assert apart(first, want_first) <= 1e-10
    twice = jvp(lambda t: jvp(f, (t,), (tangent,))[1], (q,), (tangent,))[1].reshape(q.shape)
    for second in (grad(lambda t: grad(f)(t).sum())(q), jvp(grad(f), (q,), (tangent,))[1], twice):
        assert apart(second, want_second) <= 1e-10
