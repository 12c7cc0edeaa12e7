"""Names of aten operations by what they do, without namespace and overload."""

SHAPE = {
    "view", "_unsafe_view", "reshape", "transpose", "permute", "expand", "clone", "t", "unsqueeze", "squeeze", "contiguous",
    "alias", "flatten", "unflatten", "to", "_to_copy", "type_as", "dropout", "movedim", "mT", "moveaxis", "swapaxes", "numpy_T",
    "detach", "view_as", "reshape_as", "expand_as", "repeat", "repeat_interleave", "float", "double", "adjoint", "matrix_H",
    "flip", "roll", "feature_dropout", "lift_fresh", "lift_fresh_copy", "broadcast_to", "copy", "rename", "H", "T", "tile",
}  # fmt: skip
PARTS = {
    "select", "slice", "split", "split_with_sizes", "chunk", "unbind", "getitem", "narrow", "tensor_split", "index_select",
    "unsafe_split", "unsafe_chunk", "hsplit", "vsplit", "dsplit", "select_copy", "view_as_real", "view_as_complex", "index",
}  # fmt: skip
JOINS = {
    "cat", "stack", "concat", "concatenate", "hstack", "vstack", "dstack", "rewritten", "copied", "select_scatter",
    "slice_scatter",
}  # fmt: skip
MATRIX = {
    "linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d", "convolution", "mv", "addbmm",
    "tensordot", "_convolution", "bilinear", "conv_transpose1d", "conv_transpose2d", "inner", "dot", "linalg_matmul",
    "_grouped_mm", "grouped_mm_fallback",
}  # fmt: skip
CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "convolution", "_convolution", "conv_transpose1d", "conv_transpose2d"}
PICKS = {"topk", "argmax", "sort", "argsort", "argmin", "kthvalue"}
PRODUCT = {"matmul", "bmm", "baddbmm", "einsum", "mm", "addbmm", "cdist", "_euclidean_dist", "inner", "tensordot", "addmm"}
WEIGHTS = {"softmax", "_softmax", "_safe_softmax", "special_softmax", "sigmoid", "relu", "exp", "log_softmax"}
LOGITS = SHAPE | PARTS | JOINS | {
    "add", "sub", "rsub", "mul", "div", "true_divide", "neg", "tanh", "masked_fill", "where", "maximum", "minimum", "clamp",
    "clamp_min", "clamp_max", "pow", "square", "max", "amax", "sum", "gather", "scale", "addcmul", "addcdiv", "constant_pad_nd",
    "pad", "tril", "triu", "nan_to_num", "sqrt", "mean", "logsumexp", "exp", "log", "threshold", "hardtanh", "abs",
    "take_along_dim", "norm", "linalg_vector_norm", "linalg_norm",
}  # fmt: skip
PADS = {"constant_pad_nd", "pad"}
GATES = {"mul", "addcmul"}
ADDS = {"add", "sub", "rsub", "lerp", "addcmul"}
NORMS = {"layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "_fused_rms_norm"}
TABLES = {"embedding"}
# what they give depends on the shape of what they take, and on nothing else
SHAPE_ALONE = {
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
}  # fmt: skip
JUMPS = {
    "round", "floor", "ceil", "trunc", "fix", "frac", "floor_divide", "remainder", "fmod", "heaviside",
    "bucketize", "searchsorted", "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine",
}  # fmt: skip
CASTS = {"to", "_to_copy", "type", "int", "long", "short", "char", "type_as"}
