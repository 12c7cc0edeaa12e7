"""The constant as a number to differentiate, and as a term of a loss (docs/explanation/penalty.md).

`σ = ⟨u, J v⟩` at a unit `u` that is held fixed and `v = Jᵀu/|Jᵀu|`. Where `(u, v)` is the top singular pair of `J`, its
derivative in the weights and in the input is that of the constant itself, since no first-order change of the pair changes `σ`.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.fx import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from howsmooth.errors import BadFunctionError, BadInputError, foreign, reason
from howsmooth.kernels.tensors import float32_products
from howsmooth.maps.base import Map, check_finite, check_input
from howsmooth.models import MapName, Model
from howsmooth.models.recorded import Recording, Recordings, not_the_same
from howsmooth.program.attention import answering
from howsmooth.program.modules import check_whole, unchanged, written_path
from howsmooth.settings import LayerChoice, choice, flag, number, whole
from howsmooth.spectral.operator import stream, unit_rows
from howsmooth.spectral.ritz import converged, krylov
from howsmooth.training.paths import FAST, LayerGraph, LayerJacobians, LayerTurn, Paths, own_answer, paths_of
from howsmooth.training.probe import FORWARD_MODE, Inputs, Probe, model_that_trains, untouched

_BASIS = 12  # vectors between restarts
_RECORDINGS = 64  # kept, of batches of different shapes
_FIRST = 8  # steps of a penalty where directions are drawn
_APART = 0.05  # how far differences of values may be from a product with the Jacobian, relative to it
_CONVERGED = {torch.float64: 1e-9, torch.float32: 1e-4}  # |JᵀJ v − σ² v|/σ² at which a direction is the top one

Function = Map | Callable[[Tensor], Tensor]


@final
class WarmStart:
    """Directions carried over from call to call of `smoothness`.

    Args:
        products: With `JᵀJ`, that each later call makes; the first one goes on until the directions have converged.
        v: Directions to begin from; none by default.

    >>> state = WarmStart(products=2)
    >>> smoothness(lambda x: 3 * x, torch.ones(2), state).item(), state.v is None
    (3.0, False)
    """

    def __init__(self, products: int = 1, v: Tensor | None = None):
        self.products = whole(products, "a whole number of products, at least 1", "the default is 1", least=1)
        if v is not None and not isinstance(v, Tensor):
            raise BadInputError(f"expected directions as a tensor, got {type(v).__name__}; leave v out to begin anew")
        self.v = v

    def __repr__(self) -> str:
        return f"WarmStart({self.products}, {'empty' if self.v is None else 'directions ' + str(tuple(self.v.shape))})"


def smoothness(f: Function, x: Tensor, state: WarmStart | None = None, *, batched: bool = False) -> Tensor:
    """The local Lipschitz constant of `f` at `x` as a tensor: differentiable in the weights of `f` and in `x`.

    Args:
        f: An attention layer or another map of this package, at tokens (…, n, d), which gives a number for every sequence;
            or any torch function or module of one tensor, at one input, or at many along the first axis where `batched`.
        x: Tokens, or the input of the function or module, which is evaluated in eval mode and in the precision of `x`.
        state: A `WarmStart`, which makes the next call cheap where weights and input have changed little; by default every
            call finds the top direction anew.
        batched: Whether the first axis of `x` counts inputs of a function.

    Returns:
        A number, or one for every sequence, differentiable in `x` and in the weights of `f`.

    >>> import howsmooth as hs
    >>> w = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    >>> sigma = hs.smoothness(lambda x: x @ w.T, torch.zeros(2, dtype=torch.float64))
    >>> sigma.backward()
    >>> round(sigma.item(), 6), w.grad.abs().round(decimals=6).tolist()
    (3.0, [[1.0, 0.0], [0.0, 0.0]])
    """
    check_input(x)
    check_finite(x, "input")
    if state is not None and not isinstance(state, WarmStart):
        raise BadInputError(
            f"expected a howsmooth.training.WarmStart as state, got {type(state).__name__}; make one and keep it"
        )
    with ExitStack() as stack:
        stack.enter_context(_said())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(x.device.type, enabled=False))
        stack.enter_context(float32_products())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", FORWARD_MODE, DeprecationWarning)
        if isinstance(f, nn.Module):
            check_whole(f)
            stack.enter_context(unchanged(f))
            stack.enter_context(written_path())  # torch's fused encoder layers have no derivatives
        g, xs, lead = _by_items(f, x, flag(batched, "batched"))
        at = xs.detach()
        v = None if state is None else state.v
        known = None if v is None or v.shape != xs.shape else v.to(at)
        v = _turned(g, at, known, _BASIS if state is None else state.products)
        if state is not None:
            state.v = v
        with torch.no_grad():
            image = _along(g, at, v)[1]
        u = unit_rows(image.flatten(1)).reshape(image.shape)
        # by a backward pass: differentiated again, torch's forward mode holds the moments of norms fixed
        leaf = xs if xs.requires_grad else at.requires_grad_()
        (slope,) = torch.autograd.grad(g(leaf.clone()), leaf, u, create_graph=True, materialize_grads=True)
        if known is None:
            _check_values(g, at.detach(), v, image, slope)
        return slope.flatten(1).norm(dim=-1).reshape(lead)


@torch.no_grad()
def _check_values(g: Callable[[Tensor], Tensor], xs: Tensor, v: Tensor, image: Tensor, back: Tensor) -> None:
    """Refuse a derivative that is not that of the values, as `detach` and backward passes of one's own make it.

    image, back: `J v`, and `Jᵀ` of it at unit length.
    """
    step = torch.finfo(xs.dtype).eps ** (1 / 3) * max(1.0, float(xs.abs().max()))
    differences = (g(xs + step * v) - g(xs - step * v)) / (2 * step)
    size, sizes = float(image.norm()), image.flatten(1).norm(dim=-1)
    other = float((differences - image).norm()), float(((back * v).flatten(1).sum(1) - sizes).norm())
    if not max(other) <= _APART * size:
        raise BadFunctionError(
            "expected a function whose derivative is that of its values, got one that moves otherwise; "
            "look for detach, no_grad, numpy, random numbers and custom backward passes"
        )


@contextmanager
def _said() -> Iterator[None]:
    """What torch raises while it differentiates a function, as a refusal."""
    try:
        yield
    except Exception as error:
        if not foreign(error):
            raise
        raise BadFunctionError(
            f"expected a function with derivatives in both modes, got an error from it ({reason(error)[:160]}); "
            "look for operations without them"
        ) from error


def _by_items(f: Function, x: Tensor, batched: bool) -> tuple[Callable[[Tensor], Tensor], Tensor, tuple[int, ...]]:
    """A function of (items, …), the items, and the shape of the answer."""
    if isinstance(f, Map):
        if x.ndim < 2:
            raise BadInputError(f"expected tokens of shape (n, d) or (batch, n, d), got {tuple(x.shape)}; tokens are rows")
        x = f.prepare(x)
        return f.to(x.device, x.dtype).value, x.reshape(-1, *x.shape[-2:]), tuple(x.shape[:-2])
    if not callable(f):
        raise BadInputError(f"expected a map or a function of one tensor, got {type(f).__name__}; pass a callable")
    if x.dtype not in _CONVERGED:
        raise BadInputError(f"expected float32 or float64 input, got {x.dtype}; pass x.float() and f in float32")
    if batched and not x.ndim:
        raise BadInputError("expected many inputs along the first axis with batched=True, got one number; leave batched out")
    if batched:
        return f, x, (len(x),)

    def alone(t: Tensor) -> Tensor:
        y = f(t[0])
        return y[None] if isinstance(y, Tensor) else y

    return alone, x[None], ()


def _along(g: Callable[[Tensor], Tensor], xs: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """`g(x)` and `J v`."""
    with forward_ad.dual_level():
        y = g(forward_ad.make_dual(xs.clone(), v.clone()))  # clones, since g may write into them
        if not isinstance(y, Tensor) or not y.is_floating_point() or len(y) != len(xs):
            raise BadFunctionError(
                f"expected a function that gives one floating-point tensor for each input, got {type(y).__name__}; pick one, "
                "as in lambda x: f(x)[0]"
            )
        value, image = forward_ad.unpack_dual(y)
    if image is None:
        raise BadFunctionError(
            "expected an output that depends on x, got one with no derivative in x; "
            "look for detach, no_grad, item() or numpy inside the function"
        )
    if not bool(image.isfinite().all()):
        raise BadFunctionError("expected finite derivatives, got NaN or infinity; check the function at this x")
    return value, image


def _turned(g: Callable[[Tensor], Tensor], xs: Tensor, v: Tensor | None, products: int) -> Tensor:
    """The best directions that so many products with `JᵀJ` find from `v`, after one more of them, which costs nothing.

    From random starts it goes on until they have converged; where the top is shared by several, one of them is found.
    """

    def gram(block: Tensor) -> Tensor:
        """`JᵀJ v`, without a graph."""
        leaf = xs.detach().requires_grad_()
        value, image = _along(g, leaf, block.reshape(xs.shape))
        with forward_ad._set_fwd_grad_enabled(False):
            (found,) = torch.autograd.grad(value, leaf, image.detach(), materialize_grads=True)
        return found.detach().flatten(1)[:, None]

    if v is not None:
        found = krylov(gram, v.flatten(1)[:, None], products)
    else:
        v = torch.stack([torch.randn(xs.shape[1:], generator=stream(i, "smoothness")) for i in range(len(xs))]).to(xs)
        found = converged(gram, v.flatten(1)[:, None], _BASIS, _CONVERGED.get(xs.dtype, 1e-4))
    return unit_rows(found.ahead(1)).reshape(xs.shape)


@final
class SmoothnessPenalty:
    """A term of a loss: how far the constants of a model's layers are above a target, zero below it.

    `penalty(**batch)` gives `mean max(0, σ/target − 1)` over layers and rows of the batch, with the gradient of every `σ` in
    all weights that it depends on, those before the layer too. The model is run in eval mode, on attention whose second
    derivatives take O(n) memory; a few rows of a batch are enough as a rule.

    Args:
        model: The one that trains.
        target: Of every layer's constant, above 0.
        layers: `"all"`, or a list of numbers.
        map: `attention`, `heads`, `normed` or `block`.
        rows: How many of a batch's, the first ones; all by default.
        products: Steps of power iteration that turn the carried directions towards the top ones before they are used,
            beside the one it makes for the next call; 0 where the same rows come every time. It makes more where rows or
            tokens are not as many as in the call before.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> penalty = SmoothnessPenalty(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), target=1e6)
    >>> penalty(torch.randn(2, 5, 8)).item()
    0.0
    """

    def __init__(
        self,
        model: nn.Module | Model,
        target: float,
        layers: LayerChoice = "all",
        map: MapName = "attention",
        *,
        rows: int | None = None,
        products: int = 1,
    ):
        self._model = model_that_trains(model)
        self.target = number(target, "a target above 0", "it is a Lipschitz constant", above=0)
        self.rows = None if rows is None else whole(rows, "a whole number of rows, at least 1", "None takes all", least=1)
        self.products = whole(products, "a whole number of products", "the default is 1")
        self.map: MapName = choice(map, "a map", FAST)
        self.layers: LayerChoice = layers
        self._recordings = Recordings(_RECORDINGS)
        self._paths: dict[Recording, Paths] = {}
        self._directions: dict[int, Tensor] = {}
        self._found: dict[int, Tensor] = {}

    def __repr__(self) -> str:
        return f"SmoothnessPenalty({type(self._model.module).__name__}, {self.map} above {self.target:g})"

    def __call__(self, probe: Inputs | None = None, **inputs: Any) -> Tensor:
        """The penalty at a batch: a tensor, or the model's inputs by name."""
        if (probe is None) == (not inputs):
            raise BadInputError("expected a batch, as one tensor or by name, got none or both; pass penalty(**batch)")
        batch = Probe.of(self._model, inputs if probe is None else probe, check=not self._found)
        batch = batch if self.rows is None else batch.first(self.rows)
        at = None if self._found else (batch.args, batch.kwargs)
        with untouched(self._model.module, derives=torch.is_grad_enabled(), at=at), torch.enable_grad():
            found = self._run(batch, 0)
            if found is None:  # rows are not apart along the first axis
                rows = [self._run(batch.row(i), i) or {} for i in range(batch.rows)]
                found = {k: LayerTurn(*map(torch.cat, zip(*(row[k] for row in rows), strict=True))) for k in rows[0]}
        self._directions = {k: turned.directions for k, turned in found.items()}
        self._found = {k: turned.value.detach() for k, turned in found.items()}
        return torch.stack([(turned.value / self.target - 1).relu().mean() for turned in found.values()]).mean()

    @property
    def values(self) -> dict[int, float]:
        """The largest constants of the last call, by layer. Looking at them waits for the device."""
        return {k: float(t.max()) for k, t in self._found.items()}

    def _run(self, probe: Probe, first: int) -> dict[int, LayerTurn] | None:
        """By layer, the constant along a direction of every row and the next directions; nothing where rows are mixed.

        first: the number of the first row among the carried directions.
        """
        paths, hidden, weights = self._replayed(probe)
        several = probe.rows > 1
        if several and (paths.apart is False or None in paths.axes.values()):
            return None
        frozen, graphs = paths.values(weights, hidden), dict[int, LayerGraph]()
        with answering(own_answer, derives=True):
            for k in paths.ends:
                graphs |= paths.graphs([k], hidden, frozen)
        carried = {k: u[first : first + probe.rows] for k, u in self._directions.items()}
        found: dict[int, LayerTurn] = {}
        for kind in LayerJacobians.of_kinds(graphs, probe.rows, 1, probe.real):
            if several and paths.apart is None and not kind.apart():
                paths.apart = False
                return None
            found |= kind.turn(carried, 1 + self.products, _FIRST, graph=True)
        paths.apart = True
        return {k: found[k] for k in paths.ends}

    def _replayed(self, probe: Probe) -> tuple[Paths, dict[Node, Tensor], Mapping[str, Tensor]]:
        """The recorded run of the model at a batch, what enters its layers, and its weights, with their graph."""
        for anew in (False, True):
            known = self._paths
            paths = paths_of(self._model, self._recordings, probe, self.layers, self.map, anew=anew, known=known)
            if paths.recording not in known:
                self._paths = {**dict(list(known.items())[1 - _RECORDINGS :]), paths.recording: paths}
            weights = paths.recording.program.weights_now()
            hidden = paths.replayed(weights)
            if hidden is not None:
                return paths, hidden, weights
        raise not_the_same()
