"""A transformer whose weights FSDP2 shards, followed and kept smooth while it trains.

    torchrun --nproc-per-node 2 examples/sharded.py

Every process makes the tracker and the penalty, and calls them at every step: to measure, the processes gather the weights
together. The first one has the numbers.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import howsmooth as hs
from howsmooth.training import Alarm, Recorder

ROWS, TOKENS, WIDTH, STEPS = 8, 16, 32, 6


def main(mesh: DeviceMesh) -> list[dict[str, float]]:
    """The numbers of each update, on the first process."""
    torch.manual_seed(0)  # the same weights and data everywhere
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(mesh.device_type)
    data = torch.randn(STEPS, ROWS, TOKENS, WIDTH).to(mesh.device_type)

    for block in (*model.layers, model):
        fully_shard(block, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tracker = hs.Tracker(model, probe=data[0, :1])
    penalty = hs.SmoothnessPenalty(model, target=0.2, rows=1)
    found: list[dict[str, float]] = []
    with Recorder(tracker, every=2, log=found.append, alarms=[Alarm("max_logit", above=100)], on_alarm="stop") as record:
        for step, batch in enumerate(data):
            own = batch.chunk(mesh.size())[mesh.get_local_rank()]
            loss = (model(own) - own).square().mean()
            (loss + 0.1 * penalty(own)).backward()  # one backward pass for both, the penalty behind the model's own run
            optimizer.step()
            optimizer.zero_grad()
            record(step, loss=loss.item())
            if record.stopped:  # on all processes at once
                break
    return found


if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for numbers in main(init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))):
        print({key: round(value, 4) for key, value in numbers.items() if key.count("/") == 1})
    dist.destroy_process_group()
