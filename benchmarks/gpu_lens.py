"""The Jacobian lens of a 1B Llama shape on a GPU, all layers, 128 tokens, against the public formula by autograd.

The formula runs a prompt as a batch of eight and takes a backward pass for every eight rows (`rows_by_autograd`). Answers are
compared before anything is timed: in float32 to its rounding, in bf16 to what that carries.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import howsmooth as hs
from benchmarks.gpu import milliseconds
from benchmarks.gpu_models import module
from benchmarks.harness import WrongAnswerError

TITLE = "Jacobian lens of a model, 128 tokens, all layers, against d/8 backward passes by autograd"
AT = torch.arange(16, 127)
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def run(quick: bool) -> list[dict[str, Any]]:
    return [_row(dtype, 4 if quick else 16) for dtype in (torch.bfloat16, torch.float32)]


def _row(dtype: torch.dtype, depth: int) -> dict[str, Any]:
    llama = module("Llama-3.2-1B", 128, depth).to("cuda", dtype).requires_grad_(False)
    ids = torch.randint(1024, (128,), generator=torch.Generator().manual_seed(0))
    blocks: Any = llama.layers
    model = hs.load(llama)
    sources = list(range(depth - 1))

    def ours() -> dict[int, Tensor]:
        lens = model.mean_jacobian([ids.tolist()])
        return {k: lens[k] for k in sources}

    def theirs() -> dict[int, Tensor]:
        return rows_by_autograd(llama, list(blocks), ids[None].cuda(), sources, AT.cuda())

    found, want = ours(), theirs()
    error = max(float((found[k] - want[k]).norm() / want[k].norm()) for k in sources)
    if not error <= ALLOWED[dtype]:
        raise WrongAnswerError(f"lens: expected an error of {ALLOWED[dtype]:.0e} at most in {dtype}, got {error:.1e}")
    ms, peak = milliseconds(ours, 3)
    other, other_peak = milliseconds(theirs, 3)
    row = {"weights": str(dtype).removeprefix("torch."), "layers": depth, "error": error, "s": ms / 1e3, "GiB": peak}
    row |= {"autograd s": other / 1e3, "autograd GiB": other_peak, "times as fast": other / ms, "memory": peak / other_peak}
    print(row, flush=True)
    return row


def rows_by_autograd(
    model: nn.Module, blocks: Sequence[nn.Module], ids: Tensor, sources: Sequence[int], at: Tensor, batch: int = 8
) -> dict[int, Tensor]:
    """The public formula: rows `e_i` at all positions of the last block, pulled back to what leaves each block."""
    left: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        def hook(block: nn.Module, args: Any, out: Any) -> None:
            left[number] = out if isinstance(out, Tensor) else out[0]

        return hook

    hooks = [block.register_forward_hook(keep(i)) for i, block in enumerate(blocks)]
    embed: Any = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    with torch.enable_grad():
        model(inputs_embeds=embed(ids.expand(batch, -1)).detach().requires_grad_(), use_cache=False)
    for hook in hooks:
        hook.remove()
    last = left[len(blocks) - 1]
    d = last.shape[-1]
    found = {k: torch.zeros(d, d) for k in sources}
    for first in range(0, d, batch):
        some = torch.arange(min(batch, d - first), device=last.device)
        g = torch.zeros_like(last)
        g[some[:, None], at, first + some[:, None]] = 1.0
        back = torch.autograd.grad(last, [left[k] for k in sources], g, retain_graph=True)
        for k, part in zip(sources, back, strict=True):
            found[k][first : first + len(some)] = part[: len(some), at].float().mean(1).cpu()
    return found
