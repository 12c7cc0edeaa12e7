"""Training whose weights lie on several processes: the numbers of one process, and a run that never learns of it."""

import os
import runpy
import signal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaModel
from transformers.distributed import DistributedConfig  # pyright: ignore[reportPrivateImportUsage, reportAttributeAccessIssue]

import howsmooth as hs
from howsmooth.training import gathered
from marks import sample
from problems.processes import together

WAYS = ["fsdp", "ddp", "tp"]
PLAN: Any = {
    **{f"self_attn.{name}_proj": ColwiseParallel for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel,
    "mlp.gate_proj": ColwiseParallel,
    "mlp.up_proj": ColwiseParallel,
    "mlp.down_proj": RowwiseParallel,
}


def llama() -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    size: Any = {"vocab_size": 30, "bos_token_id": 0, "eos_token_id": 0}
    model = LlamaModel(LlamaConfig(num_hidden_layers=2, max_position_embeddings=16, **heads, **size)).double().train()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8 if p.ndim > 1 else 1)
    return model


def ids(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 30, (rows, 9), generator=torch.Generator().manual_seed(seed))


def cut_by_the_library(model: Any, count: int) -> Any:
    """A model that transformers makes tensor parallel as it loads it."""
    own = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": count}
    os.environ.update({key: str(value) for key, value in own.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    with TemporaryDirectory() as folder:
        places = [folder]
        dist.broadcast_object_list(places, src=0)
        model.save_pretrained(places[0])  # written by the first process alone
        dist.barrier()
        how = DistributedConfig(tp_size=count)
        found = LlamaModel.from_pretrained(places[0], dtype=torch.float64, distributed_config=how).train()
        dist.barrier()
    return found


def spread(way: str) -> Any:
    """A model over all processes."""
    model, count = llama(), dist.get_world_size()
    if way == "one":
        return model
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way == "library":
        return cut_by_the_library(model, count)
    sizes = {"fsdp": (count, 1), "tp": (1, count), "fsdp and tp": (2, 2), "hsdp": (2, 2)}[way]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "parts"))
    if "tp" in way:
        for layer in model.layers:
            parallelize_module(layer, mesh["parts"], {name: style() for name, style in PLAN.items()})
    if way != "tp":
        data = mesh if way == "hsdp" else mesh["data"]
        for part in (*model.layers, model):
            fully_shard(part, mesh=data)
    return model


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def followed(
    rank: int, way: str, tracked: bool = True, average: bool = False
) -> tuple[list[float], list[dict[str, float]], Any]:
    """Losses, what was tracked and the last weights of a run in which all processes have the same batches."""
    model = spread(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tracker = hs.Tracker(model, {"input_ids": ids(2, 7)}, check_every=2, average=average) if tracked else None
    losses, values = [], []
    torch.manual_seed(1)
    for step in range(4):
        loss = model(input_ids=ids(2, step)).last_hidden_state.square().mean()
        if tracker is not None and step == 2:
            values.append(tracker.update())  # between forward and backward
        loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if tracker is not None:
            values.append(tracker.update())
    return losses, values, [whole(p.detach()).tolist() for p in model.parameters()]


def clipped(rank: int, way: str) -> tuple[dict[str, Any], Any]:
    model = spread(way)
    found = hs.clip_(model, {"input_ids": ids(2, 7)}, 0.5, quantity="logit")
    return found.to_dict(), [whole(p.detach()).tolist() for p in model.parameters()]


def penalised(rank: int, way: str) -> tuple[list[float], Any]:
    """A penalty beside a loss, at the rows of this process alone, and the gradient of both."""
    model, rows = spread(way), ids(dist.get_world_size(), 5)
    rows = rows if way == "one" or "tp" in way else rows[rank : rank + 1]
    penalty, found = hs.SmoothnessPenalty(model, 0.5, products=30), list[float]()
    for _ in range(2):
        extra = penalty(input_ids=rows) if found else None  # both before and behind the forward pass
        loss = model(input_ids=rows).last_hidden_state.square().mean()
        extra = penalty(input_ids=rows) if extra is None else extra
        (loss + extra).backward()
        found.append(extra.item())
    return found, [p.grad if p.grad is None else whole(p.grad).tolist() for p in model.parameters()]


def both(rank: int, work: Any, way: str) -> Any:
    """What all processes find together, and the first alone."""
    return work(rank, way), work(rank, "one") if rank == 0 else None


def runs(rank: int, way: str) -> Any:
    return followed(rank, way, tracked=False), both(rank, followed, way)


def answers(count: int, *work: Any) -> list[Any]:
    found = together(count, *work)
    assert not [said for said in found if isinstance(said, str)]
    return found


def numbers(nested: Any) -> list[float]:
    """The numbers in lists."""
    return [x for one in nested for x in numbers(one)] if isinstance(nested, list) else [nested]


def off(found: Any, want: Any) -> float:
    """How far numbers are off others, relative to their size."""
    one, other = (torch.tensor(numbers(nested), dtype=torch.float64) for nested in (found, want))
    return float((one - other).norm() / other.norm())


def check_tracker(first: Any, *others: Any) -> None:
    (losses, _, weights), ((tracked, values, left), (_, want, _)) = first
    assert tracked == losses
    assert left == weights
    for found, one in zip(values, want, strict=True):
        assert found.keys() == one.keys()
        assert list(found.values()) == pytest.approx(list(one.values()), rel=1e-6, abs=1e-6)
    for (losses, *_), ((tracked, values, _), _) in others:
        assert tracked == losses
        assert values == [{}] * len(want)  # one process logs


@pytest.mark.slow
@pytest.mark.parametrize("way", [*WAYS, pytest.param("library", marks=pytest.mark.weekly)])
def test_a_tracker_gives_the_numbers_of_one_process_and_leaves_training_alone(way):
    check_tracker(*answers(2, runs, way))


@pytest.mark.slow
@pytest.mark.parametrize("way", sample(WAYS, None, pytest.mark.weekly))
def test_a_penalty_has_the_gradient_of_one_process_with_all_rows(way):
    ((_, slopes), (_, want)), _ = answers(2, both, penalised, way)
    assert off(slopes, want) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("way", sample(WAYS, None, pytest.mark.weekly))
def test_clipped_weights_are_those_of_one_process(way):
    ((found, weights), (one, want)), ((other, _), _) = answers(2, both, clipped, way)
    assert found == other
    assert min(row["factor"] for row in found["rows"]) < 1
    assert [row["factor"] for row in found["rows"]] == pytest.approx([row["factor"] for row in one["rows"]], rel=1e-9)
    assert off(weights, want) <= 1e-9


@pytest.mark.slow
@pytest.mark.weekly
@pytest.mark.parametrize("way", ["fsdp and tp", "hsdp", "fsdp"])
def test_four_processes(way):
    check_tracker(*answers(4, runs, way))
    ((_, slopes), (_, want)), *_ = answers(4, both, penalised, way)
    assert off(slopes, want) <= 1e-6
    ((_, weights), (_, want)), *_ = answers(4, both, clipped, way)
    assert off(weights, want) <= 1e-9


def ends(rank: int, way: str, work: str, how: str) -> Any:
    """The second process raises, or is killed, where the first goes on to measure."""
    model = spread(way)
    tracker = hs.Tracker(model, {"input_ids": ids(1, 7)}, check_every=0, average=True)
    tracker.update()
    penalty = hs.SmoothnessPenalty(model, 1.0)
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "raise":
        raise ValueError("out of data")
    if rank == 1 and how == "batch":
        penalty(input_ids=torch.full((1, 9), 30))
    return tracker.update() if work == "tracker" else penalty(input_ids=ids(1, 3)).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "work", "how"),
    sample(
        [("fsdp", "tracker", "kill"), ("fsdp", "penalty", "batch"), ("tp", "penalty", "raise"), ("ddp", "tracker", "raise")],
        None, None, pytest.mark.weekly, pytest.mark.weekly,
    ),
)  # fmt: skip
def test_a_process_that_fails_ends_the_others_with_a_sentence(way, work, how):
    first, second = together(2, ends, way, work, how, seconds=60)
    assert first.startswith("HowSmoothError: expected every process of the mesh to go on, got RuntimeError")
    assert str(second).startswith({"raise": "ValueError: out of data", "kill": "None", "batch": "BadInputError: expected"}[how])


class Halved(nn.Module):
    """Attention whose number of heads is that of one process's shard, whatever its weights are."""

    def __init__(self, heads: int):
        super().__init__()
        self.heads, self.q, self.k, self.v = heads, *(nn.Linear(8, 8) for _ in range(3))
        self.o = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def doubled(rank: int, who: int) -> float:
    """How far weights are off that one process alone has whole, and doubles."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, bias=False)
    want = 2 * layer.weight.detach()
    sharded: Any = fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    with gathered(sharded, here=rank == who), torch.no_grad():
        if rank == who:
            sharded.weight.mul_(2)
    return float((sharded.weight.full_tensor().detach() - want).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("who", [0, 1])
def test_what_the_only_process_with_whole_weights_writes_is_written(who: int):
    assert together(2, doubled, who) == [0.0, 0.0]


def refusals(rank: int) -> Any:
    said = []
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    kept, x = Halved(2), torch.randn(1, 5, 8)
    halved = parallelize_module(Halved(2), mesh, {**dict.fromkeys("qkv", ColwiseParallel()), "o": RowwiseParallel()})
    sharded: Any = fully_shard(kept, mesh=mesh)
    for refused in (
        lambda: hs.Tracker(halved, x),
        lambda: hs.lipschitz(sharded, x),
        lambda: hs.load(sharded).capture(inputs=x),
        lambda: hs.smoothness(sharded, x),
    ):
        try:
            refused()
        except hs.HowSmoothError as error:
            said.append(str(error))
    with gathered(sharded):
        values = hs.lipschitz(sharded, x).value, hs.load(sharded).capture(inputs=x).measure()[0].value
    torch.manual_seed(0)
    alone = Halved(2)
    return (
        said,
        type(sharded).__name__,
        values,
        (hs.lipschitz(alone, x).value, hs.load(alone).capture(inputs=x).measure()[0].value),
    )


@pytest.mark.slow
def test_what_is_not_whole_is_refused_and_what_is_gathered_is_measured():
    for (halved, *others), name, values, want in answers(2, refusals):
        assert halved.startswith(
            "expected a Halved that gives with whole weights what it gives with shards, got something else"
        )
        assert len(others) == 3
        assert all(
            said.startswith("expected weights that are whole, got shards of a FSDPHalved; measure it") for said in others
        )
        assert name == "FSDPHalved"
        assert values == pytest.approx(want, rel=1e-4)


def example(rank: int) -> Any:
    path = Path(__file__).parents[2] / "examples" / "sharded.py"
    return runpy.run_path(str(path))["main"](init_device_mesh("cpu", (2,)))


@pytest.mark.slow
def test_the_example():
    first, second = answers(2, example)
    assert [len(first), len(second)] == [3, 0]
    constants = [(values["smoothness/layer_00"], values["smoothness/layer_01"]) for values in first]
    assert sum(constants[-1]) < sum(constants[0])
