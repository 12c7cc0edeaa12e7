"""The rows of parameters that make a head: written into, they scale that head and no other."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from howsmooth.program import Ends, Layers, Program, ends_of, record
from howsmooth.program.closed import ByHead, HeadParameters, ReadCall, Rows, head_weights
from howsmooth.program.replay import Run
from howsmooth.program.sides import agree
from problems.zoo import TOKENS, VOCABULARY, ids, randomize

from .test_closed import LowRank, Plain, Torch, library, recorded, tokens

t: Any = transformers


def weights_of(program: Program, layer: int = 0) -> tuple[HeadParameters, Ends]:
    ends = ends_of(Layers(program), layer)
    return head_weights(Run.recorded(program), ends), ends


def vectors(program: Program, ends: Ends) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of today's weights, (heads, n, d)."""
    call = ReadCall.of(Run.recorded(program), ends).call
    return call.q[0], call.k[0], call.v[0]


@torch.no_grad()
def scale(program: Program, rows: tuple[Rows, ...], by: float) -> None:
    for r in rows:
        p = program.module.get_parameter(r.name)
        p.index_copy_(r.axis, r.index, by * p.index_select(r.axis, r.index))


def check_side(program: Program, ends: Ends, by_head: ByHead | None, role: int) -> None:
    assert by_head is not None
    for h, rows in enumerate(by_head):
        before = vectors(program, ends)
        group = len(before[role]) // len(by_head)
        scale(program, rows, 0.5)
        after = vectors(program, ends)
        for i, (a, b) in enumerate(zip(before, after, strict=True)):
            own = torch.arange(len(a)) // group == h
            wanted = torch.where(own[:, None, None], 0.5 * a, a) if i == role else a
            assert agree(b, wanted), (h, i)
        scale(program, rows, 2.0)


def check_outputs(program: Program, ends: Ends, by_head: ByHead | None) -> None:
    """Twice a head's part of the projection is twice its part of the output."""
    assert by_head is not None

    def at(z: Tensor) -> Tensor:
        read = ReadCall.of(Run.recorded(program), ends)
        return read.part.between(read.node, read.leave).of_flat(z)

    q, _, v = vectors(program, ends)
    z = tokens(len(q), q.shape[1], v.shape[-1])
    for h, rows in enumerate(by_head):
        alone, rest = z.clone(), z.clone()
        alone[[i for i in range(len(z)) if i != h]] = 0
        rest[h] = 0
        parts, zero = (at(alone), at(rest)), at(0 * z)
        scale(program, rows, 2.0)
        assert agree(at(alone) - zero, 2 * (parts[0] - zero))
        assert agree(at(rest), parts[1])
        scale(program, rows, 0.5)


def check(program: Program, layer: int = 0) -> HeadParameters:
    found, ends = weights_of(program, layer)
    for role, by_head in enumerate((found.queries, found.keys, found.values)):
        check_side(program, ends, by_head, role)
    check_outputs(program, ends, found.outputs)
    assert found.facing == ()
    return found


@pytest.mark.parametrize("kind", ["bert", "gpt2", "falcon", "llama", "phi3", "gpt-neox", "t5 encoder"])
def test_models_of_the_library(kind: str):
    program, layer = library(kind)
    check(program, layer)


def test_rows_are_named():
    program, layer = library("llama")
    found, _ = weights_of(program, layer)
    assert found.keys is not None
    assert found.queries is not None
    assert found.outputs is not None
    assert (len(found.queries), len(found.keys)) == (4, 2)
    (rows,) = found.keys[1]
    assert (rows.name, rows.axis, rows.index.tolist()) == (f"layers.{layer}.self_attn.k_proj.weight", 0, list(range(6, 12)))
    (rows,) = found.outputs[2]
    assert (rows.name, rows.axis, rows.index.tolist()) == (f"layers.{layer}.self_attn.o_proj.weight", 1, list(range(12, 18)))


def test_rows_of_a_fused_matrix_and_its_bias():
    program, layer = library("gpt2")
    found, _ = weights_of(program, layer)
    assert found.values is not None
    parts = {r.name.rpartition(".")[2]: (r.axis, r.index.tolist()) for r in found.values[1]}
    assert parts == {"weight": (1, list(range(40, 48))), "bias": (0, list(range(40, 48)))}


@pytest.mark.parametrize("options", [{"batch_first": True}, {}])
def test_torchs_own_module(options: dict[str, Any]):
    torch.manual_seed(0)
    module = Torch(**options).double()
    for p in module.parameters():
        nn.init.normal_(p)
    found = check(record(module, (tokens(1, 5, 8) if options else tokens(5, 1, 8),)))
    assert found.keys is not None
    assert {r.name: r.index.tolist() for r in found.keys[1]} == {
        "attention.in_proj_weight": [12, 13, 14, 15],
        "attention.in_proj_bias": [12, 13, 14, 15],
    }


@pytest.mark.parametrize("what", ["plain", "einsum", "convolution", "complex phases", "scaled", "gated"])
def test_small_modules(what: str):
    check(recorded(Plain(what)))


def test_an_adapter_is_scaled_with_its_matrix():
    module: Any = Plain()
    module.q, module.o = LowRank(module.q), LowRank(module.o)
    found = check(recorded(module))
    assert found.queries is not None
    assert {r.name.partition(".q.")[2] for r in found.queries[0]} == {"base.weight", "base.bias", "up.weight"}


@pytest.mark.parametrize("what", ["norms", "clipped", "no projection of keys"])
def test_what_no_rows_scale(what: str):
    found, _ = weights_of(recorded(Plain(what)))
    assert found.keys is None
    assert found.values is not None
    assert (found.queries is None) == (what == "norms")


def mla() -> nn.Module:
    config = t.DeepseekV3Config(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=2,
        q_lora_rank=12, kv_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6, v_head_dim=5, vocab_size=VOCABULARY, **TOKENS,
    )  # fmt: skip
    return randomize(t.DeepseekV3Model(config)).double()


def test_latent_attention():
    """Keys of MLA have a part that all heads share: the queries that face it take the whole factor."""
    program = record(mla(), (), {"input_ids": ids(), "use_cache": False})
    found, ends = weights_of(program, 1)
    check_side(program, ends, found.values, 2)
    check_outputs(program, ends, found.outputs)
    assert found.queries is not None
    assert found.keys is not None
    assert found.facing
    for h, (queries, keys, facing) in enumerate(zip(found.queries, found.keys, found.facing, strict=True)):
        q, k, _ = vectors(program, ends)
        before = q @ k.mT
        for rows, by in ((queries, 0.5), (keys, 0.5), (facing, 0.25)):
            scale(program, rows, by)
        q, k, _ = vectors(program, ends)
        own = (torch.arange(2) == h)[:, None, None]
        assert agree(q @ k.mT, torch.where(own, 0.25 * before, before))
        for rows, by in ((queries, 2.0), (keys, 2.0), (facing, 4.0)):
            scale(program, rows, by)
    names = [{r.name.partition("self_attn.")[2] for r in part[0]} for part in (found.queries, found.keys, found.facing)]
    assert names == [{"q_b_proj.weight"}, {"kv_b_proj.weight"}, {"q_b_proj.weight"}]
