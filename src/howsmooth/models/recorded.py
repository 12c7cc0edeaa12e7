"""Recorded runs of a model: one for every kind of input, compared with the model itself at each input."""

import functools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._pytree import tree_flatten

from howsmooth.errors import BadFunctionError, HowSmoothError
from howsmooth.models.interface import CHOICE, IMPLEMENTATION, register
from howsmooth.program import Ends, Layers, Program, ends_of, record
from howsmooth.program.confirm import agrees
from howsmooth.program.modules import configured, unchanged
from howsmooth.program.operations import order
from howsmooth.program.replay import Run
from howsmooth.program.tracing import distinct
from howsmooth.program.written_out import moving_terms, rewrite

_MOST = 8  # recordings kept of a model, the latest ones
_KEPT = 8  # hidden states stay on a GPU up to this part of its memory, and go to the host beyond


@dataclass(frozen=True, eq=False)
class Recording:
    """A model's run as a graph, and the layers in it."""

    program: Program
    layers: Layers

    @functools.cached_property
    def hidden(self) -> tuple[Node, ...]:
        """The hidden states that layers begin with: what is kept of a run."""
        found: list[Node] = []
        for layer in self.layers.found:
            before = [w for w in self.layers.of(layer).blocks.waists if order(w) < layer.first]
            found += before[-1:] or [n for group in layer.groups for n in group.enter]
        return tuple(dict.fromkeys(found))

    def ends(
        self, layer: int, map: str, *, to: int | str | None = None, stream: int | None = None, call: int | None = None
    ) -> Ends:
        """Where a map begins and ends, as in `ends_of`, found once."""
        key = layer, map, to, stream, call
        if key not in self._ends:
            self._ends[key] = ends_of(self.layers, layer, map, to=to, stream=stream, call=call)
        return self._ends[key]

    @functools.cached_property
    def _ends(self) -> dict[Any, Ends]:
        return {}

    def place(self, layer: int, map: str, call: int = 0) -> str:
        """The path of the module that a map of one layer belongs to; the type of the model where it is all of it."""
        found = self.layers.found[layer]
        inner = self.layers.module_of(found, call) if map in ("attention", "heads") else ""
        return inner or found.path or type(self.program.module).__name__

    def run(self, tensors: tuple[Tensor, ...]) -> tuple[Run, list[Tensor]]:
        """A run at some tensors with its hidden states, in the module's own precision, and what the module would return."""
        plain = Run(self.program, tensors, None)
        values = plain.values((*self.hidden, *self.program.outputs))
        kept = {n: values[n] for n in self.hidden}
        if plain.device.type == "cuda":
            most = torch.cuda.get_device_properties(plain.device).total_memory // _KEPT
            if sum(t.numel() * t.element_size() for t in kept.values()) > most:
                kept = {n: t.cpu() for n, t in kept.items()}
        run = Run(self.program, tensors, None, kept)
        return run, [values[n] for n in self.program.outputs]


class Recordings:
    """The recorded runs of one model, by the shapes, dtypes, masks and other arguments of its inputs."""

    def __init__(self, most: int = _MOST) -> None:
        self._known: OrderedDict[Any, Recording] = OrderedDict()
        self._most = most

    def at(self, owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Recording, Run]:
        """The recording that fits an input, and its run there, which gives what the model itself gives."""
        for anew in (False, True):
            known = {*self._known.values()}
            found, tensors = self.find(owner, args, kwargs, anew=anew)
            try:
                run, ours = found.run(tensors)
            except (RuntimeError, IndexError) as error:  # where shapes depend on values
                if anew or isinstance(error, torch.OutOfMemoryError):
                    raise
                continue
            if found not in known:  # compared with the model as it was recorded
                return found, run
            with unchanged(found.program.module):
                own = found.program.own(tensors)
            if agrees(found.program, own, ours):
                return found, run
        raise not_the_same()

    def find(
        self, owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, anew: bool = False
    ) -> tuple[Recording, tuple[Tensor, ...]]:
        """The recording that fits an input, which is still to be compared with the model there, and the input's tensors.

        anew: record again.
        """
        key, tensors = _key(owner, args, kwargs)
        if anew or key not in self._known or not self._known[key].program.has_weights:
            self._known[key] = recorded(owner, args, kwargs)
        self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return self._known[key], tensors


def not_the_same() -> BadFunctionError:
    return BadFunctionError("expected a model that gives the same twice, got another output; call model.eval()")


def recorded(owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Recording:
    """A model's run, its attention on the kernels where they express it."""
    refusal: HowSmoothError | None = None
    for code in _codes(owner):
        try:
            program = record(owner, args, kwargs, functools.partial(configured, owner, CHOICE, code))
        except HowSmoothError as error:
            refusal = refusal or error
            continue
        except KeyError:  # a model that looks its implementation up in a table of its own
            if code is None:
                raise
            continue
        flow = Layers(program).flow
        if code is None or not moving_terms(program, flow):
            whole = rewrite(program, flow)
            return Recording(whole, Layers(whole))
    assert refusal is not None
    raise refusal


def _codes(owner: nn.Module) -> tuple[str | None, ...]:
    """The attention implementations to record a model with: the library's interface first, then the model's own choice."""
    if not hasattr(getattr(owner, "config", None), CHOICE):
        return (None,)
    register()
    return (IMPLEMENTATION, None)


def _key(owner: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Tensor, ...]]:
    """What inputs of one recording share, and the tensors among them."""
    leaves, spec = tree_flatten((args, dict(kwargs)))
    names = {id(t): name for name, t in kwargs.items()}
    tensors = distinct(leaves)
    places = {id(t): i for i, t in enumerate(tensors)}
    parts: list[Any] = [str(spec)]
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            parts.append(repr(leaf))
            continue
        parts.append((places[id(leaf)], tuple(leaf.shape), leaf.dtype, leaf.device))
        if not leaf.is_floating_point() and names.get(id(leaf)) != "input_ids":
            parts.append(bytes(leaf.detach().cpu().contiguous().flatten().to(torch.int64).numpy().tobytes()))
    return tuple(parts), tensors
