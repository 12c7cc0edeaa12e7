"""A module that is run by others than its owner: left as it was, in the code that was written, with its weights in reach."""

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from howsmooth.errors import BadFunctionError, BadInputError
from howsmooth.settings import shown, words

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_EXPERTS = "_experts_implementation_internal"
# ways past the dispatcher, where an operation would be recorded
_READERS = {
    getattr(Tensor, reader)
    for reader in (
        "tolist", "numpy", "data_ptr", "untyped_storage", "storage", "apply_", "map_", "map2_", "__array__", "__dlpack__",
        "__reduce_ex__", "__deepcopy__", "__repr__", "__format__",
    )
}  # fmt: skip
_DATA: Any = Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]

Calls = list[tuple[nn.Module, Node | None, Node | None]]  # calls of modules, with the last nodes before and in each


def bare(module: nn.Module) -> nn.Module:
    """The module that a user wrote, behind what compiles it or spreads it over devices."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            inner = module.module
        if not isinstance(inner, nn.Module):
            break
        module = inner
    if isinstance(module, torch.jit.ScriptModule):
        raise BadFunctionError(
            f"expected a module of Python code, got a {type(module).__name__}; pass the module that it was made from"
        )
    return module


def check_whole(module: nn.Module) -> None:
    """Refuse a module whose weights lie in shards on several processes."""
    if any(hasattr(t, "full_tensor") for t in (*module.parameters(), *module.buffers())):
        raise BadFunctionError(
            f"expected weights that are whole, got shards of a {type(module).__name__}; measure it on every process, inside "
            "with howsmooth.training.gathered(model)"
        )


@contextmanager
def unchanged(module: nn.Module, *, evaluating: bool = True) -> Iterator[None]:
    """Inside it a module is not compiled, and in eval mode; afterwards its modes, attributes and buffers are as they were.

    evaluating: false leaves it in the mode that it is in.
    """
    parts = list(module.modules())
    before = [vars(m).copy() for m in parts]
    inside = [(v, v.copy() if v else None) for state in before for v in state.values() if isinstance(v, list | dict | set)]
    loose = [v for state in before for v in state.values() if isinstance(v, Tensor)]
    plain = (t for t in loose if t.layout is torch.strided and not (t.is_meta or t.is_nested or t.is_quantized))
    buffers = [(t, t.clone()) for t in (*module.buffers(), *plain)]
    for m in parts:
        if not evaluating:
            pass
        elif "training" in vars(m):
            vars(m)["training"] = False  # many times as fast as torch's way of setting attributes
        else:  # a scripted module
            m.training = False
        if vars(m).get("_compiled_call_impl") is not None:  # by torch, whose compiled code cannot be recorded
            vars(m)["_compiled_call_impl"] = None
        if "_orig_mod" in m._modules:
            vars(m)["forward"] = m._modules["_orig_mod"]
    try:
        yield
    finally:
        for m, state in zip(parts, before, strict=True):
            vars(m).clear()
            vars(m).update(state)
        for v, old in inside:
            if old is None:
                v.clear()
            elif v != old if isinstance(v, set) else len(v) != len(old) or any(map(operator.is_not, v, old)):
                v.clear()
                v.extend(old) if isinstance(v, list) else v.update(old)
            elif isinstance(v, dict):
                v.update(old)
        for t, old in buffers:
            if not torch.equal(t, old):
                t.data.copy_(old)


@contextmanager
def written_path() -> Iterator[None]:
    """Inside it torch's encoders run as they are written: their fast path leaves padding out, and nothing else."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def configurations(module: nn.Module, choice: str) -> list[Any]:
    """Every configuration of the library inside a module that makes a choice."""
    return list({id(m.config): m.config for m in module.modules() if hasattr(getattr(m, "config", None), choice)}.values())


@contextmanager
def configured(module: nn.Module, choice: str, value: str | None) -> Iterator[None]:
    """Inside it, every configuration in a module makes a choice in one way; nothing leaves it to the module."""
    before = [] if value is None else [(c, getattr(c, choice)) for c in configurations(module, choice)]
    try:
        for config, _ in before:
            setattr(config, choice, value)
        yield
    finally:
        for config, old in before:
            setattr(config, choice, old)


def wide_experts(module: nn.Module) -> AbstractContextManager[None]:
    """Inside it transformers' experts in float64 are products for each token, as its grouped ones know no float64."""
    wide = any(p.dtype is torch.float64 for p in module.parameters())
    return configured(module, _EXPERTS, "batched_mm" if wide else None)


@contextmanager
def watching(before: Callable[[nn.Module], None], after: Callable[[nn.Module], None]) -> Iterator[None]:
    """Inside it, two functions hear of every call of every module, the second one of calls that raise too."""
    hooks = (
        register_module_forward_pre_hook(lambda module, _: before(module)),
        register_module_forward_hook(lambda module, _, __: after(module), always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@final
class NotedReads(TorchFunctionMode):
    """Inside it a tensor whose numbers are read without an operation is compared with itself, which is recorded."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == _DATA:
            return args[0].detach()  # the same, as an operation
        if func in _READERS:
            torch.equal(args[0], args[0])
        return func(*args, **(kwargs or {}))


def _last_node() -> Node | None:
    mode = get_proxy_mode()
    return None if mode is None else next(iter(reversed(mode.tracer.graph.nodes)), None)


@contextmanager
def noted_calls(module: nn.Module, loans: "Loans") -> Iterator[Calls]:
    """Inside it every call of a module in the recording under way is noted, and weights are lent meanwhile.

    Hooks of modules themselves, which come behind those of all modules, are part of their calls.
    """
    calls: Calls = []
    began: list[tuple[nn.Module, Node | None]] = []

    def before(part: nn.Module) -> None:
        began.append((part, _last_node()))
        loans.before(part)

    def after(part: nn.Module) -> None:
        loans.after(part)
        while began:
            known, start = began.pop()
            if known is part:
                calls.append((part, start, _last_node()))
                return

    def again(part: nn.Module, *_: Any) -> None:
        i = next((i for i in reversed(range(len(calls))) if calls[i][0] is part), None)
        if i is not None:
            calls[i] = (*calls[i][:2], _last_node())

    hooks = [part.register_forward_hook(again) for part in module.modules() if vars(part).get("_forward_hooks")]
    try:
        with watching(before, after):
            yield calls
    finally:
        for hook in hooks:
            hook.remove()


# weights


class NamedWeights(Mapping[str, Tensor]):
    """Parameters and buffers of a module as they are now, by name; each tensor once, offloaded ones when they are read.

    >>> list(NamedWeights(nn.Linear(1, 2)))
    ['weight', 'bias']
    """

    def __init__(self, module: nn.Module):
        self._at: dict[str, tuple[nn.Module, str, Any]] = {}
        known: set[int] = set()
        for prefix, part in module.named_modules():
            hook = vars(part).get("_hf_hook")  # of the library, which may bring weights
            brought = [m for one in getattr(hook, "hooks", (hook,)) if (m := getattr(one, "weights_map", None)) is not None]
            for key, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
                if id(t) not in known:
                    known.add(id(t))
                    self._at[f"{prefix}.{key}".removeprefix(".")] = part, key, next(iter(brought), None)

    def __getitem__(self, name: str) -> Tensor:
        part, key, brought = self._at[name]
        t: Tensor = getattr(part, key)
        return brought[key] if t.is_meta and brought is not None else t

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, which need not be brought from elsewhere."""
        part, key, _ = self._at[name]
        return tuple(getattr(part, key).shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)


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


class Loans:
    """Weights that live elsewhere are on a device while the block they belong to runs, and only then.

    A block is an element of a list of modules; weights outside of any go with the module that holds them.
    alone: the library, which may bring weights too, does not do so now.
    """

    def __init__(self, module: nn.Module, device: torch.device | None, *, alone: bool = False):
        self._device, self._out = device, dict[nn.Module, list[tuple[dict[str, Any], str, Tensor]]]()
        self._of: dict[nn.Module, list[nn.Module]] = {}  # by module whose call brings weights, the parts that hold them
        here = device is None or all(t.device == device for t in (*module.parameters(), *module.buffers()))
        if here or (offloaded(module) and not alone):
            return
        listed = [c for m in module.modules() if isinstance(m, _LISTS) for c in m.children() if not isinstance(c, _LISTS)]
        inside = {part for block in listed for part in block.modules()}
        nested = {part for block in listed for part in block.modules() if part is not block}
        self._of |= {block: list(block.modules()) for block in listed if block not in nested}
        self._of |= {m: [m] for m in module.modules() if m not in inside}

    def before(self, module: nn.Module) -> None:
        """A module is about to run: bring its weights."""
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
        """A module has run, or has raised: put its weights back."""
        for store, key, t in self._out.pop(module, ()):
            store[key] = t


def side_of(module: nn.Module, side: str | None) -> nn.Module:
    """The part of a model with two sides that is meant."""
    config = getattr(module, "config", None)
    towers: dict[str, nn.Module] = {}
    if getattr(config, "is_encoder_decoder", False):
        for name in ("encoder", "decoder"):
            part = getattr(module, f"get_{name}", lambda: None)()
            if isinstance(part, nn.Module):
                towers[name] = part
    else:
        for name in ("text", "vision"):
            part = getattr(module, f"{name}_model", None)
            if isinstance(part, nn.Module):
                towers[name] = part
        towers = towers if len(towers) == 2 else {}
    if side is not None:
        side = words(side, "the name of a side", "encoder or decoder, text or vision")
    if not towers:
        if side is not None:
            raise BadInputError(
                f"expected no side for {type(module).__name__}, which has one only, got {shown(side)}; leave it out"
            )
        return module
    if side not in towers:
        raise BadInputError(
            f"expected side to be {' or '.join(map(repr, towers))} for {type(module).__name__}, got {shown(side)}; name one"
        )
    return towers[side]
