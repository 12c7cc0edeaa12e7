"""Numbers that a run reads off its tensors on the way, which its recording notes as operations."""

from typing import Any, final

import torch
from torch import Tensor
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from howsmooth.program.nodes import is_float, name

# ways past the dispatcher, where an operation would be recorded
_READERS = {
    getattr(Tensor, reader)
    for reader in (
        "tolist", "numpy", "data_ptr", "untyped_storage", "storage", "apply_", "map_", "map2_", "__array__", "__dlpack__",
        "__reduce_ex__", "__deepcopy__", "__repr__", "__format__",
    )
}  # fmt: skip
_DATA: Any = Tensor.data.__get__  # pyright: ignore[reportAttributeAccessIssue]
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_NUMBERS = {"float", "int", "bool", "number", "Scalar", "str"}  # what an operation may give in place of a tensor
_FAILS = ("cholesky", "inv", "solve", "eig", "svd", "lstsq", "ldl", "lu_factor", "assert")  # with some numbers


@final
class NotedReads(TorchFunctionMode):
    """Inside it a tensor whose numbers are read without an operation is compared with itself, which is recorded."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == _DATA:
            return args[0].detach()  # the same, as an operation
        if func in _READERS:
            torch.equal(args[0], args[0])
        return func(*args, **(kwargs or {}))


def reads(n: Node) -> bool:
    """Whether a node takes numbers out of the graph: to Python, into a shape, or into whether there is an error.

    What is chosen by an index is none: it is the index that is read.
    """
    if n.op != "call_function":
        return False
    numbers = any(str(r.type) in _NUMBERS for r in getattr(getattr(n.target, "_schema", None), "returns", ()))
    fails = numbers or name(n).removeprefix("linalg_").lstrip("_").startswith(_FAILS)
    return fails or any(tag in getattr(n.target, "tags", ()) for tag in _TAGS)


def reads_number(n: Node) -> bool:
    """Whether a node takes a floating-point number to Python, where the graph knows nothing of what becomes of it."""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node) or not is_float(n.args[0]):
        return False
    return name(n) in ("item", "_local_scalar_dense") or (name(n) == "equal" and n.args[0] is n.args[1])


def read_by(n: Node) -> list[Node]:
    """The nodes whose numbers a node that reads takes."""
    chosen = n.args[1] if name(n) == "index" else n.all_input_nodes
    assert isinstance(chosen, list | tuple)
    return [m for m in chosen if isinstance(m, Node)]
