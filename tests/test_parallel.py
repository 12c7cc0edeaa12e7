"""Attention over tokens that lie on several processes, against one process that has them all."""

import os
import runpy
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, jvp, vjp, vmap

import howsmooth as hs
from marks import sample
from problems.processes import together

D = torch.float64
MASKS = {
    "full": {},
    "causal": {"is_causal": True},
    "causal window": {"is_causal": True, "window": 4},
    "soft-cap, window": {"window": 5, "softcap": 2.0},
    "mask": {"attn_mask": True},
    "mask for all heads": {"attn_mask": True, "rows": True},
}
HEADS = [(4, 2), (3, 3), (6, 2), (12, 12), (12, 4), (1, 1)]  # of queries, and of keys and values


def mesh_of(count):
    return init_device_mesh("cpu", (count,))


def products(f, x, t, g):
    """Output, jvp, vjp, second derivatives in both orders, a batch of vjps, and torch's own backward pass."""
    leaves = [a.clone().requires_grad_() for a in x]
    f(*leaves).backward(g)
    forward_over_reverse = jvp(lambda *a: vjp(f, *a)[1](g), x, t)[1]
    reverse_over_forward = grad(lambda *a: (jvp(f, a, t)[1] * g).sum(), argnums=(0, 1, 2))(*x)
    batch = vmap(lambda u: vjp(f, *x)[1](u)[1], out_dims=1)(torch.stack([g, -2 * g]))
    return [*jvp(f, x, t), *vjp(f, *x)[1](g), *forward_over_reverse, *reverse_over_forward, batch, *(a.grad for a in leaves)]


def errors(rank, count, heads, lengths, mask, told):
    """By product, how far this process's shard is off that of one process."""
    of_queries, of_keys = heads
    start = sum(lengths[:rank])
    n, own = sum(lengths), slice(start, start + lengths[rank])
    random = torch.Generator().manual_seed(0)

    def drawn(heads, width):
        return torch.randn(2, heads, n, width, generator=random, dtype=D)

    def part(t):
        return t[..., own, :]

    x, t = (tuple(drawn(h, w) for h, w in ((of_queries, 6), (of_keys, 6), (of_keys, 5))) for _ in range(2))
    g, given = drawn(of_queries, 5), dict(mask)
    shard = given
    if given.pop("attn_mask", False):
        one = given.pop("rows", False)
        visible = torch.rand(*(() if one else (1, of_queries)), n, n, generator=random) > 0.4
        given = {"attn_mask": visible | torch.eye(n, dtype=torch.bool)}
        shard = {"attn_mask": part(given["attn_mask"])}
    want = products(lambda *a: hs.sdpa(*a, enable_gqa=True, **given), x, t, g)
    with hs.context_parallel(mesh_of(count), lengths=lengths if told else None):
        at = (tuple(part(a) for a in x), tuple(part(a) for a in t), part(g))
        got = products(lambda *a: hs.sdpa(*a, enable_gqa=True, **shard), *at)
    return [float((a - part(b)).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


def all_errors(rank, count, cases):
    return [(case, errors(rank, count, *case)) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("count", sample([2, 3, 4], None, pytest.mark.weekly, pytest.mark.weekly))
def test_every_product_is_that_of_one_process(count):
    lengths = ([5] * count, [3 + rank for rank in range(count)])
    cases = [(heads, n, mask, heads[0] % 4 == 0) for heads in HEADS for n in lengths for mask in MASKS.values()]
    answers = together(count, all_errors, count, cases[:: 1 if count == 3 else 2])
    for answer in answers:
        assert not isinstance(answer, str), answer
        for case, found in answer:
            assert max(found) <= 1e-12, case


def shares(rank):
    """How far a shard of a Hessian product is off, for inputs without heads; and of a gradient in a mask that is learned."""
    random = torch.Generator().manual_seed(1)
    x, t, bias = (torch.randn(1, 4, width, dtype=D, generator=random) for width in (3, 3, 4))
    own = slice(2 * rank, 2 * rank + 2)

    def products(x, t, bias):
        def loss(x, bias):
            return (hs.sdpa(x, x, x, attn_mask=bias) ** 2).sum()

        return jvp(lambda x: grad(lambda x: (hs.sdpa(x, x, x, is_causal=True) ** 2).sum())(x), (x,), (t,))[1], grad(loss, 1)(
            x, bias
        )

    want = products(x, t, bias)
    with hs.context_parallel(mesh_of(2)):
        found = products(x[:, own], t[:, own], bias[:, own])
    return [float((a - b[:, own]).abs().max()) for a, b in zip(found, want, strict=True)]


@pytest.mark.slow
def test_inputs_without_heads_and_masks_that_are_learned():
    """What a process differentiates is the sum of all processes' losses."""
    for found in together(2, shares):
        assert max(found) <= 1e-12


def meanflow(rank):
    path = Path(__file__).parents[1] / "examples" / "context_parallel.py"
    return runpy.run_path(str(path))["main"](mesh_of(2))


@pytest.mark.slow
def test_the_example():
    """A MeanFlow step through a transformer that is not ours."""
    assert max(together(2, meanflow)) <= 1e-12


def short(rank):
    """How far shards of three tokens and one are off under a mask, with lengths told; and a mask that is one number."""
    q, k, v = torch.randn(3, 1, 2, 4, 4, dtype=D, generator=torch.Generator().manual_seed(2))
    mask, own = (
        torch.randn(4, 4, dtype=D, generator=torch.Generator().manual_seed(3)),
        slice(0, 3) if rank == 0 else slice(3, 4),
    )
    want = [hs.sdpa(q, k, v, m)[..., own, :] for m in (mask, mask[:1], torch.tensor(0.5, dtype=D))]
    with hs.context_parallel(mesh_of(2), lengths=[3, 1]):
        q, k, v = (t[..., own, :] for t in (q, k, v))
        found = [hs.sdpa(q, k, v, m) for m in (mask[own], mask[:1], torch.tensor(0.5, dtype=D))]
    return [float((a - b).abs().max()) for a, b in zip(found, want, strict=True)]


@pytest.mark.slow
def test_a_shard_of_one_token_under_a_mask():
    """Whose row may be of one query or of all."""
    for found in together(2, short):
        assert max(found) <= 1e-12


def tangents(rank):
    """Of torch's collectives, and of those under `sdpa`, along a tangent of ones."""
    group, x = dist.distributed_c10d._get_default_group(), torch.ones(2, 4, dtype=D)
    own = jvp(lambda x: functional.all_to_all_single_autograd(x, None, None, group).clone(), (x,), (x,))
    with hs.context_parallel(mesh_of(2)):
        ours = jvp(lambda v: hs.sdpa(0 * x, 0 * x, v), (x,), (x,))
    return [[float(t.detach().norm()) for t in pair] for pair in (own, ours)]


@pytest.mark.slow
def test_torchs_own_collectives_lose_a_tangent_without_a_word():
    """Why there are others here: should torch's keep it, they can take over."""
    for torchs, ours in together(2, tangents):
        assert torchs[0] > 0 == torchs[1]
        assert ours[0] == pytest.approx(ours[1])


def ends(rank, how):
    """One process raises, is killed, or has another width."""
    x = torch.randn(1, 2, 3, 4 + (rank if how == "width" else 0), dtype=D)
    with hs.context_parallel(mesh_of(2)):
        if how != "width":
            hs.sdpa(x, x, x)
        if rank == 1 and how == "raise":
            raise ValueError("out of data")
        if rank == 1 and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return tuple(hs.sdpa(x, x, x).shape)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill", "width"])
def test_a_process_that_fails_ends_the_others_with_a_sentence(how):
    first, second = together(2, ends, how, seconds=60)
    if how == "width":
        for said in (first, second):
            assert said.startswith("BadInputError: expected inputs that differ between processes in the number of tokens alone")
    else:
        assert first.startswith("HowSmoothError: expected every process of the mesh to go on, got RuntimeError")
        assert second == {"raise": "ValueError: out of data", "kill": None}[how]


def refusals(rank):
    mesh, said = mesh_of(2), []
    x = torch.randn(1, 2, 3, 4, dtype=D)
    for given in (
        lambda: hs.context_parallel("cpu"),  # pyright: ignore[reportArgumentType]
        lambda: hs.context_parallel(init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))),
        lambda: hs.context_parallel(mesh, lengths=[3]),
        lambda: hs.context_parallel(mesh, lengths=[4, 4]),
    ):
        try:
            with given():
                hs.sdpa(x, x, x)
        except hs.HowSmoothError as error:
            said.append(str(error))
    with hs.context_parallel(mesh):
        try:
            hs.lipschitz(hs.Attention.from_matrices(torch.eye(2), torch.eye(2)), torch.ones(3, 2))
        except hs.HowSmoothError as error:
            said.append(str(error))
        try:
            with hs.context_parallel(mesh):
                pass
        except hs.HowSmoothError as error:
            said.append(str(error))
    return said, hs.sdpa(x, x, x).shape


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_a_sentence():
    for said, shape in together(2, refusals):
        assert [s.split(";")[0] for s in said] == [
            "expected a DeviceMesh of one dimension, got 'cpu'",
            "expected a DeviceMesh of one dimension, got one of 2",
            "expected 2 whole numbers of tokens, one for each process, got list",
            said[3].split(";")[0],
            said[4].split(";")[0],
            "expected no context_parallel around another, got two",
        ]
        assert said[3].startswith("expected 4 queries and keys on process ")
        assert said[4].startswith("expected a measurement of a whole sequence, got one inside context_parallel of 2 processes")
        assert shape == (1, 2, 3, 4)  # outside again, and alone


def volume(rank, heads):
    """Bytes that this process sends for a forward pass, a jvp and a vjp."""
    sent = []
    plain = dist.all_to_all_single

    def counted(into, out, into_sizes, out_sizes, group):
        sent.append(out.element_size() * (out.numel() - out_sizes[rank]))
        return plain(into, out, into_sizes, out_sizes, group=group)

    dist.all_to_all_single = counted
    x = torch.randn(1, heads, 8, 16)
    with hs.context_parallel(mesh_of(2), lengths=[8, 8]):
        marks = [0]
        for product in (
            lambda: hs.sdpa(x, x, x),
            lambda: jvp(hs.sdpa, (x, x, x), (x, x, x)),
            lambda: vjp(hs.sdpa, x, x, x)[1](x),
        ):
            product()
            marks.append(sum(sent))
    return [b - a for a, b in pairwise(marks)]


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "tensors"), [(4, (2, 4, 4)), (3, (2, 4, 4))])
def test_bytes_sent_are_those_of_the_guide(heads, tensors):
    """With as many key heads as query heads on 2 processes: half of each of four tensors by heads, all of two by keys."""
    shard = heads * 8 * 16 * 4
    assert together(2, volume, heads) == [[count * shard for count in tensors]] * 2


def test_one_process_is_as_without(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        x = torch.randn(1, 2, 5, 4)
        with hs.context_parallel(mesh_of(1)):
            inside = hs.sdpa(x, x, x, is_causal=True)
        assert torch.equal(inside, hs.sdpa(x, x, x, is_causal=True))
    finally:
        dist.destroy_process_group()
