"""Room on a device: whether weights and a measurement fit, what is lent to a device block by block, and what to say if not."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from howsmooth.errors import BadInputError

_GIB = 2**30
_WEIGHTS = 0.8  # of the free memory that weights may take; the rest is for the measurement
_VECTORS = 12  # (n, d) that the shortest solve holds at once: tokens, a few steps of the basis, a product on its way
_SAVED = 3  # outputs of every matrix of a block that its graph keeps at least: about half of what was measured on a Llama's


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
        wanted = str(error).partition("Tried to allocate ")[2].partition(". ")[0]
        taken = torch.cuda.max_memory_allocated(device) / _GIB if device.type == "cuda" else 0.0
        needed = f"{taken:.1f} GiB" + (f" and another {wanted}" if wanted else "")
        raise too_little(what, f"more than {needed}", free(device)) from None


def too_little(what: str, needed: str, there: int) -> BadInputError:
    return BadInputError(
        f"expected {needed} of GPU memory for {what}, got {there / _GIB:.1f} GiB free; give fewer tokens, "
        'measure map="attention", or use device="cpu"'
    )


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: on the first device of its `device_map` that computes, or where its weights are."""
    mapped = (place for place in (getattr(module, "hf_device_map", None) or {}).values() if place not in ("cpu", "disk"))
    hooks = (vars(part).get("_hf_hook") for part in module.modules())
    hooked = (place for hook in hooks if (place := getattr(hook, "execution_device", None)) is not None)
    place = next(chain(mapped, hooked, (p.device for p in module.parameters())), "cpu")
    return torch.device("cuda", place) if isinstance(place, int) else torch.device(place)


def check_device(device: torch.device | None) -> None:
    """Refuse a device that is not there, or that knows no float64."""
    count = torch.cuda.device_count()
    if device is not None and device.type == "cuda" and (device.index or 0) >= count:
        raise BadInputError(
            f"expected a GPU that torch sees, got {device}, where it sees {count}; pass device='cpu', "
            "or install a torch with CUDA"
        )
    if device is not None and device.type not in ("cpu", "cuda"):
        raise BadInputError(f"expected a device that knows float64, cpu or cuda, got {device}; use device='cpu'")
