"""Room on a device: whether weights and a measurement fit, what is lent to a device block by block, and what to say if not."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError

_GIB = 2**30
_WEIGHTS = 0.8  # of the free memory that weights may take; the rest is for the measurement
_VECTORS = 12  # (n, d) that the shortest solve holds at once: tokens, a few steps of the basis, a product on its way
_SAVED = 3  # outputs of every matrix of a block that its graph keeps at least: about half of what was measured on a Llama's
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def free(device: torch.device) -> int:
    """Bytes that can still be taken on a CUDA device: those nobody has, and those torch keeps for itself."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def fits(module: nn.Module, device: torch.device) -> bool:
    """Whether all weights go to a device and leave room for a measurement."""
    if device.type != "cuda":
        return True
    elsewhere = (t for t in (*module.parameters(), *module.buffers()) if t.device != device)
    return sum(t.numel() * t.element_size() for t in elsewhere) <= _WEIGHTS * free(device)


def check_room(tokens: Tensor, block: nn.Module | None, work: torch.dtype, device: torch.device, what: str) -> None:
    """Refuse a measurement that cannot fit whatever happens, before any of it is done.

    tokens: (n, d), what enters.  block: what is run whole, where the map ends behind attention.
    """
    if device.type != "cuda":
        return
    matrices = () if block is None else (m.weight for m in block.modules() if isinstance(m, nn.Linear))
    width = _VECTORS * tokens.shape[1] + _SAVED * sum(w.shape[0] for w in matrices)
    needed, there = len(tokens) * width * work.itemsize, free(device)
    if needed > there:
        raise too_little(what, f"at least {needed / _GIB:.1f} GiB", there)


@contextmanager
def enough(what: str, device: torch.device) -> Iterator[None]:
    """Inside it, running out of a device's memory is one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        asked = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
        held = torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else 0.0
        needed = f"{held:.1f} GiB" + (f" and another {asked}" if asked else "")
        raise too_little(what, f"more than {needed}", free(device)) from None


def too_little(what: str, needed: str, there: int) -> BadInputError:
    return BadInputError(
        f"expected {needed} of GPU memory for {what}, got {there / _GIB:.1f} GiB free; give fewer tokens, "
        'measure map="attention", or use device="cpu"'
    )


def offloaded(module: nn.Module) -> bool:
    """Whether the library brings weights to where they are needed itself, as a `device_map` asks it to."""
    return any("_hf_hook" in vars(part) for part in module.modules())


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: on the first device of its `device_map` that computes, or where its weights are."""
    for place in (getattr(module, "hf_device_map", None) or {}).values():
        if place not in ("cpu", "disk"):
            return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    hooks = (vars(part).get("_hf_hook") for part in module.modules())
    place = next((place for hook in hooks if (place := getattr(hook, "execution_device", None)) is not None), None)
    if place is not None:
        return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, those that the library keeps elsewhere among them."""
    weights: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        kept = _kept(vars(part).get("_hf_hook"))
        for name, t in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            weights[f"{prefix}.{name}".removeprefix(".")] = kept[name] if t.is_meta and kept is not None else t
    return weights


def _kept(hook: Any) -> Any:
    """The weights that a hook of the library brings, by name."""
    hooks = getattr(hook, "hooks", (hook,))
    return next((kept for one in hooks if (kept := getattr(one, "weights_map", None)) is not None), None)


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


@contextmanager
def lent(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside it, weights that live elsewhere are on `device` while the block they belong to runs, and only then.

    A block is an element of a list of modules; weights outside of any go with the module that holds them.
    """
    if offloaded(model) or all(t.device == device for t in (*model.parameters(), *model.buffers())):
        yield
        return
    listed = [c for m in model.modules() if isinstance(m, _LISTS) for c in m.children() if not isinstance(c, _LISTS)]
    inside = {part for block in listed for part in block.modules()}
    blocks = [block for block in listed if not any(block is not other and block in set(other.modules()) for other in listed)]
    with ExitStack() as stack:
        for module in (*blocks, *(m for m in model.modules() if m not in inside)):
            loan = _Loan(module, device, whole=module in inside)
            if loan.weights:
                stack.enter_context(module.register_forward_pre_hook(loan.take))
                stack.enter_context(module.register_forward_hook(loan.give_back, always_call=True))
        yield


class _Loan:
    """The weights of a module on their way to a device and back. whole: those of the modules inside it too."""

    def __init__(self, module: nn.Module, device: torch.device, whole: bool):
        own = (*module.parameters(recurse=whole), *module.buffers(recurse=whole))
        self.weights = {id(t): t for t in own if t.device != device}
        self.device, self.home = device, dict[int, Tensor]()

    def take(self, *_: Any) -> None:
        if not self.home:
            self.home = {key: t.data for key, t in self.weights.items()}
            for t in self.weights.values():
                t.data = t.data.to(self.device)

    def give_back(self, *_: Any) -> None:
        for key, t in self.weights.items():
            t.data = self.home[key]
        self.home = {}
