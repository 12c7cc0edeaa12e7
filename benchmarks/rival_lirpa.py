"""CROWN by auto_LiRPA, in an interpreter that has it: `python rival_lirpa.py FOLDER`, see benchmarks/certified.py.

The folder holds `job.json` with the name and sizes of a model, radii and what is asked for, and `arrays.npz` with weights and
inputs. Answers are written to `answer.json`. The package wants torch below 1.13; it runs on 1.13.1, the first for Python 3.11.
"""

import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
warnings.simplefilter("ignore")
from auto_LiRPA import BoundedModule, BoundedTensor  # noqa: E402  # pyright: ignore[reportMissingImports]
from auto_LiRPA.perturbations import PerturbationLpNorm  # noqa: E402  # pyright: ignore[reportMissingImports]
from certified_models import build  # noqa: E402  # pyright: ignore[reportMissingImports]

OPTIONS = {"conv_mode": "matrix", "fixed_reducemax_index": True}  # as in the package's own example of a transformer
CHUNK = 256  # outputs bounded at a time
STEPS = 5  # halvings of a radius in its logarithm


class Crown:
    def __init__(self, folder: Path):
        self.job = json.loads((folder / "job.json").read_text())
        arrays = np.load(folder / "arrays.npz")
        torch.set_default_dtype(getattr(torch, self.job["dtype"]))
        model = build(self.job["name"], self.job["sizes"])
        model.load_state_dict({k[2:]: torch.tensor(arrays[k]).to(torch.get_default_dtype()) for k in arrays if k[:2] == "w."})
        self.x = torch.tensor(arrays["x"]).to(torch.get_default_dtype())
        self.labels = arrays["labels"] if "labels" in arrays.files else np.zeros(0)
        with torch.no_grad():
            self.value = model(self.x[:1])
        self.bounded = BoundedModule(model, self.x[:1], verbose=0, bound_opts=OPTIONS)

    def moved(self, r: float) -> float:
        """A bound on how far the output moves, in length: nan or infinity where there is none. Some outputs at a time."""
        shape, square, known = self.value.shape[1:], 0.0, None
        value = self.value.flatten()
        for some in torch.arange(value.numel()).split(CHUNK):
            rows = torch.zeros(len(some), value.numel())
            rows[torch.arange(len(some)), some] = 1.0
            low, high = self._bounds(0, r, rows.reshape(1, len(some), *shape), known, both=True)
            if known is None:  # what lies before the output is bounded once
                nodes = [m for m in self.bounded.modules() if isinstance(getattr(m, "lower", None), torch.Tensor)]
                final = self.bounded.final_name
                known = {m.name: [m.lower.detach(), m.upper.detach()] for m in nodes if m.name != final}
            square += float(torch.maximum(high.flatten() - value[some], value[some] - low.flatten()).square().sum())
        return square**0.5

    def certifies(self, i: int, r: float) -> bool:
        """Whether all margins of an input stay positive."""
        y = int(self.labels[i])
        rows = (torch.eye(10)[y] - torch.eye(10))[torch.arange(10) != y][None]
        low, _ = self._bounds(i, r, rows)
        return bool((low > 0).all())

    def _bounds(self, i: int, r: float, rows, known=None, both=False):
        ball = BoundedTensor(self.x[i : i + 1], PerturbationLpNorm(norm=2, eps=r))
        with torch.no_grad():
            return self.bounded.compute_bounds(
                x=(ball,), C=rows, method="backward", bound_upper=both, intermediate_layer_bounds=known
            )

    def radius(self, i: int, low: float, high: float) -> float:
        """The largest radius that it certifies between two, 0 where it does not certify the smaller."""
        if not self.certifies(i, low):
            return 0.0
        for _ in range(STEPS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self.certifies(i, middle) else (low, middle)
        return low


def main(folder: Path) -> None:
    crown = Crown(folder)
    answers = []
    for r in crown.job.get("radii", ()):
        start = time.perf_counter()
        try:
            moved = crown.moved(r)
        except RuntimeError as error:  # memory
            moved, said = float("inf"), str(error)[:200]
            print(said, file=sys.stderr)
        answers.append({"r": r, "moved": moved, "seconds": time.perf_counter() - start})
        print(answers[-1], flush=True)
    for i in range(crown.job.get("inputs", 0)):
        start = time.perf_counter()
        answers.append({"radius": crown.radius(i, *crown.job["between"]), "seconds": time.perf_counter() - start})
        print(i, answers[-1], flush=True)
    (folder / "answer.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
