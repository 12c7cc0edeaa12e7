"""What an editor knows: the types that pyright sees behind the public verbs, so that it can complete a result's fields."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
# expression → its type
SEEN = {
    "hs.lipschitz(attn, x)": "Estimate",
    "hs.lipschitz(attn, mu)": "Estimate",
    "hs.lipschitz(attn, x, k=3)": "Spectrum",
    "hs.lipschitz(torch.sin, x).lower": "float",
    "hs.lipschitz_batch(attn, x[None])": "Estimates",
    "hs.lipschitz_batch(attn, x[None])[0]": "Estimate",
    "hs.lipschitz_batch(attn, x[None]).value": "Tensor",
    "hs.gain(attn, x)": "Gain",
    "hs.jacobian(attn, x)": "Jacobian",
    "hs.jacobian(attn, x).T @ x": "Tensor",
    "hs.lipschitz_batch(attn, x[None])[:1]": "Estimates",
    "hs.lipschitz(torch.nn.MultiheadAttention(4, 1), x)": "Estimate",
    "model.measure('text', 3)": "Measurement",
    "model.measure('text', layer=3, within=0.1)": "Measurement",
    "model.measure(layer=3, ids=[1])": "Measurement",
    "model.measure('text', layers=[0, 1])": "Measurements",
    "model.measure('text')[0]": "Measurement",
    "model.measure('text').value": "Tensor",
    "model.capture('text')[0].measure(3, head=1)": "Measurement",
    "hs.wasserstein(mu, attn(mu))": "Distance",
    "attn(x)": "Tensor",
    "attn(mu)": "Measure",
    "attn.to(torch.float64)": "Attention",
    "attn @ hs.RMSNorm(torch.ones(4))": "Composition",
}
SETUP = """
import torch
import howsmooth as hs

x = torch.randn(3, 4)
attn = hs.Attention.from_matrices(torch.eye(4), torch.eye(4))
mu = hs.Measure(x)
model = hs.load("demo")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright: pip install howsmooth[dev]")
def test_results_have_types(tmp_path: Path):
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(SRC)]}))
    lines = [f"reveal_type({expression})" for expression in SEEN]
    (tmp_path / "asked.py").write_text(SETUP + "\n".join(lines) + "\n")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)["generalDiagnostics"]
    assert [d["message"] for d in told if d["severity"] != "information"] == []
    types = {d["range"]["start"]["line"]: d["message"].split(" is ")[-1].strip('"') for d in told}
    first = SETUP.count("\n")
    assert {e: types[first + i] for i, e in enumerate(SEEN)} == SEEN
