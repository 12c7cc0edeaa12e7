"""MeanFlow on handwritten digits: a one-step generator trained through forward mode of its attention.

    pip install scikit-learn
    python examples/meanflow.py [steps]

The network u(z, r, t) is the mean velocity between times r and t of the flow z_t = (1 − t) x + t e from digits x to noise e
(Geng, Deng, Bai, Kolter, He: Mean Flows for One-step Generative Modeling, 2025). It satisfies u = v − (t − r) du/dt along the
flow, v = e − x, so training takes a jvp of the whole network along (v, 0, 1) in every step, and a backward pass through its
value. Attention calls torch's function; `use_sdpa` puts one with forward mode in its place.
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import jvp

import howsmooth as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIDE, PATCH, WIDTH, HEADS, DEPTH = 8, 2, 64, 4, 3
TOKENS = (SIDE // PATCH) ** 2


class Block(nn.Module):
    """A transformer block whose norms are shifted and scaled by what the times say, as in DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.adapt = nn.Linear(WIDTH, 6 * WIDTH)
        nn.init.zeros_(self.adapt.weight)
        nn.init.zeros_(self.adapt.bias)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adapt(nn.functional.silu(c))[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + gate1 * self.out(h.transpose(1, 2).flatten(2))
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class Net(nn.Module):
    """u(z, r, t) for pictures (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(PATCH**2, WIDTH), nn.Linear(WIDTH, PATCH**2)
        self.place = nn.Parameter(0.02 * torch.randn(TOKENS, WIDTH))
        self.times = nn.Sequential(nn.Linear(64, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        frequencies = torch.exp(torch.linspace(0, 4, 16, device=z.device))
        angles = torch.cat([t[:, None] * frequencies, (t - r)[:, None] * frequencies], -1)
        c = self.times(torch.cat([angles.sin(), angles.cos()], -1))
        grid = z.unflatten(-1, (SIDE // PATCH, PATCH, SIDE // PATCH, PATCH)).transpose(2, 3)
        x = self.enter(grid.flatten(3).flatten(1, 2)) + self.place
        for block in self.blocks:
            x = block(x, c)
        grid = self.leave(self.norm(x)).unflatten(1, (SIDE // PATCH, -1)).unflatten(3, (PATCH, PATCH))
        return grid.transpose(2, 3).flatten(1)


def loss(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """|u − sg(v − (t − r) du/dt)|², large errors weighted down; the error of the half of the pictures that have r = t."""
    e, times = torch.randn_like(x), torch.sigmoid(torch.randn(len(x), 2, device=x.device) - 0.4)
    t, r = times.amax(1), times.amin(1)
    r = torch.where(torch.rand_like(r) < 0.5, t, r)
    z, v = (1 - t)[:, None] * x + t[:, None] * e, e - x
    u, du = jvp(net, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    error = (u - (v - (t - r)[:, None] * du).detach()).square().sum(1)
    return (error / (error.detach() + 1e-2)).mean(), error.detach()[r == t].mean()


def digits() -> Tensor:
    return torch.tensor(load_digits().data, dtype=torch.float32, device=DEVICE) / 8 - 1


@torch.no_grad()
def sample(net: nn.Module, count: int) -> Tensor:
    """Pictures in one step: z_0 = z_1 − u(z_1, 0, 1)."""
    e = torch.randn(count, SIDE**2, device=DEVICE)
    return e - net(e, torch.zeros(count, device=DEVICE), torch.ones(count, device=DEVICE))


def main(steps: int) -> None:
    torch.manual_seed(0)
    net, data = Net().to(DEVICE), digits()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with hs.use_sdpa():
        for step in range(1, steps + 1):
            value, error = loss(net, data[torch.randint(len(data), (128,), device=DEVICE)])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            if step == 1 or step % max(1, steps // 10) == 0:
                print(f"step {step}: squared error of the velocity {float(error):.2f}")
        made = sample(net, 512)
    gap = float((made.mean(0) - data.mean(0)).norm() / data.mean(0).norm())
    print(f"{len(made)} digits in one step each: mean picture off by {gap:.0%}")
    for row in made[0].reshape(SIDE, SIDE).clamp(-1, 1):
        print("".join(" .:-=+*#%@"[int((float(p) + 1) * 4.99)] for p in row for _ in range(2)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
