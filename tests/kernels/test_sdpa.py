"""`hs.sdpa` against torch's own function in float64: every argument, every mode of differentiation, twice."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

import howsmooth as hs
from howsmooth.errors import BadInputError
from howsmooth.kernels import autograd, tiled
from problems.layers import gaussian

EQUAL = 1e-12
TORCHS: Any = torch.nn.functional.scaled_dot_product_attention
sdpa: Any = hs.sdpa  # called with tuples


def plain(*x: Tensor, attn_mask=None, is_causal=False, scale=None, enable_gqa=False, window=None, softcap=None) -> Tensor:
    """Torch's own function, or its formula where it has no such argument."""
    q, k, v = x
    if window is None and softcap is None:
        with sdpa_kernel(SDPBackend.MATH):
            return TORCHS(q, k, v, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    s = (q.shape[-1] ** -0.5 if scale is None else scale) * (q @ k.mT)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
    seen = (j <= i if is_causal else j >= 0) & ((i - j).abs() < (window or 10**6))
    if attn_mask is not None:
        seen = seen & (attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf)
        s = s if attn_mask.dtype == torch.bool else s + attn_mask.clamp_min(-1e300)
    return torch.softmax(s.masked_fill(~seen, -torch.inf), -1) @ v


def distance(got: Any, want: Any) -> float:
    a, b = tree_leaves(got), tree_leaves(want)
    assert [t.shape for t in a] == [t.shape for t in b]
    assert all(bool(t.isfinite().all()) for t in b), "the truth is not finite"
    return max(float((x - y).detach().abs().max() / (1 + y.detach().abs().max())) for x, y in zip(a, b, strict=True))


def hold(f, g, mode, x, **given: Any) -> None:
    gap = distance(mode(lambda *a: f(*a, **given), x), mode(lambda *a: g(*a, **given), x))
    assert gap <= EQUAL, f"{gap:.1e}"


def leaves(x):
    return tuple(t.clone().requires_grad_() for t in x)


def along(x, seed: int = 7):
    """A direction, made of plain operations so that compiled and batched code may make it too."""
    return tuple(torch.arange(seed + i, seed + i + t.numel(), dtype=t.dtype).cos().reshape(t.shape) for i, t in enumerate(x))


def weigh(y: Tensor) -> Tensor:
    return (y * torch.arange(y.numel(), dtype=y.dtype).cos().reshape(y.shape)).sum()


def curved(y: Tensor) -> Tensor:
    return weigh(torch.sin(y))


def double_backward(f, x):
    a = leaves(x)
    first = torch.autograd.grad(curved(f(*a)), a, create_graph=True)
    return torch.autograd.grad(first, a, along(x))


def hvp(f, x):
    return jvp(lambda *a: vjp(lambda *b: curved(f(*b)), *a)[1](torch.ones((), dtype=x[0].dtype)), x, along(x))


def through_a_tangent(f, x):
    """As in MeanFlow's loss with nothing detached: gradients in the place and in the tangent."""
    return grad(lambda *a: curved(jvp(f, a[:3], a[3:])[1]), tuple(range(6)))(*x, *along(x))


MODES = {
    "value": lambda f, x: f(*x),
    "backward": lambda f, x: (lambda a: torch.autograd.grad(curved(f(*a)), a))(leaves(x)),
    "jvp": lambda f, x: jvp(f, x, along(x)),
    "jvp in the keys": lambda f, x: jvp(lambda k: f(x[0], k, x[2]), (x[1],), (along(x)[1],)),
    "vjp": lambda f, x: vjp(lambda *a: curved(f(*a)), *x)[1](torch.ones((), dtype=x[0].dtype)),
    "reverse over reverse": double_backward,
    "forward over reverse": hvp,
    "reverse over forward": through_a_tangent,
    "forward over forward": lambda f, x: jvp(lambda *a: jvp(f, a, along(x))[1], x, along(x, 20)),
    "vmap": lambda f, x: vmap(f, (1, 0, None))(torch.stack([x[0], 2 * x[0]], 1), torch.stack([x[1], -x[1]]), x[2]),
}
WHOLE = {  # whole matrices: for small problems
    "jacfwd": lambda f, x: jacfwd(f, (0, 1, 2))(*x),
    "jacrev": lambda f, x: jacrev(f, (0, 1, 2))(*x),
    "hessian": lambda f, x: hessian(lambda *a: curved(f(*a)), (0, 1, 2))(*x),
    "jacrev of jacrev": lambda f, x: jacrev(jacrev(lambda *a: curved(f(*a)), (0, 1, 2)), (0, 1, 2))(*x),
    "jacfwd of jacfwd": lambda f, x: jacfwd(jacfwd(lambda *a: curved(f(*a)), (0, 2)), (1,))(*x),
    "grad of jacfwd": lambda f, x: grad(lambda k: (jacfwd(lambda y: f(x[0], y, x[2]))(k) ** 2).sum())(x[1]),
    "grad of jacrev": lambda f, x: grad(lambda q: (jacrev(lambda y: f(y, x[1], x[2]))(q) ** 2).sum())(x[0]),
    "jvp of jacrev": lambda f, x: jvp(lambda k: jacrev(lambda y: f(x[0], y, x[2]))(k), (x[1],), (along(x)[1],)),
    "batch of vjps": lambda f, x: vmap(lambda q: vjp(lambda y: curved(f(y, *x[1:])), q)[1](torch.ones((), dtype=q.dtype)), -1)(
        torch.stack([x[0], 2 * x[0]], -1)
    ),
}


@st.composite
def problems(draw) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Inputs of two to five axes with broadcast ones, grouped heads or not, any mask that leaves each query a key."""
    n, m, d, d_v = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    lead = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    grouped = draw(st.booleans()) and len(lead) > 0
    heads = []
    for part in range(3):
        if grouped:
            share = draw(st.sampled_from([1, 2])) if part else 1
            heads.append((*lead[:-1], 4 // share if part else 4))
        elif part and draw(st.booleans()):  # fewer axes, or axes of one
            cut = draw(st.integers(0, len(lead)))
            heads.append(tuple(draw(st.sampled_from([1, s])) for s in lead[cut:]))
        else:
            heads.append(lead)
    seed = draw(st.integers(0, 999))
    sizes = ((n, d), (m, d), (m, d_v))
    x = tuple(gaussian(*h, *s, seed=seed + i) for i, (h, s) in enumerate(zip(heads, sizes, strict=True)))
    given: dict[str, Any] = {"enable_gqa": grouped, "scale": draw(st.sampled_from([None, None, 0.7, -1.3, 4.0]))}
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    whole = (*(heads[0] if grouped else lead), n, m)
    if kind == "causal":
        given["is_causal"] = True
    elif kind != "none":
        shape = tuple(draw(st.sampled_from([1, s])) for s in whole[draw(st.integers(0, len(whole) - 1)) :])
        mask = gaussian(*shape, seed=seed + 5)
        hidden = (gaussian(*shape, seed=seed + 6) > 0.3) & (torch.arange(shape[-1]) > 0)
        given["attn_mask"] = ~hidden if kind == "bool" else mask.masked_fill(hidden, -torch.inf)
    if kind in ("none", "causal") and n <= m and draw(st.booleans()):
        given["window"] = draw(st.integers(1, 4))
    if draw(st.integers(0, 2)) == 0:
        given["softcap"] = draw(st.sampled_from([0.5, 3.0]))
    return x, given


@pytest.mark.slow
@given(problem=problems(), mode=st.sampled_from(list(MODES)))
@settings(max_examples=150)
def test_equals_torch_in_every_argument_and_mode(problem, mode):
    x, given = problem
    if mode == "vmap":  # torch's own batching rule for its function loops where axes broadcast
        x = (
            tuple(t.expand(*torch.broadcast_shapes(*(y.shape[:-2] for y in x)), *t.shape[-2:]) for t in x)
            if not given["enable_gqa"]
            else x
        )
    hold(sdpa, plain, MODES[mode], x, **given)


SMALL = tuple(gaussian(1, h, t, w, seed=i) for i, (h, t, w) in enumerate([(2, 3, 2), (1, 3, 2), (1, 3, 1)]))
KINDS = {
    "full": {},
    "causal": {"is_causal": True},
    "bias": {"attn_mask": gaussian(2, 3, 3, seed=9)},
    "soft-capped window": {"window": 2, "softcap": 1.5},
}


@pytest.mark.parametrize("mode", WHOLE)
@pytest.mark.parametrize("kind", ["causal", "soft-capped window"])
def test_whole_matrices(mode, kind):
    hold(sdpa, plain, WHOLE[mode], SMALL, enable_gqa=True, **KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bias", "soft-capped window"])
def test_gradcheck(kind):
    def f(*x):
        return sdpa(*x, enable_gqa=True, **KINDS[kind])

    x = leaves(SMALL)
    assert gradcheck(
        f, x, check_forward_ad=True, check_backward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert gradgradcheck(f, x, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True)


def test_keys_with_more_axes_than_queries():
    q, k, v = gaussian(1, 1, 3, 2, seed=0), gaussian(1, 1, 2, 3, 2, seed=1), gaussian(1, 1, 2, 3, 2, seed=2)
    assert distance(sdpa(q, k, v), plain(q, k, v)) <= EQUAL


def test_several_tiles(monkeypatch):
    """More than one tile each way, with blocks cut by a causal mask."""
    monkeypatch.setattr(tiled.TileSize, "on", lambda device: tiled.TileSize(8, 8, leaf=4, elements=128))
    x = tuple(gaussian(1, h, t, w, seed=i) for i, (h, t, w) in enumerate([(4, 21, 3), (2, 26, 3), (2, 26, 2)]))
    for mode in MODES.values():
        hold(sdpa, plain, mode, x, enable_gqa=True, is_causal=True)


def test_a_query_that_sees_nothing_gives_zero_as_in_torch():
    """Where torch's second derivatives are NaN, ours are those of zero."""
    q, k, v = (gaussian(1, 2, 3, 2, seed=i) for i in range(3))
    mask = torch.tensor([[True, False, True], [False] * 3, [True] * 3])
    for name in ("value", "backward", "jvp", "reverse over reverse"):
        hold(sdpa, plain, MODES[name], (q, k, v), attn_mask=mask)
    assert all(bool(t.isfinite().all()) for t in through_a_tangent(lambda *x: sdpa(*x, attn_mask=mask), (q, k, v)))


def test_dual_numbers_and_backward_inside_them():
    x, t = SMALL, along(SMALL)
    want = through_a_tangent(lambda *a: plain(*a, enable_gqa=True), x)
    a = leaves(x)
    with forward_ad.dual_level():
        out = sdpa(*(forward_ad.make_dual(p, r) for p, r in zip(a, t, strict=True)), enable_gqa=True)
        tangent = forward_ad.unpack_dual(out).tangent
        assert tangent is not None
        inside = torch.autograd.grad(curved(tangent), a, retain_graph=True)
    assert distance(inside, want[:3]) <= EQUAL
    assert distance(torch.autograd.grad(curved(tangent), a), want[:3]) <= EQUAL


def test_dual_numbers_inside_compiled_code():
    """Its graph enters their level below Python, where `forward_ad` does not see it."""

    def tangent(*a):
        with forward_ad.dual_level():
            out = sdpa(*(forward_ad.make_dual(p, r) for p, r in zip(a, along(SMALL), strict=True)), enable_gqa=True)
            return forward_ad.unpack_dual(out).tangent

    assert distance(torch.compile(tangent, backend="eager")(*SMALL), tangent(*SMALL)) <= EQUAL


@pytest.mark.parametrize(
    ("name", "run", "passed"),
    [
        ("Attend", lambda f, x: jvp(f, x, x), 1),
        ("AttendJvp", lambda f, x: jvp(f, x, x), 0),
        ("Attend", lambda f, x: jacfwd(f, (0, 1, 2))(*x), 1),
        ("AttendJvp", lambda f, x: jvp(f, leaves(x), x), 1),
        ("AttendJvp", lambda f, x: jvp(lambda *a: jvp(f, a, x)[1], x, x), 1),
    ],
)
def test_levels_that_differentiate_nothing_have_no_graph(name, run, passed, monkeypatch):
    function, calls = getattr(autograd, name), []
    setup = function.setup_context
    monkeypatch.setattr(function, "setup_context", staticmethod(lambda *a: (calls.append(name), setup(*a))[1]))
    run(sdpa, tuple(gaussian(1, 1, 2, 2, seed=i) for i in range(3)))
    assert len(calls) == passed


def test_no_grad_holds_for_all_levels_further_out():
    """As in torch: a constant inside a function that is differentiated in forward mode, or twice."""
    q, k, v = (gaussian(1, 2, 3, 2, seed=i) for i in range(3))
    weights = leaves((k, v))
    with torch.no_grad():
        moved = jvp(lambda q: sdpa(q, *weights), (q,), (q,))
    assert not any(t.requires_grad for t in moved)

    def still(f):
        def product(q):
            with torch.no_grad():
                weighed = f(q, k, v)
            return curved(weighed * q)

        return product

    assert distance(*(grad(lambda q, f=f: jvp(still(f), (q,), (k,))[1])(q) for f in (sdpa, plain))) <= EQUAL
    assert distance(*(grad(lambda q, f=f: curved(grad(still(f))(q)))(q) for f in (sdpa, plain))) <= EQUAL


def test_a_mask_that_is_learned_gets_its_derivatives():
    q, k, v = (gaussian(2, 3, 4, 2, seed=i) for i in range(3))
    bias = gaussian(3, 4, 4, seed=4)
    for mode in (lambda f: grad(lambda b: curved(f(b)))(bias), lambda f: jvp(f, (bias,), (bias,)), lambda f: jacfwd(f)(bias)):
        assert distance(mode(lambda b: sdpa(q, k, v, b)), mode(lambda b: plain(q, k, v, attn_mask=b))) <= EQUAL


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_precisions(dtype):
    x = tuple(gaussian(2, 2, 9, 4, seed=i).to(dtype) for i in range(3))
    got = jvp(lambda *a: sdpa(*a, is_causal=True), x, x)
    want = jvp(lambda *a: plain(*a, is_causal=True), *(tuple(t.double() for t in x),) * 2)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        assert float((a.double() - b).norm() / b.norm()) < 4 * torch.finfo(dtype).eps


def test_autocast():
    x = tuple(gaussian(1, 1, 5, 4, seed=i, dtype=torch.float32) for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        a = leaves(x)
        out = sdpa(*a)
        assert out.dtype == TORCHS(*x).dtype == torch.bfloat16
        grads = torch.autograd.grad(out.float().square().sum(), a)
    b = leaves(x)
    want = torch.autograd.grad(plain(*b).square().sum(), b)
    for got, true in zip(grads, want, strict=True):
        assert got.dtype == torch.float32
        assert float((got - true).norm() / true.norm()) < 0.03


def test_empty_sequences():
    q, k, v = gaussian(2, 3, 4, seed=0), gaussian(2, 0, 4, seed=1), gaussian(2, 0, 5, seed=2)
    assert torch.equal(sdpa(q, k, v), torch.zeros(2, 3, 5, dtype=q.dtype))
    assert sdpa(q[:, :0], q, q).shape == (2, 0, 4)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("jvp", (1, 2, 3, 2)), ("vjp", (1, 2, 3, 1)), ("hvp", (1, 2, 3, 2))],
)
def test_batches_of_directions_share_one_call(name, shape, monkeypatch):
    """A batching rule, not a loop: a hundred directions are one call with a hundred probes."""
    made = []
    start = tiled.Blocked.__init__

    def counted(self, *args, **kwargs):
        made.append(1)
        start(self, *args, **kwargs)

    monkeypatch.setattr(tiled.Blocked, "__init__", counted)
    directions = gaussian(100, *shape, seed=1)

    def f(q):
        return sdpa(q, *SMALL[1:], enable_gqa=True)

    q = SMALL[0]
    run = {
        "jvp": lambda t: jvp(f, (q,), (t,))[1],
        "vjp": lambda g: vjp(f, q)[1](g)[0],
        "hvp": lambda t: jvp(grad(lambda y: curved(f(y))), (q,), (t,))[1],
    }[name]
    assert vmap(run)(directions).shape[0] == 100
    assert len(made) <= 5


def test_third_derivatives_are_refused_in_one_sentence():
    def f(q):
        return curved(sdpa(q, q, q))

    q = gaussian(1, 1, 2, 2, seed=0)
    thrice = [
        lambda: grad(lambda y: hessian(f)(y).sum())(q),
        lambda: jacfwd(jacfwd(jacfwd(f)))(q),
        lambda: jacrev(jacrev(jacrev(f)))(q),
    ]
    for run in thrice:
        with pytest.raises(BadInputError, match="expected first or second derivatives of attention, got a third"):
            run()


Q = torch.zeros(2, 3, 4)
BAD: dict[str, tuple[tuple, dict[str, Any]]] = {
    "one axis": ((Q[0, 0], Q, Q), {}),
    "whole numbers": ((Q.int(), Q.int(), Q.int()), {}),
    "complex": ((Q.to(torch.cfloat), Q.to(torch.cfloat), Q.to(torch.cfloat)), {}),
    "no tensor": (([[0.0]], Q, Q), {}),
    "two dtypes": ((Q, Q, Q.double()), {}),
    "widths": ((Q, Q[..., :3], Q), {}),
    "lengths": ((Q, Q, Q[:, :2]), {}),
    "batches": ((Q, Q.expand(3, 2, 3, 4)[:, :1].squeeze(1), Q), {}),
    "batches of values, keys without": ((Q, Q[0], Q[:1].expand(3, 3, 4)), {}),
    "heads without gqa": ((torch.zeros(4, 3, 2), torch.zeros(2, 3, 2), torch.zeros(2, 3, 2)), {}),
    "heads that do not divide": ((torch.zeros(3, 3, 2), torch.zeros(2, 3, 2), torch.zeros(2, 3, 2)), {"enable_gqa": True}),
    "gqa without heads": ((Q[0], Q[0], Q[0]), {"enable_gqa": True}),
    "dropout of everything": ((Q, Q, Q), {"dropout_p": 1.0}),
    "negative dropout": ((Q, Q, Q), {"dropout_p": -0.1}),
    "dropout beside a learned mask": ((Q, Q, Q, torch.zeros(3, 3, requires_grad=True)), {"dropout_p": 0.1}),
    "mask and causal": ((Q, Q, Q), {"attn_mask": torch.ones(3, 3, dtype=torch.bool), "is_causal": True}),
    "mask of whole numbers": ((Q, Q, Q), {"attn_mask": torch.ones(3, 3, dtype=torch.int64)}),
    "mask in float64": ((Q, Q, Q), {"attn_mask": torch.ones(3, 3, dtype=torch.float64)}),
    "mask of another shape": ((Q, Q, Q), {"attn_mask": torch.ones(3, 2)}),
    "mask with more axes": ((Q, Q, Q), {"attn_mask": torch.ones(5, 2, 3, 3)}),
    "window": ((Q, Q, Q), {"window": 0}),
    "softcap": ((Q, Q, Q), {"softcap": -1.0}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence(name):
    args, given = BAD[name]
    with pytest.raises(BadInputError) as caught:
        sdpa(*args, **given)
    message = str(caught.value)
    assert message.startswith("expected ")
    assert ", got " in message
    assert "; " in message


def with_dropout(q, k, v, p=0.4, **given):
    torch.manual_seed(3)
    return sdpa(q, k, v, dropout_p=p, **given)


def dropout_written_out(factors):
    """The plain formula, with the weights that are left out given."""

    def f(q, k, v, softcap=None, **given):
        s = q @ k.mT * q.shape[-1] ** -0.5
        s = s if softcap is None else softcap * torch.tanh(s / softcap)
        if given:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        return (torch.softmax(s, -1) * factors) @ v

    return f


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "vmap"])
@pytest.mark.parametrize("given", [{"is_causal": True}, {"softcap": 1.5}])
def test_dropout_leaves_the_same_weights_out_in_every_derivative(mode, given, monkeypatch):
    x = tuple(gaussian(2, 2, 9, w, seed=i) for i, w in enumerate((3, 3, 2)))
    factors = with_dropout(torch.zeros_like(x[0]), x[1], torch.eye(9, dtype=x[0].dtype).expand(2, 2, 9, 9)) * 9
    assert {round(float(f), 6) for f in factors.unique()} == {0.0, round(1 / 0.6, 6)}
    monkeypatch.setattr(tiled.TileSize, "on", lambda device: tiled.TileSize(4, 4, leaf=2, elements=32))
    hold(with_dropout, dropout_written_out(factors), MODES[mode], x, **given)


def test_dropout_leaves_out_as_many_as_it_says():
    n, p = 300, 0.3
    zero = torch.zeros(1, 4, n, 1, dtype=torch.float64)
    kept = with_dropout(zero, zero, torch.eye(n, dtype=torch.float64).expand(1, 4, n, n), p=p) > 0
    spread = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * spread
    for axis in (-1, -2, 1):  # neighbours are independent
        both = (kept & kept.roll(1, axis)).double().mean()
        assert abs(float(both) - (1 - p) ** 2) < 5 * spread
    assert not torch.equal(*(sdpa(zero, zero, kept.double(), dropout_p=p) for _ in range(2)))


def test_nan_stays_nan():
    q, k, v = (gaussian(1, 1, 4, 2, seed=i) for i in range(3))
    q[..., 1, :] = math.nan
    assert bool(sdpa(q, k, v)[..., 1, :].isnan().all())
    a = leaves((q, k, v))
    assert all(bool(t.isnan().any()) for t in torch.autograd.grad(sdpa(*a).sum(), a))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of torch's own, where it finds a GPU
def test_compiled_without_a_graph_break():
    x, g = SMALL, gaussian(1, 2, 3, 1, seed=4)

    def f(*a):
        return torch.sin(sdpa(*a, is_causal=True, enable_gqa=True))

    def reference(*a):
        return torch.sin(plain(*a, is_causal=True, enable_gqa=True))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    a = leaves(x)
    assert distance(torch.autograd.grad((compiled(*a) * g).sum(), a), vjp(reference, *x)[1](g)) <= EQUAL
    for mode in ("jvp", "forward over reverse", "reverse over forward"):
        torch._dynamo.reset()
        run = torch.compile(lambda *a, mode=mode: MODES[mode](f, a), fullgraph=True, backend="aot_eager")
        assert distance(run(*x), MODES[mode](reference, x)) <= EQUAL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_mask_that_is_learned_is_compiled_without_a_graph_break():
    q, k, v, bias = leaves((*(gaussian(2, 3, 4, 2, seed=i) for i in range(3)), gaussian(3, 4, 4, seed=4)))
    compiled = torch.compile(lambda b: sdpa(q, k, v, b, window=3, softcap=5.0), fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(curved(sdpa(q, k, v, bias, window=3, softcap=5.0)), bias)
    assert distance(torch.autograd.grad(curved(compiled(bias)), bias), want) <= EQUAL


@pytest.mark.slow
def test_exported():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    program = torch.export.export(Module(), SMALL)
    assert [n for n in program.graph.nodes if "howsmooth.attend" in str(n.target)]
    assert distance(program.module()(*SMALL), plain(*SMALL, is_causal=True, enable_gqa=True)) <= EQUAL


@pytest.mark.parametrize("name", ["attend", "attend_jvp", "attend_vjp", "attend_hvp", "attend_jvp2"])
def test_the_operators_keep_torchs_rules(name):
    how = (0.5, None, True, None, 0, None, 0, 0, 0.0, None)
    (q, k, v), (dq, dk, dv) = SMALL, along(SMALL)
    ops = torch.ops.howsmooth
    o, lse = ops.attend(q, k, v, None, *how)
    do, dlse = ops.attend_jvp(q, k, v, None, o, lse, dq, dk, dv, *how)
    moving = {
        "attend": (),
        "attend_jvp": (o, lse, dq, dk, dv),
        "attend_vjp": (o, lse, do),
        "attend_hvp": (o, lse, dq, dk, dv, do, dlse, o),
        "attend_jvp2": (o, lse, dq, dk, dv, dlse, q, k, v, dlse),
    }[name]
    torch.library.opcheck(
        getattr(ops, name).default, (q, k, v, None, *moving, *how), test_utils=("test_schema", "test_faketensor")
    )
