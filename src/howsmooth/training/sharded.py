"""Weights that lie in shards on several processes (FSDP2, tensor parallelism), whole for as long as a model is measured.

FSDP2 and tensor parallelism put shards (`DTensor`) in the place of parameters, and hooks around modules that exchange them for
whole ones, or tokens for parts of them, while a module runs. Here the processes gather every weight in one fixed order, put
whole tensors in the shards' places and take the hooks out. What measures then sees the module as it was written, and talks to
no other process. So nothing that a measurement decides can leave another process waiting.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from howsmooth.errors import BadInputError, HowSmoothError, reason
from howsmooth.parallel import going_on
from howsmooth.program.confirm import same
from howsmooth.program.modules import unchanged
from howsmooth.program.tracing import tensors_in

_FINE, _COARSE = 1e-4, 2e-2  # of the largest entry: what two orders of sums explain, and the same in half precision
_FSDP = "torch.distributed.fsdp"
_AROUND = ("torch.distributed.", "transformers.distributed.")
Call = tuple[Sequence[Any], Mapping[str, Any]]
_group: tuple[Any, Any] | None = None


def rank() -> int | None:
    """The number of this process in a distributed run; nothing outside of one."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def told(value: Any) -> list[Any]:
    """What each process of the run tells all of them, in their order; refused with a sentence where one of them has ended.

    It goes through the hosts, in a group of its own, so that no device waits and training's own messages are not taken for it.
    """
    global _group
    if rank() is None or dist.get_world_size() == 1:
        return [value]
    with going_on():
        if _group is None or _group[0] is not dist.group.WORLD:
            _group = dist.group.WORLD, dist.new_group(backend="gloo")
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, value, group=_group[1])
    return found


@contextmanager
def gathered(model: nn.Module, *, here: bool = True, derives: bool = False, at: Call | None = None) -> Iterator[None]:
    """Inside it a model's weights are whole, if they lie in shards; every process of the run enters, and leaves, together.

    What is written into weights goes into the shards, as the first process with `here` has it, but for writes into `.data`,
    which nobody sees. Where one process raises, so do the others as they leave, and nothing is written.

    Args:
        model: Sharded by `fully_shard`, `parallelize_module` or both; another one is left as it is, and no process waits.
        here: Whether this process wants them; another one only hands its shards over.
        derives: Whether gradients go back into the shards: the mean of those of all processes, as in data parallelism.
        at: Arguments of the model at which a tensor-parallel one is compared with what its whole weights give.

    >>> with gathered(nn.Linear(2, 2)):
    ...     pass
    """
    places = _shards(model)
    if not places:
        yield
        return
    said = f"{len(places)} weights in shards of {type(model).__name__}"
    if others := {*told(said)} - {said}:
        raise BadInputError(
            f"expected every process to measure the same model, got {said} beside {min(others)}; call it on all of them alike"
        )
    hooks = _hooks(model)
    parallel = any(not origin.startswith(_FSDP) for _, _, origin in hooks)
    own = _run(model, at) if at is not None and parallel else None
    distinct, whole = {id(t): t for _, _, t in places}, dict[int, Tensor]()
    with going_on():
        if derives:
            whole |= zip(distinct, _Gathered.apply(*distinct.values()), strict=True)
        for key, t in distinct.items() if not derives else ():
            full = _whole(t.detach())
            if here:  # else it is let go of at once
                whole[key] = nn.Parameter(full, t.requires_grad) if isinstance(t, nn.Parameter) else full
    versions = {key: t._version for key, t in whole.items()}
    try:
        with _restored(model, [store for store, *_ in (*places, *hooks)]):
            for store, key, t in places if here else ():
                store[key] = whole[id(t)]
            for store, key, _ in hooks if here else ():
                del store[key]
            if own is not None and here:
                _compare(model, own, _run(model, at))
            yield
            if other := [key for store, key, t in places if here and store[key] is not whole[id(t)]]:
                raise BadInputError(f"expected weights written in place, got another tensor as {other[0]}; call its copy_")
    except BaseException as error:
        with suppress(HowSmoothError):  # where another process has ended too
            told((reason(error), (), here))
        raise
    ends = told((None, [i for i, key in enumerate(whole) if whole[key]._version != versions[key]], here))
    for process, (failure, *_) in enumerate(ends):
        if failure is not None:
            raise HowSmoothError(
                f"expected every process of the run to go on, got {failure} on process {process}; correct that there"
            )
    first = next((process for process, (*_, has) in enumerate(ends) if has), 0)
    for i in sorted({i for _, changed, _ in ends for i in changed}):
        key, t = [*distinct.items()][i]
        _write(t, whole.get(key), first)


@contextmanager
def _restored(model: nn.Module, stores: list[dict[Any, Any]]) -> Iterator[None]:
    """Inside it dictionaries may be changed, and modules are of the classes that FSDP2 found; afterwards all is as it was."""
    before, classes = [(store, store.copy()) for store in stores], [(part, type(part)) for part in _fully_sharded(model)]
    for part, kind in classes:
        part.__class__ = kind.__bases__[-1]
    try:
        yield
    finally:
        for part, kind in classes:
            part.__class__ = kind
        for store, old in before:
            store.clear()
            store.update(old)


def _shards(model: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """The weights that lie in shards: in which dictionary of a module, under which name."""
    tensor = sys.modules.get("torch.distributed.tensor")  # which takes long to load
    if tensor is None or rank() is None:  # then there are none
        return []
    _reshard(model)
    stores = [store for part in model.modules() for store in (part._parameters, part._buffers)]
    return [(store, key, t) for store in stores for key, t in store.items() if isinstance(t, tensor.DTensor)]


def _fully_sharded(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [part for part in model.modules() if isinstance(part, fsdp.FSDPModule)]


def _reshard(model: nn.Module) -> None:
    """Let go of what FSDP2 left whole behind a forward pass, as it leaves the outermost module's weights."""
    for part in _fully_sharded(model):
        part.reshard()


def _hooks(model: nn.Module) -> list[tuple[dict[Any, Any], Any, str]]:
    """What is put around modules that are sharded: in which dictionary, under which key, and where it is from.

    Those are hooks of torch.distributed, and forward passes that transformers puts in the place of a module's own.
    """
    stores = [store for part in model.modules() for store in (part._forward_pre_hooks, part._forward_hooks)]
    found: list[tuple[dict[Any, Any], Any, Any]] = [(store, key, hook) for store in stores for key, hook in store.items()]
    found += [(vars(part), "forward", vars(part)["forward"]) for part in model.modules() if "forward" in vars(part)]
    origins = [(store, key, str(getattr(hook, "__module__", ""))) for store, key, hook in found]
    return [(store, key, origin) for store, key, origin in origins if origin.startswith(_AROUND)]


@torch.no_grad()
def _run(model: nn.Module, at: Any) -> list[Tensor]:
    """What a model gives, in eval mode; whole, where it gives shards."""
    with unchanged(model), going_on():
        try:
            found: list[Any] = list(tensors_in(model(*at[0], **at[1])))
            return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]
        finally:
            _reshard(model)


def _compare(model: nn.Module, own: list[Tensor], whole: list[Tensor]) -> None:
    """Refuse a tensor-parallel model that is another function where its weights are whole."""
    policies = [part._get_fsdp_state()._mp_policy.param_dtype for part in _fully_sharded(model)]
    half = any(t.dtype in (torch.float16, torch.bfloat16) for t in whole) or any(kind is not None for kind in policies)
    most = dict.fromkeys((torch.float32, torch.float64, torch.float16, torch.bfloat16), _COARSE if half else _FINE)
    if len(own) != len(whole) or not all(same(a.to(b.dtype), b, most) for a, b in zip(own, whole, strict=True)):
        raise BadInputError(
            f"expected a {type(model).__name__} that gives with whole weights what it gives with shards, got something else; "
            "leave numbers of heads as they are and write -1 where a shape counts them"
        )


def _whole(t: Any) -> Tensor:
    """A weight from the shards of all processes; where they lie on the host, so does it."""
    there = t.device
    return (t if there.type == t.device_mesh.device_type else t.to(t.device_mesh.device_type)).full_tensor().to(there)


@torch.no_grad()
def _write(t: Any, full: Tensor | None, source: int) -> None:
    """Write a whole weight into the shards of all processes, as one of them has it."""
    from torch.distributed.tensor import distribute_tensor

    there = t.device_mesh.device_type
    full = torch.empty(t.shape, dtype=t.dtype, device=there) if full is None else full.detach().to(there, copy=True)
    with going_on():
        dist.broadcast(full, source)
        own = distribute_tensor(full, t.device_mesh, t.placements, src_data_rank=None)  # cut where it is: uneven shards too
    t.to_local().copy_(own.to_local())


@final
class _Gathered(torch.autograd.Function):
    """Whole weights from shards; back go means of the gradients of all processes, all in one step and in one order."""

    @staticmethod
    def forward(ctx: Any, *shards: Any) -> tuple[Tensor, ...]:
        ctx.shards = [(t.device_mesh, t.placements, t.device) for t in shards]
        return tuple(_whole(t.detach()) for t in shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        from torch.distributed.tensor import DTensor, Partial

        found = []
        with going_on():
            for g, (mesh, placements, there) in zip(grads, ctx.shards, strict=True):
                partial = [Partial()] * mesh.ndim
                every = DTensor.from_local(g.to(mesh.device_type) / mesh.size(), mesh, partial, run_check=False)
                found.append(every.redistribute(placements=placements).to(there))
        return tuple(found)
