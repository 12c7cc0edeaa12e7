"""Following constants while a model trains: right numbers, and a run that never learns of it."""

import random
import warnings
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as processes
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssModel,
    LlamaConfig,
    LlamaModel,
)

import howsmooth as hs
from howsmooth.models import FallbackWarning
from howsmooth.program.segments import SegmentMap
from howsmooth.training import TrackingWarning
from howsmooth.training.probe import untouched
from marks import first

SIZE: dict[str, Any] = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}


def gpt(**more: Any) -> Any:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **SIZE, **more))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    return model.train()


def llama() -> LlamaModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    return LlamaModel(LlamaConfig(num_hidden_layers=2, max_position_embeddings=16, **heads, **SIZE)).train()


def bert() -> BertModel:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    return BertModel(BertConfig(num_hidden_layers=2, max_position_embeddings=16, **heads, **SIZE)).train()


def gpt_oss() -> GptOssModel:
    """Learned sinks, large in one layer and small in the other; all else of the two is alike."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 16, "intermediate_size": 24}
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = GptOssModel(GptOssConfig(**layers, **heads, **SIZE, rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
        for k, block in enumerate(model.layers):
            block.self_attn.sinks.copy_(torch.tensor([4.0, 2.0, 0.0, -2.0]) * (1 - 2 * k))  # pyright: ignore
    return model.train()


def ids(rows: int = 1, n: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 30, (rows, n), generator=torch.Generator().manual_seed(seed))


class Plain(nn.Module):
    """A layer with a softmax of its own, a BatchNorm, and noise, as people write them."""

    def __init__(self, hidden: bool = False, checkpointed: bool | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(_Block(hidden) for _ in range(2))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.checkpointed is None else checkpoint(block, x, use_reentrant=self.checkpointed)
        return x


class _Block(nn.Module):
    def __init__(self, hidden: bool):
        super().__init__()
        self.qkv, self.out, self.norm, self.hidden = nn.Linear(8, 24), nn.Linear(8, 8), nn.BatchNorm1d(8), hidden
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm((x + self.drop(self.attend(x))).mT).mT

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        if not self.hidden:
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        weights = ((q @ k.mT).exp() + 0.1).log().softmax(-1)  # no product of queries and keys
        return self.out((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("map", ["normed", "block"])
def test_tracked_constants_are_the_certified_ones(map):
    model = gpt()
    tracker = hs.Tracker(model, {"input_ids": ids(2)}, map=map, check_every=0)
    values = [tracker.update() for _ in range(12)][-1]
    loaded = hs.load(model)
    for k in range(2):
        rows = [loaded.measure(layer=k, map=map, ids=row.tolist()) for row in ids(2)]
        truth = max(m.value for m in rows)
        assert values[f"smoothness/layer_0{k}"] == pytest.approx(truth, rel=2e-3)
        assert values[f"smoothness/layer_0{k}"] <= truth * (1 + 1e-4)


@pytest.mark.slow
def test_layers_with_sinks_of_their_own():
    model = gpt_oss()
    tracker = hs.Tracker(model, {"input_ids": ids()}, check_every=1)
    values = [tracker.update() for _ in range(3)][-1]
    truth = hs.load(gpt_oss().eval()).capture(ids=ids()).measure()
    assert [values[tracker.key(k)] for k in (0, 1)] == pytest.approx([m.value for m in truth], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("build", [llama, bert])
def test_heads_and_padding(build):
    model, mask = build(), torch.ones(2, 9).long()
    mask[1, 6:] = 0
    tracker = hs.Tracker(model, {"input_ids": ids(2), "attention_mask": mask}, heads=True, check_every=0)
    values = [tracker.update() for _ in range(12)][-1]
    loaded = hs.load(model)
    captured = [loaded.capture(ids=row.tolist(), mask=m.tolist()) for row, m in zip(ids(2), mask, strict=True)]
    both = [c.measure(1, heads=True) for c in captured]
    assert values["smoothness/layer_01"] == pytest.approx(max(m.value for m in both), rel=2e-3)
    for h in range(len(both[0].heads)):
        alone = max(m.heads[h].value for m in both)
        assert values[f"smoothness/head/layer_01/head_{h:02d}"] == pytest.approx(alone, rel=5e-3)


def test_what_is_logged_beside():
    model, row = gpt().double(), ids()
    values = hs.Tracker(model, {"input_ids": row}, heads="logits", check_every=0).update()
    few = hs.Tracker(model, {"input_ids": row}, check_every=0).update()
    assert few.keys() == {key for key in values if "/head_" not in key}
    captured = hs.load(model).capture(input_ids=row)
    attn, x = captured.attention(1), captured.tokens(1)
    q, k, _ = attn.vectors(x[None])
    logits = (attn.scale * q @ k.mT)[0].masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
    weights = logits.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1).mean()
    for h in range(2):
        assert values[f"smoothness/max_logit/layer_01/head_0{h}"] == pytest.approx(float(logits[h].max()))
    assert values["smoothness/max_logit/layer_01"] == pytest.approx(float(logits.max()))
    assert values["smoothness/entropy/layer_01"] == pytest.approx(float(entropy))
    assert values["smoothness/sink/layer_01"] == pytest.approx(float(weights.mean((0, 1)).max()))
    assert values["smoothness/radius/layer_01"] == pytest.approx(float(x.square().sum(-1).mean().sqrt()))


def test_attention_that_cannot_be_cut_is_tracked_through_its_own_code():
    torch.manual_seed(0)
    model, x = Plain(hidden=True).train(), torch.randn(1, 6, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        tracker = hs.Tracker(model, x, check_every=0)
        truth = hs.load(model).capture(inputs=x).measure(1).value
        values = [tracker.update() for _ in range(12)][-1]
    assert values["smoothness/layer_01"] == pytest.approx(truth, rel=2e-3)
    assert "smoothness/entropy/layer_01" not in values


@pytest.mark.slow
def test_half_precision_weights_are_widened():
    model = llama()
    values = [hs.Tracker(m, {"input_ids": ids()}, check_every=0).update() for m in (model, model.bfloat16())]
    assert values[1]["smoothness/layer_01"] == pytest.approx(values[0]["smoothness/layer_01"], rel=0.05)
    assert model.dtype == torch.bfloat16


def losses(model: Any, tracked: bool, steps: int = 2, **how: Any) -> tuple[list[float], Any]:
    """A loss curve, with dropout, mixed precision and gradient accumulation, and what was left behind."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    inputs = how.pop("inputs", {"input_ids": ids(4, seed=3)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inner = getattr(model, "_orig_mod", model)
    inner = getattr(inner, "module", inner)
    tracker = hs.Tracker(model, how.pop("probe", {"input_ids": ids(2)}), check_every=4, **how) if tracked else None
    curve = []
    for step in range(2 * steps):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            out = out[0] if not isinstance(out, torch.Tensor) else out
            loss = out.float().square().mean()
        loss.backward()
        if tracker is not None:
            assert tracker.update()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        curve.append(loss.item())
    left = [random.random(), np.random.rand(), *torch.rand(2).tolist()]  # noqa: NPY002
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in inner.modules())
    state = {k: v.clone() for k, v in inner.state_dict().items()}
    return curve, (left, hooks, [m.training for m in inner.modules()], state, [p.grad is None for p in inner.parameters()])


def same(one: Any, other: Any) -> bool:
    curve, left = zip(one, other, strict=True)
    states = [s[3] for s in left]
    rest = [(*s[:3], s[4]) for s in left]
    return curve[0] == curve[1] and rest[0] == rest[1] and all(torch.equal(states[0][k], states[1][k]) for k in states[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt", "plain", "reentrant", "modern"])
def test_a_run_is_bit_equal_with_and_without_the_tracker(kind):
    def run(tracked: bool) -> Any:
        torch.manual_seed(0)
        if kind == "gpt":
            model = gpt()
            model.gradient_checkpointing_enable({"use_reentrant": False})
            return losses(model, tracked)
        model = Plain(checkpointed={"plain": None, "reentrant": True, "modern": False}[kind]).train()
        x = torch.randn(4, 6, 8).requires_grad_()
        return losses(model, tracked, inputs=x, probe=x[:2].detach())

    assert same(run(False), run(True))


def test_the_comparison_sees_a_draw():
    one, other = losses(gpt(), False), losses(gpt(), False)
    assert same(one, other)
    torch.manual_seed(0)
    assert not same(one, losses(gpt(embd_pdrop=0.2), False))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
@pytest.mark.parametrize("way", first(["whole", "blocks"]))
def test_compiled_models(way):
    from torch._dynamo.testing import CompileCounter

    def run(tracked: bool) -> Any:
        torch._dynamo.reset()
        counter, model = CompileCounter(), gpt(attn_implementation="eager")
        if way == "whole":
            model = torch.compile(model, backend=counter)
        else:
            for block in model.transformer.h:
                block.compile(backend=counter)
        return (*losses(model, tracked, steps=2), counter.frame_count)

    *plain, frames = run(False)
    *tracked, again = run(True)
    assert same(plain, tracked)
    assert frames == again > 0


def test_untouched_restores_what_a_model_does_to_itself():
    class Counts(nn.Module):
        calls: torch.Tensor
        table: torch.Tensor

        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("table", torch.ones(2))

        def forward(self) -> None:
            self.calls += torch.rand(1) + random.random()
            self.table = torch.zeros(3)

    module = Counts()
    table, before = module.table, torch.random.get_rng_state()
    with untouched(module):
        module()
        assert module.table.shape == (3,)
    assert module.table is table
    assert module.calls.item() == 0
    assert torch.equal(before, torch.random.get_rng_state())


def test_nan_weights_are_named_and_training_goes_on():
    model = gpt()
    tracker = hs.Tracker(model, {"input_ids": ids()}, check_every=2)
    assert all(v == v for v in tracker.update().values())
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = torch.nan
    with pytest.warns(TrackingWarning, match=r"step 70: weights of layer 1 \(transformer.h.1.attn\) are not finite"):
        values = tracker.update(70)
    assert values["smoothness/layer_00"] > 0
    assert np.isnan(values["smoothness/layer_01"])
    assert np.isnan(values["smoothness/max_logit/layer_01"])
    assert "step 70" in str(tracker.broken)
    again = tracker.update(80)  # said once
    assert np.isnan(again["smoothness/layer_01"])
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = 0.0
    assert tracker.update(90)["smoothness/layer_01"] > 0


def test_overflow_is_no_small_number():
    model = gpt()
    tracker = hs.Tracker(model, {"input_ids": ids()}, check_every=0)
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.mul_(1e25)
    with pytest.warns(TrackingWarning, match="step 0: what enters layer 0"):
        assert np.isnan(tracker.update()["smoothness/layer_00"])


def test_what_changes_is_no_dataclass_and_says_little_of_itself():
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    tracker, start = hs.Tracker(model, torch.randn(1, 3, 8), check_every=0), hs.WarmStart()
    tracker.update()
    assert repr(tracker) == "Tracker(TransformerEncoder, attention of 2 layers, 1 updates)"
    assert repr(start) == "WarmStart(1, empty)"
    hs.smoothness(torch.tanh, torch.ones(3), start)
    assert repr(start) == "WarmStart(1, directions (1, 3))"
    assert repr(hs.SmoothnessPenalty(model, 2.0)) == "SmoothnessPenalty(TransformerEncoder, attention above 2)"
    assert not any(is_dataclass(kind) for kind in (hs.Tracker, hs.WarmStart, SegmentMap))


@pytest.mark.slow
def test_check_reports_drift_and_sets_directions_right():
    model = gpt()
    tracker = hs.Tracker(model, {"input_ids": ids()}, check_every=3)
    first = tracker.update()
    assert abs(first["smoothness/drift/layer_00"]) < 2e-3
    assert first["smoothness/layer_00"] <= first["smoothness/upper/layer_00"]
    assert "smoothness/upper/layer_00" not in tracker.update()
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p) * p.std())
    check = tracker.check()
    assert {row.layer for row in check.rows} == {0, 1}
    assert check.worst.drift < 0
    assert all(row.tracked <= row.value * (1 + 1e-4) <= row.upper * (1 + 1e-4) for row in check.rows)
    assert abs(tracker.check().worst.drift) < 2e-3
    assert check.to_dict()["rows"][0]["drift"] == check.rows[0].drift


def test_bad_input():
    with pytest.raises(hs.HowSmoothError, match="expected a model with self-attention"):
        hs.Tracker(nn.Sequential(nn.Linear(4, 4)), torch.randn(1, 3, 4))
    with pytest.raises(hs.HowSmoothError, match="expected inputs that GPT2LMHeadModel"):
        hs.Tracker(gpt(), {"input_ids": ids(), "pixels": ids()})
    with pytest.raises(hs.HowSmoothError, match="expected token ids from 0 to 29, got 99"):
        hs.Tracker(gpt(), {"input_ids": torch.tensor([[99]])})
    with pytest.raises(hs.HowSmoothError, match="expected layers from 0 to 1"):
        hs.Tracker(gpt(), {"input_ids": ids()}, layers=[2])
    with pytest.raises(hs.HowSmoothError, match="expected a map among"):
        hs.Tracker(gpt(), {"input_ids": ids()}, map="model")
    with pytest.raises(hs.HowSmoothError, match="expected a torch module that trains"):
        hs.Tracker("gpt", {"input_ids": ids()})  # pyright: ignore[reportArgumentType]
    with pytest.raises(hs.HowSmoothError, match="expected a probe by the names"):
        hs.Tracker(gpt(), [ids()])  # pyright: ignore[reportArgumentType]


def _one_of_two(rank: int, port: int, answers: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(gpt())
    probe = {"input_ids": ids(seed=rank)}
    both = [hs.Tracker(model, probe, check_every=0, average=average).update() for average in (True, False)]
    answers.put((rank, *both))
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_several_processes_average_or_leave_it_to_the_first():
    context = processes.get_context("fork")
    answers = context.SimpleQueue()
    port = 29511 + random.SystemRandom().randrange(2000)
    workers = [context.Process(target=_one_of_two, args=(rank, port, answers)) for rank in range(2)]
    for worker in workers:
        worker.start()
    averaged, alone = {}, {}
    for _ in workers:
        rank, averaged[rank], alone[rank] = answers.get()
    for worker in workers:
        worker.join()
    key = "smoothness/layer_00"
    own = [hs.Tracker(gpt(), {"input_ids": ids(seed=rank)}, check_every=0).update()[key] for rank in range(2)]
    assert averaged[0] == averaged[1]
    assert averaged[0][key] == pytest.approx(sum(own) / 2)
    assert alone[0][key] == pytest.approx(own[0])
    assert alone[1] == {}


class _Twice(nn.Module):
    """A block that attends twice, the second time over what the first one gave, with a checkpoint inside if asked."""

    def __init__(self, checkpointed: bool):
        super().__init__()
        self.first, self.second, self.checkpointed = _Block(False), _Block(False), checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + (checkpoint(self.first.attend, x, use_reentrant=False) if self.checkpointed else self.first.attend(x))
        return x + self.second.attend(x)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_map_with_two_attention_calls(checkpointed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.ModuleList([_Twice(checkpointed)])[0], nn.Linear(8, 2)).train()
    x = torch.randn(2, 6, 8)
    tracker = hs.Tracker(model, x, layers=[0], map="block", check_every=0)
    value = [tracker.update() for _ in range(8)][-1]["smoothness/layer_00"]
    block: Any = model[0]
    block.checkpointed = False
    truth = max(hs.lipschitz(lambda t: block(t[None])[0], row).value for row in x)
    assert value == pytest.approx(truth, rel=2e-3)
    assert value <= truth * (1 + 1e-4)


@pytest.mark.slow
def test_layers_of_several_kinds_are_followed_together():
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(8, heads, 12, batch_first=True) for heads in (2, 4, 2)]
    model, x = nn.Sequential(*layers).train(), 3 * torch.randn(2, 5, 8)
    tracker = hs.Tracker(model, x, check_every=0)
    values = [tracker.update() for _ in range(8)][-1]
    loaded = hs.load(model)
    for k in range(3):
        truth = max(loaded.capture(inputs=row[None]).measure(k).value for row in x)
        assert values[f"smoothness/layer_0{k}"] == pytest.approx(truth, rel=2e-3)
        assert values[f"smoothness/max_logit/layer_0{k}"] < float("inf")
        tokens = torch.cat([loaded.capture(inputs=row[None]).tokens(k) for row in x])
        assert values[f"smoothness/radius/layer_0{k}"] == pytest.approx(float(tokens.square().sum(-1).mean().sqrt()), rel=1e-4)


def test_modes_are_left_alone_where_eval_does_more():
    class Merges(nn.TransformerEncoderLayer):
        merged = False

        def train(self, mode: bool = True) -> "Merges":
            self.merged = not mode
            return super().train(mode)

    model = nn.Sequential(Merges(8, 2, 12, batch_first=True)).train()
    hs.Tracker(model, torch.randn(1, 5, 8), check_every=0).update()
    assert not model[0].merged
    assert all(m.training for m in model.modules())
