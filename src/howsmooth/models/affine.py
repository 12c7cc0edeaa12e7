"""A layer of a model as `howsmooth.Attention`, where it is one: affine queries, keys and values, one projection behind."""

import torch
from torch import Tensor
from torch.func import functional_call

from howsmooth.errors import BadInputError
from howsmooth.kernels import SoftmaxAttention
from howsmooth.maps import Attention
from howsmooth.models.cut import Cut

_EXACT = 1e-9  # agreement in float64 that only the same formula gives


@torch.no_grad()
def as_attention(cut: Cut) -> Attention:
    """The closed form of an `attention` map, its weights read off its answers to unit vectors.

    `W` and `b` of queries, keys and values come from the tokens `0, e_1, …, e_d`, sent through as many at a time as the map
    takes. The result must give the layer's own output at its own input to 1e-9 in float64: rotary phases, norms on queries or
    keys, gates and anything else that is not this formula are refused.
    """
    layer = cut.layer
    kind = type(layer.module).__name__
    if not cut.kernels or layer.projection is None or layer.heads == 0:
        raise BadInputError(
            f"expected a layer with one attention call and one output projection, got {kind}; measure it, or bound its cut map"
        )
    if cut.real is not None:
        raise BadInputError("expected an input without padding, got a padded one; leave the padding out")
    cut = cut.to(torch.float64)
    x = cut.start.double()
    n, d = x.shape
    units = torch.cat([torch.zeros(1, d), torch.eye(d)]).to(x)
    answers: list[list[Tensor]] = [[], [], []]
    for start in range(0, d + 1, n):
        part = units[start : start + n]
        kernel = _only(cut._run(torch.cat([part, x[len(part) :]]))[1], kind)
        for found, t in zip(answers, kernel.inputs, strict=True):
            found.append(t[0, :, : len(part)].transpose(0, 1).flatten(1))  # (part, heads · width)
    weights, biases = [], []
    for found in answers:
        whole = torch.cat(found)
        biases.append(whole[0])
        weights.append((whole[1:] - whole[0]).mT.contiguous())
    value, kernels = cut._run(x)
    kernel = _only(kernels, kind)
    scores = kernel.scores
    state = {k: t.detach().double() for k, t in layer.projection.named_parameters()}
    o_width = layer.heads * kernel.output.shape[-1]
    b_o = functional_call(layer.projection, state, (x.new_zeros(1, o_width),))[0]
    w_o = (functional_call(layer.projection, state, (torch.eye(o_width, dtype=x.dtype, device=x.device),)) - b_o).mT
    found = Attention(
        weights[0],
        weights[1],
        weights[2],
        w_o.contiguous(),
        heads=layer.heads,
        kv_heads=kernel.inputs[1].shape[1],
        b_q=biases[0],
        b_k=biases[1],
        b_v=biases[2],
        b_o=b_o,
        scale=scores.scale,
        softcap=scores.softcap,
        causal=scores.mask.causal,
        window=scores.mask.window,
        bias=scores.mask.bias,
    )
    error = float((found(x) - value).abs().max() / value.abs().max())
    if not error <= _EXACT:
        raise BadInputError(
            f"expected a layer whose queries, keys and values are affine in its input, got {kind}, off by {error:.1e} "
            "(rotary phases, norms or gates); measure it instead"
        )
    return found


def _only(kernels: list[SoftmaxAttention], kind: str) -> SoftmaxAttention:
    if len(kernels) != 1 or kernels[0].output.shape[0] != 1:
        raise BadInputError(f"expected a layer with one attention call over all tokens, got {kind}; measure it instead")
    return kernels[0]
