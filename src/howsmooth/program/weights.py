"""A module's weights by name: in it, on another device, or kept elsewhere by the library that offloads them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class NamedWeights(Mapping[str, Tensor]):
    """Parameters and buffers of a module as they are now, by name; each tensor once, offloaded ones when they are read.

    >>> list(NamedWeights(nn.Linear(1, 2)))
    ['weight', 'bias']
    """

    def __init__(self, module: nn.Module):
        self._at: dict[str, tuple[nn.Module, str, Any]] = {}
        known: set[int] = set()
        for prefix, part in module.named_modules():
            kept = _kept(vars(part).get("_hf_hook"))
            for key, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if id(t) not in known:
                    known.add(id(t))
                    self._at[f"{prefix}.{key}".removeprefix(".")] = part, key, kept

    def __getitem__(self, name: str) -> Tensor:
        part, key, kept = self._at[name]
        t: Tensor = getattr(part, key)
        return kept[key] if t.is_meta and kept is not None else t

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, which need not be brought from elsewhere."""
        part, key, _ = self._at[name]
        return tuple(getattr(part, key).shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


def _kept(hook: Any) -> Any:
    """The weights that a hook of the library brings, by name."""
    hooks = getattr(hook, "hooks", (hook,))
    return next((kept for one in hooks if (kept := getattr(one, "weights_map", None)) is not None), None)


def offloaded(module: nn.Module) -> bool:
    """Whether the library brings weights to where they are needed itself, as a `device_map` tells it to."""
    return any("_hf_hook" in vars(part) for part in module.modules())


@contextmanager
def unhooked(module: nn.Module) -> Iterator[None]:
    """Inside it, the library brings no weights: whoever calls `module` hands them over."""
    hooked = [(part, vars(part)["forward"]) for part in module.modules() if "_old_forward" in vars(part)]
    for part, _ in hooked:
        part.forward = vars(part)["_old_forward"]
    try:
        yield
    finally:
        for part, forward in hooked:
            part.forward = forward


class ModuleCalls:
    """What happens around every call of a module while it is watched: nothing here."""

    def before(self, module: nn.Module) -> None:
        """A module is about to run."""

    def after(self, module: nn.Module) -> None:
        """A module has run, or has raised."""


@contextmanager
def watching(calls: ModuleCalls) -> Iterator[None]:
    """Inside it, `calls` hears of every call of every module."""
    hooks = (
        register_module_forward_pre_hook(lambda module, _: calls.before(module)),
        register_module_forward_hook(lambda module, _, __: calls.after(module), always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Loans(ModuleCalls):
    """Weights that live elsewhere are on a device while the block they belong to runs, and only then.

    A block is an element of a list of modules; weights outside of any go with the module that holds them.
    alone: the library, which may bring weights too, does not do so now.
    """

    def __init__(self, module: nn.Module, device: torch.device | None, *, alone: bool = False):
        self._device, self._out = device, dict[nn.Module, list[tuple[dict[str, Any], str, Tensor]]]()
        self._of = {} if device is None or (offloaded(module) and not alone) else _homes(module, device)

    def before(self, module: nn.Module) -> None:
        if module not in self._of or module in self._out:
            return
        taken = []
        for part in self._of[module]:
            for store in (part._parameters, part._buffers):
                for key, t in store.items():
                    if t is not None and t.device != self._device:
                        taken.append((store, key, t))
        for store, key, t in taken:
            store[key] = t.to(self._device)
        self._out[module] = taken

    def after(self, module: nn.Module) -> None:
        for store, key, t in self._out.pop(module, ()):
            store[key] = t


def _homes(module: nn.Module, device: torch.device) -> dict[nn.Module, list[nn.Module]]:
    """By module whose call brings weights, the parts that hold them; nothing where all are there."""
    if all(t.device == device for t in (*module.parameters(), *module.buffers())):
        return {}
    listed = [c for m in module.modules() if isinstance(m, _LISTS) for c in m.children() if not isinstance(c, _LISTS)]
    inside = {part for block in listed for part in block.modules()}
    nested = {part for block in listed for part in block.modules() if part is not block}
    blocks = [block for block in listed if block not in nested]
    return {b: list(b.modules()) for b in blocks} | {m: [m] for m in module.modules() if m not in inside}
