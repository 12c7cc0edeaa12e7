"""Every refusal is one sentence: what was expected, what came."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import howsmooth as hs
from howsmooth import errors
from howsmooth.errors import BadFunctionError, BadInputError, HowSmoothError, NoConvergenceError
from howsmooth.spectral import Composed, Weighted
from problems import hostile
from problems.spectra import Matrix, attention

UNREADABLE = ("sparse", "csr", "meta", "nested", "jagged", "fake", "masked", "mkldnn", "lazy", "float8", "quantised")
EYE = torch.eye(4)
X = torch.linspace(-1, 1, 12).reshape(3, 4)
NAN, INF = float("nan"), float("inf")
ask: Any = hs  # with arguments of types that it does not take


def broken(t: Tensor, entry: float) -> Tensor:
    t = t.clone()
    t.view(-1)[1] = entry
    return t


def layer(**changes: Any) -> hs.Attention:
    weights: dict[str, Any] = {"w_q": EYE, "w_k": EYE, "w_v": EYE, "w_o": EYE}
    return hs.Attention(**(weights | changes))


def measure(f: Any = None, x: Any = X, **options: Any) -> Any:
    return hs.lipschitz(layer() if f is None else f, x, **options)


def loud(f: Any, **options: Any) -> Any:
    return measure(f, solver=hs.GolubKahan(), **options)


BAD_TOKENS: dict[str, Callable[[], Any]] = {
    "nan tokens": lambda: measure(x=broken(X, NAN)),
    "inf tokens": lambda: measure(x=broken(X, INF)),
    "one axis": lambda: measure(x=X[0]),
    "four axes": lambda: measure(x=X[None, None]),
    "batched, two axes": lambda: hs.lipschitz_batch(layer(), X),
    "not batched, three axes": lambda: measure(x=X[None]),
    "other width": lambda: measure(x=X[:, :3]),
    "no tokens": lambda: measure(x=X[:0]),
    "no batch": lambda: measure(x=X[None][:0]),
    "integers": lambda: measure(x=X.long()),
    "booleans": lambda: measure(x=X > 0),
    "complex": lambda: measure(x=X + 0j),
    "numpy": lambda: measure(x=X.numpy()),
    "list": lambda: measure(x=X.tolist()),
    "call, one axis": lambda: layer()(X[0]),
    "call, other width": lambda: layer()(X[:, :3]),
    "call, integers": lambda: layer()(X.long()),
    "call, numpy": lambda: layer()(X.numpy()),  # pyright: ignore[reportCallIssue, reportArgumentType]
    **{f"{kind} tokens": lambda kind=kind: measure(x=hostile.draw(kind)) for kind in UNREADABLE},
    **{f"call, {kind} tokens": lambda kind=kind: layer()(hostile.draw(kind)) for kind in UNREADABLE},
    **{f"a batch, {kind}": lambda kind=kind: hs.lipschitz_batch(layer(), hostile.draw(kind)) for kind in UNREADABLE},
    **{f"bounds, {kind} tokens": lambda kind=kind: hs.bounds(layer(), hostile.draw(kind)) for kind in UNREADABLE},
    **{f"splitting, {kind} tokens": lambda kind=kind: hs.splitting(layer(), hostile.draw(kind)) for kind in UNREADABLE},
    **{f"jacobian, {kind} tokens": lambda kind=kind: hs.jacobian(layer(), hostile.draw(kind)) for kind in UNREADABLE},
    **{f"product, {kind}": lambda kind=kind: hs.jacobian(layer(), X) @ hostile.draw(kind) for kind in UNREADABLE},
    **{f"{kind} atoms": lambda kind=kind: hs.Measure(hostile.draw(kind)) for kind in UNREADABLE},
    **{f"around {kind} tokens": lambda kind=kind: hs.BallAround(hostile.draw(kind), 1.0) for kind in UNREADABLE},
}

BAD_LAYERS: dict[str, Callable[[], Any]] = {
    **{f"nan {w}": lambda w=w: layer(**{w: broken(EYE, NAN)}) for w in ("w_q", "w_k", "w_v", "w_o")},
    **{f"{kind} w_q": lambda kind=kind: layer(w_q=hostile.draw(kind)) for kind in UNREADABLE},
    **{f"{kind} attention_mask": lambda kind=kind: layer(attention_mask=hostile.draw(kind)) for kind in UNREADABLE},
    "no w_q": lambda: layer(w_q=None),
    "no w_v": lambda: layer(w_v=None),
    **{f"causal {word!r}": lambda word=word: layer(causal=word) for word in ("False", 0, 1, None)},
    "causal matrices": lambda: hs.Attention.from_matrices(EYE, EYE, causal="False"),  # pyright: ignore[reportArgumentType]
    "causal tokens": lambda: hs.Measure.from_tokens(X, causal="False"),  # pyright: ignore[reportArgumentType]
    "interleaved": lambda: hs.Rotary(X, X, interleaved="no"),  # pyright: ignore[reportArgumentType]
    **{
        f"{name} {value!r}": lambda name=name, value=value: layer(**{name: value})
        for name in ("heads", "kv_heads", "scale", "softcap", "window")
        for value in ("1", [1], 1j, NAN, INF, True, 10**400)
    },
    **{f"eps {eps!r}": lambda eps=eps: ask.LayerNorm(torch.ones(4), eps=eps) for eps in ("1e-5", None, True, [1e-5])},
    "inf w_v": lambda: layer(w_v=broken(EYE, INF)),
    "nan b_q": lambda: layer(b_q=broken(torch.zeros(4), NAN)),
    "integer w_q": lambda: layer(w_q=EYE.long()),
    "complex w_q": lambda: layer(w_q=EYE + 0j),
    "numpy w_q": lambda: layer(w_q=EYE.numpy()),
    "vector w_k": lambda: layer(w_k=torch.ones(4)),
    "w_k of another width": lambda: layer(w_k=torch.ones(4, 5)),
    "w_v of another width": lambda: layer(w_v=torch.ones(4, 5)),
    "w_o of another width": lambda: layer(w_o=torch.ones(4, 5)),
    "keys wider than queries": lambda: layer(w_k=torch.ones(8, 4)),
    "heads do not divide": lambda: layer(heads=3),
    "no heads": lambda: layer(heads=0),
    "kv_heads do not divide": lambda: layer(heads=4, kv_heads=3),
    "no kv_heads": lambda: layer(kv_heads=0),
    "b_q of another size": lambda: layer(b_q=torch.zeros(3)),
    "b_k of another size": lambda: layer(b_k=torch.zeros(5)),
    "b_v as a matrix": lambda: layer(b_v=torch.zeros(4, 1)),
    "b_o of another size": lambda: layer(b_o=torch.zeros(1)),
    "integer b_o": lambda: layer(b_o=torch.zeros(4).long()),
    "list b_o": lambda: layer(b_o=[0.0] * 4),
    "nan scale": lambda: layer(scale=NAN),
    "infinite scale": lambda: layer(scale=INF),
    "window 0": lambda: layer(window=0),
    "negative window": lambda: layer(window=-1),
    "softcap 0": lambda: layer(softcap=0.0),
    "negative softcap": lambda: layer(softcap=-1.0),
    "nan softcap": lambda: layer(softcap=NAN),
    "bias of two axes": lambda: layer(bias=torch.zeros(3, 3)),
    "nan bias": lambda: layer(bias=torch.full((1, 1, 3, 3), NAN)),
    "positive infinite bias": lambda: layer(bias=torch.full((1, 1, 3, 3), INF)),
    "bias for more tokens": lambda: measure(layer(bias=torch.zeros(1, 1, 5, 5))),
    "bias for more heads": lambda: measure(layer(bias=torch.zeros(1, 2, 3, 3))),
    "bias without keys": lambda: measure(layer(bias=torch.zeros(1, 1, 3, 1))),
    "numpy bias": lambda: layer(bias=np.zeros((1, 1, 3, 3))),
    "mask of another length": lambda: measure(layer(attention_mask=torch.ones(1, 4).bool())),
    "mask of another batch": lambda: measure(layer(attention_mask=torch.ones(2, 3).bool())),
    "mask with an empty row": lambda: layer(attention_mask=torch.tensor([[True, True], [False, False]])),
    "mask of floats": lambda: measure(layer(attention_mask=torch.ones(1, 3))),
    "mask as a list": lambda: layer(attention_mask=[[True, True, True]]),
    "A not square": lambda: hs.Attention.from_matrices(torch.ones(3, 4), EYE),
    "A a vector": lambda: hs.Attention.from_matrices(torch.ones(4), EYE),
    "V of another width": lambda: hs.Attention.from_matrices(EYE, torch.ones(4, 3)),
    "V without heads": lambda: hs.Attention.from_matrices(EYE[None], EYE),
    "V of other heads": lambda: hs.Attention.from_matrices(EYE[None], EYE.repeat(2, 1, 1)),
    "A as a list": lambda: hs.Attention.from_matrices([[1.0]], EYE),  # pyright: ignore[reportArgumentType]
    "nan A": lambda: hs.Attention.from_matrices(broken(EYE, NAN), EYE),
    "negative eps": lambda: hs.LayerNorm(torch.ones(4), eps=-1e-5),
    "nan eps": lambda: hs.RMSNorm(torch.ones(4), eps=NAN),
    "matrix norm weight": lambda: hs.LayerNorm(EYE),
    "integer norm weight": lambda: hs.LayerNorm(torch.ones(4).long()),
    "numpy norm weight": lambda: hs.LayerNorm(np.ones(4)),  # pyright: ignore[reportArgumentType]
    "nan norm weight": lambda: hs.LayerNorm(broken(torch.ones(4), NAN)),
    "norm bias of another size": lambda: hs.LayerNorm(torch.ones(4), torch.ones(3)),
    "nan norm bias": lambda: hs.LayerNorm(torch.ones(4), broken(torch.ones(4), NAN)),
    "norm of a constant token": lambda: measure(hs.LayerNorm(torch.ones(4), eps=0.0), torch.ones(3, 4)),
    "composition of other widths": lambda: measure(layer() @ hs.LayerNorm(torch.ones(3)), X[:, :3]),
    "call of other widths": lambda: (layer() @ hs.LayerNorm(torch.ones(3)))(X[:, :3]),
    "operators of other widths": lambda: Composed(Matrix(torch.ones(1, 2, 3)), Matrix(torch.ones(1, 2, 3))),
    "weights that do not fit": lambda: Weighted(Matrix(torch.ones(1, 2, 3)), torch.ones(3), torch.ones(3)),
}

BAD_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "ignores x": lambda: measure(lambda x: torch.ones(3)),
    "numpy": lambda: measure(lambda x: x + torch.from_numpy(x.detach().numpy())),
    "returns a tuple": lambda: measure(lambda x: (x, x)),
    "returns nothing": lambda: measure(lambda x: None),
    "returns integers": lambda: measure(lambda x: x.long()),
    "returns complex": lambda: measure(lambda x: x + 0j),
    "returns nan": lambda: measure(lambda x: (x - 5).sqrt()),
    "returns infinity": lambda: measure(lambda x: 1 / (x * 0)),
    "returns no entries": lambda: measure(lambda x: x[:0]),
    "infinite slope": lambda: measure(torch.sqrt, torch.zeros(3)),
    "infinite slope, products": lambda: loud(torch.sqrt, x=torch.zeros(3)),
    "dropout": lambda: measure(nn.Dropout(0.5).train()),
    "dropout in a block": lambda: measure(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).train()),
    "mixes items": lambda: hs.lipschitz_batch(lambda x: x - x.mean(0), torch.stack([X, 2 * X, 3 * X])),
    "sums over items": lambda: hs.lipschitz_batch(lambda x: x.sum(0), torch.stack([X, 2 * X])),
    "one output for a batch": lambda: hs.lipschitz_batch(lambda x: x.sum(), torch.stack([X, 2 * X])),
    "a float32 module, float64 x": lambda: measure(nn.Linear(4, 4), X.double()),
    "half": lambda: measure(torch.sin, X.half()),
    "bfloat16": lambda: measure(torch.sin, X.bfloat16()),
    "complex": lambda: measure(torch.sin, X + 0j),
    "nan input": lambda: measure(torch.sin, broken(X, NAN)),
    "a batch of numbers": lambda: hs.lipschitz_batch(torch.sin, X[0, 0]),
    "a batch of nothing": lambda: measure(torch.sin, X[:0]),
    "not callable": lambda: measure(X),
    "a string": lambda: measure("attention"),
}

BAD_OPTIONS: dict[str, Callable[[], Any]] = {
    **{f"radius {r!r}": lambda r=r: ask.bounds(layer(), n=3, radius=r) for r in (NAN, INF, -1, "1", True, [1.0])},
    **{f"within {r!r}": lambda r=r: measure(within=r) for r in (NAN, INF, -1, -1e-9, 1e200, "1", True, [1.0])},
    **{f"per {p!r}": lambda p=p: measure(within=0.1, per=p) for p in ("word", None, 1)},
    **{f"tokens {t!r}": lambda t=t: measure(within=0.1, tokens=t) for t in ([], [-1], [99], [0.5], "0", 3)},
    **{f"near steps {k!r}": lambda k=k: measure(within=0.1, steps=k) for k in (-1, 1.5, "3", True)},
    "per without within": lambda: measure(per="sequence"),
    "steps without within": lambda: measure(steps=3),
    "within of a function": lambda: measure(torch.tanh, within=0.1),
    "within of a measure": lambda: measure(x=hs.Measure(X), within=0.1),
    **{f"ball {r!r}": lambda r=r: ask.Ball(r) for r in (1e200, NAN, INF, 0, -1, "1", True, None)},
    **{f"n {n!r}": lambda n=n: ask.bounds(layer(), n=n, radius=1.0) for n in (0, -1, 2.0, "3", True, NAN)},
    **{f"steps {k!r}": lambda k=k: ask.worst_case(layer(), 2, 1.0, steps=k) for k in (-1, 1.5, "3", True)},
    **{f"worst seed {k!r}": lambda k=k: ask.worst_case(layer(), 2, 1.0, seed=k) for k in (-1, 1.5, "3", 2**64)},
    **{f"p {p!r}": lambda p=p: ask.wasserstein(hs.Measure(X), hs.Measure(X), p=p) for p in (0.5, NAN, INF, "2", True)},
    "method": lambda: hs.wasserstein(hs.Measure(X), hs.Measure(X), method=X),  # pyright: ignore[reportArgumentType]
    "device": lambda: layer().to("meta"),
    "device that is not there": lambda: layer().to("cuda:99"),
    "float8": lambda: layer().to(torch.float8_e4m3fn),
    "composed with a function": lambda: layer() @ torch.sin,  # pyright: ignore[reportOperatorIssue]
    **{f"tol {tol}": lambda tol=tol: measure(tol=tol) for tol in (0.0, -1e-3, 1.0, 2.0, NAN, INF)},
    **{f"certify {c}": lambda c=c: measure(certify=c) for c in (0.0, -0.02, NAN, INF)},
    "tol finer than any precision": lambda: loud(layer(), tol=1e-15),
    "certify finer than float64": lambda: loud(layer(), certify=1e-15),
    "tol finer than float64": lambda: loud(layer(), x=X.double(), tol=1e-15),
    "no steps": lambda: hs.GolubKahan(max_steps=0),
    "negative steps": lambda: hs.GolubKahan(max_steps=-1),
    **{f"delta {d}": lambda d=d: hs.GolubKahan(delta=d) for d in (0.0, 1.0, -0.1, 1.5, NAN)},
}

SOURCE = Path(hs.__file__).parent
FAMILY = {name for name in vars(errors) if name.endswith("Error")}

TABLE = BAD_TOKENS | BAD_LAYERS | {f"function: {k}": v for k, v in BAD_FUNCTIONS.items()} | BAD_OPTIONS


def check_message(error: HowSmoothError) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.startswith("expected ")
    assert " got " in text
    assert not text.endswith(".")
    assert len(text) < 250
    assert "Traceback" not in text
    assert "object at 0x" not in text
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize("name", TABLE)
def test_refused_in_one_sentence(name: str):
    with pytest.raises(HowSmoothError) as caught:
        TABLE[name]()
    assert type(caught.value) is not HowSmoothError
    check_message(caught.value)


@pytest.mark.parametrize("name", ["dropout", "numpy", "mixes items", "returns a tuple"])
def test_kind_of_function_errors(name: str):
    with pytest.raises(BadFunctionError):
        BAD_FUNCTIONS[name]()


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_kind_of_token_errors(name: str):
    with pytest.raises(BadInputError):
        BAD_TOKENS[name]()


@pytest.mark.parametrize("kind", [BadInputError, BadFunctionError, NoConvergenceError])
def test_one_family(kind: type[HowSmoothError]):
    assert issubclass(kind, HowSmoothError)
    assert issubclass(kind, ValueError)
    assert hs.HowSmoothError is HowSmoothError


@pytest.mark.parametrize("text", ["expected x\ngot y", "bad input", "expected x", "got y", "expected a, got b."])
def test_checker_refuses(text: str):
    with pytest.raises(AssertionError):
        check_message(BadInputError(text))


def refusals(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of the refusals in a module that are written out where they are raised, with … for what is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name, said = ast.unparse(node.exc.func), node.exc.args[0]
            parts = said.values if isinstance(said, ast.JoinedStr) else [said] if isinstance(said, ast.Constant) else []
            if name in FAMILY and parts:
                yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in parts)


def whole(said: str) -> bool:
    """Whether a refusal says what was expected, what came, and what to do."""
    came = " got" in said or "which is missing" in said or ", …" in said
    return said.startswith("…") or (said.startswith("expected ") and came and ("; " in said or said.endswith("…")))


def test_every_refusal_says_what_was_expected_what_came_and_what_to_do():
    files = sorted(path for path in SOURCE.rglob("*.py") if path.name != "gguf.py")  # which adds the file and what to do
    written = [(path.name, line, said) for path in files for line, said in refusals(path.read_text("utf-8"))]
    assert len(written) > 400
    assert [found for found in written if not whole(found[2])] == []


@pytest.mark.parametrize(
    "said", ["not allowed", "expected a number; give one", "expected a number, got one", "got …, expected a number"]
)
def test_a_refusal_that_lacks_one_of_these_is_found(said: str):
    assert list(refusals(f"raise BadInputError({said!r})")) == [(1, said)]
    assert not whole(said)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("solver", [None, hs.GolubKahan()], ids=str)
def test_overflowing_logits_are_refused_or_right(sign: float, solver: hs.GolubKahan | None):
    """Logits of 1e60 do not fit float32: refused, or measured in float64, never NaN and never zero.

    Every pair of these tokens has a positive product, so attention goes wholly to the last token, or to the first.
    """
    f = layer(w_q=sign * 1e30 * EYE, w_k=1e30 * EYE, w_v=EYE, w_o=None)
    x = torch.arange(1.0, 4)[:, None] * torch.ones(4)
    try:
        est = hs.lipschitz(f, x, solver=solver)
    except HowSmoothError as error:
        check_message(error)
    else:
        assert est.lower == pytest.approx(3**0.5, rel=1e-3)  # three tokens copy one


def test_overflowing_weights_never_give_nan():
    for seed in range(10):
        f, x = attention(6, 4, seed, gain=1e30, dtype=torch.float32)
        f = hs.Attention(f.w_q, 1e30 * f.w_v, f.w_v, f.w_o)
        with pytest.raises(HowSmoothError, match=r"overflow|float64"):
            hs.lipschitz(f, x, solver=hs.GolubKahan())


def test_numbers_of_numpy_are_numbers():
    plain = layer(heads=2, scale=0.5, window=2, causal=True)
    numpys = layer(heads=np.int64(2), scale=np.float32(0.5), window=np.uint8(2), causal=np.True_)
    assert (numpys.heads, numpys.scale, numpys.window, numpys.causal) == (2, 0.5, 2, True)
    assert {type(v) for v in (numpys.heads, numpys.scale, numpys.window, numpys.causal)} == {int, float, bool}
    assert measure(numpys).value == measure(plain).value
    assert hs.bounds(plain, n=np.int64(3), radius=np.float64(2.0)).to_dict() == hs.bounds(plain, n=3, radius=2.0).to_dict()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_the_worst_input_of_a_module_in_its_own_precision(kind: torch.dtype):
    """Small searches are in float64, which a module in float32 knows only as a copy."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(kind)
    found = hs.worst_case(module, over=hs.BallAround(X.to(kind), 0.5), steps=3, restarts=2)
    assert found.estimate.lower <= found.estimate.upper
    assert found.value >= hs.lipschitz(module, X.to(kind)).value * (1 - 1e-6)
    assert {p.dtype for p in module.parameters()} == {kind}


def test_the_worst_input_of_a_function_that_knows_one_precision():
    weight = torch.linspace(-1, 1, 16).reshape(4, 4)
    found = hs.worst_case(lambda x: torch.tanh(x @ weight), over=hs.BallAround(X, 0.5), steps=2, restarts=2)
    assert found.tokens.dtype == torch.float32
    assert hs.worst_case(lambda x: 2 * x, over=hs.BallAround(X, 0.5), steps=2, restarts=2).value == pytest.approx(2.0)


def test_what_a_function_raises_is_the_cause():
    class Mine(RuntimeError):
        pass

    def f(x: Tensor) -> Tensor:
        raise Mine("of my own")

    with pytest.raises(BadFunctionError, match="Mine: of my own") as caught:
        hs.lipschitz(f, X)
    assert isinstance(caught.value.__cause__, Mine)
    with pytest.raises(BadFunctionError, match=r"takes torch.float32 of shape \(3, 4\)") as caught:
        hs.lipschitz(nn.Linear(5, 5), X)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_nothing_is_left_behind_by_a_refusal():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    with pytest.raises(BadFunctionError):
        hs.lipschitz(module, X)
    assert module.training
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
