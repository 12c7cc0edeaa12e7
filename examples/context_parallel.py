"""A MeanFlow step on sequences that are cut over processes, against the same step on one process.

    torchrun --nproc-per-node 2 examples/context_parallel.py

Every process holds a run of the tokens of each sequence, and the whole model. Attention talks to the others; the rest of a
transformer works on its own tokens. Gradients of the weights are summed over the processes at the end, as in data parallelism.
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.func import jvp

import howsmooth as hs

BATCH, TOKENS, WIDTH = 4, 48, 32


class Net(nn.Module):
    """The mean velocity u(z, r, t) of tokens z; positions come along, so that a process can hold any of them."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.places = nn.Linear(2, WIDTH), nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, z: Tensor, r: Tensor, t: Tensor, positions: Tensor) -> Tensor:
        return self.layers(z + self.places(positions) + self.times(torch.stack([r, t], -1))[:, None])


def gradients(net: Net, images: Tensor, noise: Tensor, times: Tensor, positions: Tensor) -> list[Tensor]:
    """The gradient of MeanFlow's loss, summed over these tokens, in every weight."""
    start, end = times
    z, v = torch.lerp(images, noise, end[:, None, None]), noise - images
    with hs.use_sdpa():  # torch's attention has no forward mode
        along = (v, torch.zeros_like(start), torch.ones_like(end))
        u, du = jvp(lambda z, r, t: net(z, r, t, positions), (z, start, end), along)  # pyright: ignore[reportAssignmentType]
    loss = (u - (v - (end - start)[:, None, None] * du).detach()).square().sum()
    return list(torch.autograd.grad(loss, list(net.parameters())))


def main(mesh: DeviceMesh) -> float:
    """How far the gradients of all processes together are off those of one, relative to their size."""
    device = torch.device(mesh.device_type)
    torch.manual_seed(0)  # the same weights, images and times everywhere
    net = Net().double().to(device)
    images, noise = torch.randn(2, BATCH, TOKENS, WIDTH, dtype=torch.float64).to(device)
    times = torch.rand(BATCH, 2, dtype=torch.float64).sort().values.T.to(device)
    positions = torch.arange(TOKENS, device=device)

    def mine(t: Tensor, axis: int) -> Tensor:
        return t.tensor_split(mesh.size(), axis)[mesh.get_local_rank()]

    with hs.context_parallel(mesh):
        found = gradients(net, mine(images, 1), mine(noise, 1), times, mine(positions, 0))
    for g in found:
        dist.all_reduce(g, group=mesh.get_group())
    want = gradients(net, images, noise, times, positions)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-12)) for a, b in zip(found, want, strict=True))


if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    off = main(init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),)))
    if dist.get_rank() == 0:
        print(f"gradients of {dist.get_world_size()} processes are those of one up to {off:.0e}")
    dist.destroy_process_group()
