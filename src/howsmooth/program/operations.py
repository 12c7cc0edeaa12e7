"""What the nodes of a recorded run are: the one table of aten operations, by name, and what else a node tells of itself.

Names are without namespace and overload, as in `add`. Recording, the rules for where maps begin and end, closed forms and
segments all read operations here.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

# entries stay as they are
TURNS = {"permute", "transpose", "mT", "t", "numpy_T", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint"}
FLATTENS = {"view", "reshape", "_unsafe_view", "flatten"}
VIEWS = TURNS | FLATTENS | {
    "expand", "clone", "unsqueeze", "squeeze", "contiguous", "alias", "unflatten", "to", "_to_copy", "type_as", "dropout",
    "detach", "view_as", "reshape_as", "expand_as", "broadcast_to",
}  # fmt: skip
SHAPE = VIEWS | {
    "repeat", "repeat_interleave", "matrix_H", "flip", "roll", "feature_dropout", "lift_fresh", "lift_fresh_copy", "copy",
    "tile",
}  # fmt: skip
SPLITS = {"split", "split_with_sizes", "chunk", "tensor_split"}
SLICES = SPLITS | {"select", "slice", "narrow", "unbind"}
SELECTS = SLICES | {
    "getitem", "index_select", "unsafe_split", "unsafe_chunk", "hsplit", "vsplit", "dsplit", "select_copy", "view_as_real",
    "view_as_complex", "index",
}  # fmt: skip
JOINS = {
    "cat", "stack", "concat", "concatenate", "hstack", "vstack", "dstack", "rewritten", "copied", "select_scatter",
    "slice_scatter",
}  # fmt: skip
PADS = {"constant_pad_nd", "pad"}
# products
MATMULS = {"matmul", "bmm", "mm", "linalg_matmul"}
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose1d", "conv_transpose2d"}
GROUPED = {"_grouped_mm", "grouped_mm_fallback"}
MATRIX = MATMULS | CONVOLUTIONS | GROUPED | {
    "linear", "addmm", "baddbmm", "einsum", "mv", "addbmm", "tensordot", "bilinear", "inner", "dot",
}  # fmt: skip
DISTANCES = {"cdist", "_euclidean_dist"}
PRODUCT = (MATMULS - {"linalg_matmul"}) | DISTANCES | {"baddbmm", "einsum", "addbmm", "inner", "tensordot", "addmm"}
GATES = {"mul", "addcmul"}
ADDS = {"add", "sub", "rsub", "lerp", "addcmul"}
NORMALISES = {"layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "_fused_rms_norm"}
# attention that is written out
SOFTMAXES = {"softmax", "_softmax", "_safe_softmax", "special_softmax"}
WEIGHTS = SOFTMAXES | {"sigmoid", "relu", "exp", "log_softmax"}
LOGITS = SHAPE | SELECTS | JOINS | PADS | {
    "add", "sub", "rsub", "mul", "div", "true_divide", "neg", "tanh", "masked_fill", "where", "maximum", "minimum", "clamp",
    "clamp_min", "clamp_max", "pow", "square", "max", "amax", "sum", "gather", "addcmul", "addcdiv", "tril", "triu",
    "nan_to_num", "sqrt", "mean", "logsumexp", "exp", "log", "threshold", "hardtanh", "abs", "take_along_dim", "norm",
    "linalg_vector_norm", "linalg_norm",
}  # fmt: skip
EMBEDDINGS = {"embedding"}
COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}
# what has no derivative
PICKS = {"topk", "argmax", "sort", "argsort", "argmin", "kthvalue"}
JUMPS = {
    "round", "floor", "ceil", "trunc", "fix", "frac", "floor_divide", "remainder", "fmod", "heaviside", "bucketize",
    "searchsorted", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine",
}  # fmt: skip
CASTS = {"to", "_to_copy", "type_as"}
# what they give depends on the shape of what they take, and on nothing else
SHAPE_ALONE = {
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
}  # fmt: skip
_LIKE = {"type_as", "view_as", "reshape_as", "expand_as"}
_DROPS = {"dropout", "native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "lstm", "gru", "rnn_tanh",
          "rnn_relu"}  # fmt: skip
_FAILS = ("cholesky", "inv", "solve", "eig", "svd", "lstsq", "ldl", "lu_factor", "assert")  # with some numbers
_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_NUMBERS = {"float", "int", "bool", "number", "Scalar", "str"}  # what an operation may give in place of a tensor


def name(n: Node) -> str:
    """The operation without namespace and overload, as in `add`; the target of others."""
    schema = getattr(n.target, "_schema", None)
    return str(n.target) if n.op != "call_function" else schema.name.partition("::")[2] if schema else n.target.__name__  # pyright: ignore


def order(n: Node) -> int:
    """The place of a node in the recording; nodes that came later have the place of what they replace."""
    return n.meta["order"]


def value(n: Node) -> Any:
    """What the node gave in the recording, in shape, dtype and device."""
    return n.meta.get("val")


def shape(n: Node) -> tuple[int, ...] | None:
    """The shape of the node's tensor; nothing where it is none."""
    val = value(n)
    return tuple(val.shape) if isinstance(val, Tensor) else None


def is_float(n: Node) -> bool:
    """Whether the node is a floating-point tensor, or holds some."""
    val = value(n)
    parts = val if isinstance(val, list | tuple) else [val]
    return any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in parts)


def reads(n: Node) -> list[Node]:
    """The nodes whose numbers a node reads; what only gives it a shape or a dtype is left out."""
    alike = getattr(n.target, "_overloadname", "") == "other" if name(n) == "to" else name(n) in _LIKE
    return [m for m in n.all_input_nodes if not alike or m is n.args[0]]


def walk(starts: Iterable[Node], further: Callable[[Node], Iterable[Node]]) -> Iterator[Node]:
    """Some nodes and all that these lead on to, each once. further: where a node leads."""
    todo, visited = list(starts), set[Node]()
    while todo:
        n = todo.pop()
        if n not in visited:
            visited.add(n)
            yield n
            todo += further(n)


def dependents(nodes: Iterable[Node], starts: Iterable[Node]) -> set[Node]:
    """Some nodes, and those among others, in order, that depend on them."""
    found = set(starts)
    for n in nodes:
        if any(m in found for m in n.all_input_nodes):
            found.add(n)
    return found


# what a recording cannot keep


def is_random(n: Node) -> bool:
    """Whether two runs of the node differ: random numbers, but for dropout that drops nothing."""
    if n.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(n.target, "tags", ()):
        return False
    given = {known.name: known.default_value for known in n.target._schema.arguments}  # pyright: ignore
    given |= dict(zip(given, n.args, strict=False)) | n.kwargs
    if name(n) == "scaled_dot_product_attention":
        return bool(given.get("dropout_p"))
    drops = given.get("p") or given.get("dropout")
    return bool(drops and given.get("train")) if name(n) in _DROPS else True


def writes(n: Node) -> Node | None:
    """The node whose memory this one writes into."""
    schema = getattr(n.target, "_schema", None)
    if n.op != "call_function" or schema is None or not schema.is_mutable:
        return None
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found = n.args[i] if i < len(n.args) else n.kwargs.get(argument.name)
            return found if isinstance(found, Node) else None
    return None


def is_view(n: Node) -> bool:
    """Whether the node may share the memory of its first argument."""
    schema = getattr(n.target, "_schema", None)
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node):
        return False
    return name(n) == "getitem" or (schema is not None and any(r.alias_info is not None for r in schema.returns))


def takes_numbers(n: Node) -> bool:
    """Whether a node takes numbers out of the graph: to Python, into a shape, or into whether there is an error.

    What is chosen by an index is none: it is the index that is read.
    """
    if n.op != "call_function":
        return False
    numbers = any(str(r.type) in _NUMBERS for r in getattr(getattr(n.target, "_schema", None), "returns", ()))
    fails = numbers or name(n).removeprefix("linalg_").lstrip("_").startswith(_FAILS)
    return fails or any(tag in getattr(n.target, "tags", ()) for tag in _TAGS)


def takes_float(n: Node) -> bool:
    """Whether a node takes a floating-point number to Python, where the graph knows nothing of what becomes of it."""
    if n.op != "call_function" or not n.args or not isinstance(n.args[0], Node) or not is_float(n.args[0]):
        return False
    return name(n) in ("item", "_local_scalar_dense") or (name(n) == "equal" and n.args[0] is n.args[1])


def taken_from(n: Node) -> list[Node]:
    """The nodes whose numbers a node that takes some reads."""
    chosen = n.args[1] if name(n) == "index" else n.all_input_nodes
    assert isinstance(chosen, list | tuple)
    return [m for m in chosen if isinstance(m, Node)]
