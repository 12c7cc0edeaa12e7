"""Rules of the suite itself: whose deprecations are errors, that every test draws the same numbers, what is weekly."""

import random
import re
import warnings
from pathlib import Path

import numpy
import pytest
import torch

DRAWN: list[tuple[float, float, float]] = []


@pytest.mark.parametrize("kind", [DeprecationWarning, PendingDeprecationWarning, FutureWarning])
def test_our_own_deprecations_fail_and_others_do_not(kind: type[Warning]):
    def warn(module: str) -> None:
        warnings.warn_explicit("goes away", kind, f"{module.replace('.', '/')}.py", 1, module=module, registry={})

    for module in ("transformers.cache_utils", "torch.nn.modules.module", "other"):
        warn(module)
    for module in ("howsmooth", "howsmooth.kernels.tiled", "howsmooth_command"):
        with pytest.raises(kind, match="goes away"):
            warn(module)
    with pytest.raises(UserWarning, match="else"):
        warnings.warn_explicit("anything else", UserWarning, "torch/a.py", 1, module="torch.a", registry={})


@pytest.mark.parametrize("turn", range(3))
def test_every_test_draws_the_same_numbers(turn: int):
    DRAWN.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))  # noqa: NPY002
    assert len(set(DRAWN)) == 1
    torch.rand(turn)  # leaves the generator elsewhere


@pytest.fixture(scope="module")
def made_once() -> torch.Tensor:
    return torch.rand(3)


def test_a_fixture_of_a_wider_scope_does_not_shift_them(made_once: torch.Tensor):
    torch.manual_seed(0)
    first = torch.rand(())
    assert float(made_once[0]) == float(first)


@pytest.mark.parametrize("pattern", ["mark[.]weekly|from marks import first", "mark[.]gpu"])
def test_files_with_a_mark_are_listed(pattern: str):
    root = Path(__file__).parents[1]
    section = (root / "CONTRIBUTING.md").read_text("utf-8").split("## Which tests run when")[1].split("\n## ")[0]
    files = [path for path in (root / "tests").rglob("test_*.py") if re.search(pattern, path.read_text("utf-8"))]
    assert [path.name for path in files if path.name not in section and path != Path(__file__)] == []
