"""The experiments of the paper: what is measured, what its scripts print, and that a run can be stopped and continued."""

import copy
import csv
import itertools
import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import howsmooth as hs
from howsmooth.cli import reproduce as cli
from howsmooth.errors import BadInputError, ResultsError
from howsmooth.models import load
from howsmooth.models.loading import Packaged
from howsmooth.paper import reproduce, reproduction
from howsmooth.paper.adversarial import ONE_HEAD, eigenvector_tokens, worst_tokens
from howsmooth.paper.curves import PointRow, curves_of, exponents, power_iteration, scripts_value
from howsmooth.paper.protocol import PAPER, QUICK, Protocol
from howsmooth.paper.reproduction import PARTS, Reproduced, plan, write_reproduction
from howsmooth.paper.scripts import WHOLE_MODULE, iteration, whole_module
from howsmooth.paper.splitting_maps import measure_grid
from howsmooth.paper.subjects import describe, subject
from howsmooth.paper.texts import measure_text
from howsmooth.run import Plan
from howsmooth.study import alice, fit_growth
from howsmooth_command import app, commands
from marks import first

DEMO = {"name": "demo", "masking": "unmasked", "seed": 0}
HEAD = DEMO | {"name": ONE_HEAD}


def layer(causal: bool, bias: float = 0.5) -> tuple[hs.Attention, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    w = [torch.randn(6, 6, generator=random, dtype=torch.float64) for _ in range(4)]
    b = bias * torch.randn(6, generator=random, dtype=torch.float64)
    x = torch.randn(5, 6, generator=random, dtype=torch.float64)
    return hs.Attention(*w, heads=2, b_o=b, causal=causal), x


def dense(f, x) -> torch.Tensor:
    return torch.autograd.functional.jacobian(f, x).reshape(x.numel(), x.numel())


@pytest.mark.parametrize("causal", [False, True])
def test_with_the_output_the_iteration_stands_still_at_a_number_that_is_not_the_norm(causal):
    attn, x = layer(causal)
    jacobian, output = dense(attn, x), attn(x).flatten()
    expected = float((jacobian.mT @ output).norm().sqrt())
    for start in range(3):
        assert power_iteration(attn, x, element=0, steps=3, seed=start) == pytest.approx([expected] * 3, rel=1e-12)
    assert scripts_value(attn, x) == pytest.approx(expected, rel=1e-12)
    norm = float(torch.linalg.matrix_norm(jacobian, 2))
    assert expected <= math.sqrt(norm * float(output.norm()))
    assert abs(expected / norm - 1) > 0.05


@pytest.mark.parametrize("causal", [False, True])
def test_with_the_tangent_it_is_power_iteration(causal):
    attn, x = layer(causal)
    printed = power_iteration(attn, x, element=1, steps=60)
    assert all(after >= before * (1 - 1e-12) for before, after in itertools.pairwise(printed))
    assert printed[-1] == pytest.approx(float(torch.linalg.matrix_norm(dense(attn, x), 2)), rel=1e-6)


def test_a_constant_added_to_the_output_moves_one_and_not_the_other():
    (small, x), (large, _) = layer(False, 0.0), layer(False, 50.0)
    assert scripts_value(large, x) > 2 * scripts_value(small, x)
    one, other = (power_iteration(f, x, element=1, steps=5)[-1] for f in (small, large))
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.slow
def test_text_gives_what_measure_gives():
    rows = measure_text(DEMO, [0, 5], 12, 1)
    model = load("demo", device="cpu")
    captured = model.capture(ids=model.text(alice()).windows(12, 2, 0)[1])
    for row in rows:
        measured = captured.measure(row["layer"])
        assert row["value"] == pytest.approx(measured.value, rel=1e-5)
        assert row["radius"] == pytest.approx(measured.radius_rms, rel=1e-6)
        assert row["value"] <= row["upper"]
        attn = subject("demo", "unmasked", 0).attention(row["layer"])
        by_hand = power_iteration(attn, captured.tokens(row["layer"]).float(), element=0, steps=1)[0]
        assert row["scripts"] == pytest.approx(by_hand, rel=1e-4)


@pytest.mark.slow
def test_a_masked_encoder_sees_nothing_that_comes_later():
    masked = subject("demo", "masked", 0)
    ids = list(masked.text.windows(9, 1, 0)[0].ids)
    other = [*ids[:6], ids[1], *ids[7:]]
    first, second = (masked.model.capture(ids=i) for i in (ids, other))
    assert torch.allclose(first.tokens(5)[:6], second.tokens(5)[:6], atol=1e-5)
    assert not torch.allclose(first.tokens(5)[6:], second.tokens(5)[6:], atol=1e-2)
    assert masked.attention(5).causal


@pytest.mark.slow
def test_describing_a_model_leaves_it_as_it_was():
    about = describe("demo")
    assert (about.layers, about.shortest, about.longest) == (6, 3, 512)
    assert about.maskings == ("unmasked", "masked")
    assert about.plain
    assert about.whole_module


TINY: dict[str, tuple[Any, tuple[str, ...], bool]] = {
    "electra": ({"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}, ("unmasked", "masked"), True),
    "llama": (
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24},
        ("masked",),
        True,
    ),
    "distilbert": ({"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}, ("unmasked", "masked"), True),
    "gpt2": ({"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}, ("masked",), True),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", first(TINY, 2))
def test_any_model_in_a_folder(kind, tmp_path):
    from transformers import AutoConfig, AutoModel

    size, maskings, plain = TINY[kind]
    demo = load("demo", device="cpu")
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=demo.tokenizer.vocab_size, **special, **size)
    folder = tmp_path / kind
    torch.manual_seed(0)  # of random layers a few have no real eigenvalue to build tokens from
    AutoModel.from_config(config).save_pretrained(folder)
    demo.tokenizer.save_pretrained(folder)
    about = describe(str(folder))
    assert (about.maskings, about.plain, about.whole_module) == (maskings, plain, False)
    layers, this = PAPER.layers_of(about.layers), DEMO | {"name": str(folder)}
    rows = [row for m in about.maskings for row in measure_text(this | {"masking": m}, layers, 9, 0)]
    assert len({row["value"] for row in rows}) == len(about.maskings) * len(layers)
    cases = [task.kwargs()["reading"]["name"] for task in plan("adversarial", replace(QUICK, models=(str(folder),))).tasks]
    assert (str(folder) in cases) == plain
    if plain:
        assert len(eigenvector_tokens(this | {"masking": about.maskings[0]}, 0, [2, 7])) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", first(["random:bert-base", "random:gpt2"], 0))
def test_random_models_of_full_size_attend_evenly(name):
    """With uniform attention `L` is `‖W_o W_v‖` without a mask, and with one that times the norm of the Cesàro mean."""
    n = 6
    rows = {m: measure_text({"name": name, "masking": m, "seed": 0}, [0, 6], n, 0) for m in ("unmasked", "masked")}
    mean = torch.tril(torch.ones(n, n)) / torch.arange(1, n + 1)[:, None]
    ratio = float(torch.linalg.matrix_norm(mean, 2))
    for plain, masked in zip(*rows.values(), strict=True):
        assert masked["value"] / plain["value"] == pytest.approx(ratio, rel=0.05)
        assert plain["study"] == "random"
    module: Any = subject(name, "masked", 0).model.module
    assert not module.training
    assert module.config.hidden_size == 768
    assert module.config.num_attention_heads == 12


def test_adversarial_tokens_grow_like_the_root():
    rows = eigenvector_tokens(HEAD, 0, [2, 5, 17, 37])
    for row in rows:
        assert row["value"] == pytest.approx(math.sqrt(row["n"] - 1), rel=1e-3)
        assert row["value"] <= row["bound_B7"]
    worst = worst_tokens(HEAD, 0, 17)[0]
    assert worst["value"] > rows[2]["value"]


@pytest.mark.slow
def test_the_module_that_the_scripts_read():
    row = whole_module(DEMO, [0], 4, 0)[0]
    whole = subject("demo", "unmasked", 0)
    x = whole.capture(4, 0, 0).tokens(0).double()
    norm = copy.deepcopy(whole.model.module.get_submodule("encoder.layer.0.attention.output.LayerNorm")).double()
    attn = whole.attention(0).to(torch.float64)

    def f(t):
        return norm(t + attn(t))

    jacobian, output = dense(f, x), f(x).detach().flatten()
    assert row["value"] == pytest.approx(float(torch.linalg.matrix_norm(jacobian, 2)), rel=2e-3)
    assert row["scripts"] == pytest.approx(float((jacobian.mT @ output).norm().sqrt()), rel=1e-4)


@pytest.mark.slow
def test_iterates():
    rows = iteration(DEMO, 3, 8, 1, 4)
    assert [r["step"] for r in rows] == [1, 2, 3, 4]
    assert {round(r["element_0"] / r["scripts"], 9) for r in rows} == {1.0}
    tangents = [r["element_1"] for r in rows]
    assert tangents == sorted(tangents)
    assert tangents[-1] <= rows[0]["value"] * (1 + 1e-9)


@pytest.mark.slow
def test_the_protocol_is_the_papers():
    assert PAPER.lengths == tuple(range(2, 100, 2))
    assert PAPER.samples == 10
    assert PAPER.long[-1] == 502
    assert PAPER.adversarial == tuple(range(2, 98, 5))
    real = plan("real", PAPER)
    arguments = [task.kwargs() for task in real.tasks]
    assert {a["n"] for a in arguments} == set(range(4, 100, 2)) | set(PAPER.long)
    assert {tuple(a["layers"]) for a in arguments} == {(0, 3, 5)}
    assert len(arguments) == 2 * 10 * (48 + 11)
    assert PAPER.layers_of(12) == [0, 6, 11]
    assert [t.key for t in real.tasks] == [t.key for t in plan("real", PAPER).tasks]


def test_the_trap_uses_the_measurements_of_the_others():
    keys = {p: {t.key for t in plan(p, QUICK).tasks} for p in PARTS}
    assert keys["real"] | keys["random"] < keys["trap"]


@pytest.mark.slow
def test_layers_lengths_and_another_text_are_what_is_measured(tmp_path):
    passage = tmp_path / "mine.txt"
    passage.write_text("The cat sat on the mat and looked at the rabbit. " * 20)
    mine = replace(PAPER, layers=(1,), text=str(passage), samples=1).with_lengths([16, 8, 8])
    arguments = [task.kwargs() for part in PARTS for task in plan(part, mine).tasks]
    assert {a["n"] for a in arguments if "layers" in a} == {8, 16}
    of_demo = [a for a in arguments if "reading" in a and a["reading"]["name"] == "demo"]
    assert {tuple(a["layers"]) for a in of_demo if "layers" in a} == {(1,)}
    assert {a["layer"] for a in of_demo if "lengths" in a} == {1}
    keys = {task.key for task in plan("real", mine).tasks}
    passage.write_text("The rabbit looked back and ran away from the cat. " * 20)
    assert not keys & {task.key for task in plan("real", mine).tasks}
    row = measure_text(DEMO | {"passage": str(passage)}, [1], 8, 0)[0]
    model = load("demo", device="cpu")
    measured = model.capture(ids=model.text(passage.read_text()).windows(8, 1, 0)[0]).measure(1)
    assert row["value"] == pytest.approx(measured.value, rel=1e-5)
    for wrong in (lambda: mine.with_lengths([8]), lambda: mine.with_lengths([1, 8]), lambda: mine.layers_of(1)):
        with pytest.raises(BadInputError, match=r"^expected [^\n]* got "):
            wrong()


def rows_of(exponent: float, scripts: float, subject: str = "gpt2", samples: int = 5):
    name: Any = {"study": "real", "model": subject, "masking": "masked", "layer": 6, "map": "attention"}
    for n in range(4, 130, 2):
        for s in range(samples):
            wobble = math.exp(0.03 * math.sin(7 * n + 11 * s))
            value = 3 * n**exponent * wobble
            yield PointRow(**name, n=n, sample=s, value=value, upper=value, scripts=n**scripts * wobble, radius=9.0)


def test_exponents_are_those_of_the_curves():
    table = [asdict(e) for e in exponents(rows_of(0.3, 0.45))]
    assert len(table) == 1
    e = table[0]
    assert (e["exponent"], e["scripts"]) == (pytest.approx(0.3, abs=0.01), pytest.approx(0.45, abs=0.01))
    assert e["printed"] == 0.51
    assert e["low"] <= 0.3 <= e["high"]
    assert e["tail"] == pytest.approx(0.3, abs=0.03)
    assert (e["shortest"], e["longest"], e["samples"]) == (4, 128, 5)
    assert e["longer"] == pytest.approx(0.3, abs=0.01)


def test_legends_have_short_names():
    rows = [*rows_of(0.3, 0.45, "models/mine"), *rows_of(0.3, 0.45, "org/bert"), *rows_of(0.2, 0.3, "other/mine")]
    labels = [c.label for c in curves_of(rows)]
    assert labels == [f"{name}, masked, layer 6" for name in ("models/mine", "bert", "other/mine")]
    assert exponents(rows)[1].subject == "org/bert"  # tables have whole names


@pytest.mark.slow
def test_the_page_shows_names_as_text_and_asks_for_nothing(tmp_path):
    hostile = '<script>alert(1)</script>" onerror="x'
    rows, command = tuple(rows_of(0.3, 0.4, hostile)), f"howsmooth {hostile}"
    failures, versions = {f"a {hostile}": 2}, {"torch": "2"}
    result = Reproduced(tmp_path / "results.sqlite", rows, 1, 0, failures, versions, replace(PAPER, models=(hostile,)), command)
    files = write_reproduction(result, tmp_path)
    page = files[0].read_text("utf-8")
    assert files[0].name == "index.html"
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert 'onerror="' not in page
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("data:image/png;base64,") == 3  # real, trap, exponents
    assert "2 tasks failed" in page
    assert {p.suffix for p in files} == {".html", ".png", ".pdf", ".csv"}
    assert all(p.stat().st_size for p in files)
    assert (tmp_path / "real.pdf").read_bytes().startswith(b"%PDF")
    with (tmp_path / "curves.csv").open(encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    assert {row["subject"] for row in table} == {hostile}
    assert len(table) == 63


def test_a_failed_task_is_told_and_the_others_are_kept(tmp_path, monkeypatch):
    good = {"alpha": -1.0, "mass": 0.5, "extent": 4.0, "points": 5}
    monkeypatch.setattr(reproduction, "plan", lambda *_: Plan.of(measure_grid, [good, good | {"points": 1}]))
    result = reproduce(["splitting"], tmp_path / "out", QUICK)
    assert len(result.rows) == 1
    assert list(result.failures.values()) == [1]
    assert "expected a positive extent" in next(iter(result.failures))


def command(*arguments: str):
    return CliRunner().invoke(app(), ["reproduce", *arguments])


@pytest.mark.slow
def test_the_command_writes_everything_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "QUICK", replace(QUICK, tokens=(4, 8), seeds=1))
    out = tmp_path / "out"
    result = command("meanfield", "--quick", "--out", str(out), "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["tasks"], told["skipped"], told["failures"]) == (5, 0, {})
    names = {p.name for p in out.iterdir()}
    assert {"index.html", "results.sqlite", "results.csv", "meanfield-growth.pdf", "meanfield-convergence.png"} <= names
    again = command("meanfield", "--quick", "--out", str(out))
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    result = command("meanfield", "--quick", "--out", str(out), "--resume", "--json")
    assert json.loads(result.stdout)["skipped"] == 5
    result = command("meanfield", "--quick", "--out", str(out), "--force", "--quiet")
    assert result.exit_code == 0
    assert result.stdout.strip() == str(out / "index.html")


@pytest.mark.parametrize(
    ("arguments", "parts", "models"),
    [
        ((), list(PARTS), ["demo"]),
        (("real", "--model", "a", "--model", "b"), ["real"], ["a", "b"]),
        (("--only", "trap,real"), ["real", "trap"], ["demo"]),
        (("all", "--model", "demo", "--only", "splitting"), ["splitting"], ["demo"]),
    ],
)
def test_models_and_parts_that_are_named_are_measured_alone(arguments, parts, models, monkeypatch):
    given: list[Any] = []

    def run(*some: Any, **_: Any) -> None:
        given.extend(some)
        raise BadInputError("expected nothing, got enough; stop")

    monkeypatch.setattr(cli, "run", run)
    result = command(*arguments, "--quick", "--layers", "0,2", "--lengths", "4,8", "--text", "mine.txt")
    assert (result.exit_code, result.stderr) == (2, "howsmooth: expected nothing, got enough; stop\n")
    quick = replace(QUICK, models=tuple(models), layers=(0, 2), text="mine.txt")
    assert given == [parts, Path("reproduction"), quick.with_lengths((4, 8))]


@pytest.mark.parametrize(
    ("arguments", "installed", "models"),
    [
        ((), "smollm2", ["demo", "smollm2"]),
        ((), "nothing", ["demo"]),
        (("--quick",), "smollm2", ["demo"]),
        (("--model", "smollm2"), "nothing", ["smollm2"]),
    ],
)
def test_a_language_model_is_measured_where_it_is_installed(arguments, installed, models, monkeypatch):
    given: list[Any] = []

    def run(*some: Any, **_: Any) -> None:
        given.extend(some)
        raise BadInputError("expected nothing, got enough; stop")

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setattr(Packaged, "folder", Path("anywhere") if installed == "smollm2" else None)
    assert command("real", *arguments).exit_code == 2
    assert given[2].models == tuple(models)


@pytest.mark.slow
def test_text_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "QUICK", Protocol(lengths=(4, 8), long=(), samples=1))
    result = command("real", "--quick", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["exponent", "of"]
    assert sum(line.startswith("demo, ") for line in lines) == 6
    assert (tmp_path / "out" / "real.png").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ("everything",),
        ("real", "--quick", "--samples", "0"),
        ("real", "--quick", "--model", "./no/such/folder"),
        ("meanfield", "--quick", "--workers", "0"),
        ("real", "--quick", "--device", "cuda:99"),
        ("real", "--quick", "--only", "trap"),
        ("real", "--quick", "--layers", "6"),
        ("real", "--quick", "--lengths", "8"),
        ("real", "--quick", "--text", "missing.txt"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command(*arguments)
    assert result.exit_code == 2
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "expected" in lines[0]
    assert not list(tmp_path.iterdir())


def test_what_is_in_the_way_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert command("meanfield", "--quick", "--out", str(tmp_path)).exit_code == 2
    assert command("meanfield", "--quick", "--out", str(tmp_path / "notes.txt")).exit_code == 2
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    (tmp_path / "results.sqlite").write_text("another program's")
    with pytest.raises(ResultsError, match="not a database"):
        reproduce(["meanfield"], tmp_path, QUICK, force=True)
    assert (tmp_path / "results.sqlite").read_text() == "another program's"


DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = {
    "2. Text": ("real", "attention"),
    "3. Random weights": ("random", "attention"),
    "4. Adversarial tokens": ("adversarial", "eigenvector tokens"),
    "6. What the public scripts compute": ("trap", WHOLE_MODULE),
}
NAMES = {"random GPT-2": "random:gpt2", "random BERT-base": "random:bert-base"}


def table_of(name: str) -> list[dict[str, str]]:
    with (DOCS / "data" / f"reproduction-{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_documented_exponents_are_those_of_the_documented_rows():
    rows = {(e["study"], e["subject"], e["masking"], e["layer"], e["map"]): e for e in table_of("exponents")}
    text = (DOCS / "reference" / "reproduction.md").read_text("utf-8")
    told = 0
    for section in text.split("\n## ")[1:]:
        study, map_name = SECTIONS.get(section.splitlines()[0], ("", ""))
        for row in (
            re.findall(r"^\| (.+), (masked|unmasked)(?:, layer (\d))? \| (\S+).*? \| (\S+)", section, re.M) if study else ()
        ):
            who, masking, layer, exponent, scripts = (str(part) for part in row)
            e = rows[study, NAMES.get(who, who), masking, layer or "0", map_name]
            assert abs(float(exponent.replace("−", "-")) - float(e["exponent"])) < 0.00501
            assert abs(float(scripts.replace("−", "-")) - float(e["scripts"])) < 0.00501
            told += 1
    assert told == sum((e["study"], e["map"]) in SECTIONS.values() for e in rows.values()) >= 20


def test_the_documented_rows_have_these_exponents():
    rows = table_of("curves")
    for e in table_of("exponents"):
        key = ("study", "subject", "masking", "layer", "map")
        points = [(int(r["n"]), float(r["L"])) for r in rows if all(r[k] == e[k] for k in key) and int(r["n"]) <= 98]
        lengths, values = zip(*points, strict=True)
        assert fit_growth(lengths, values).exponent.value == pytest.approx(float(e["exponent"]), abs=1e-4)


@pytest.mark.parametrize("page", ["reference/reproduction.md", "explanation/scripts.md", "gallery.md"])
def test_figures_of_the_documentation_are_there_and_name_their_command(page):
    text = (DOCS / page).read_text("utf-8")
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(images) >= 2
    for image in images:
        assert (DOCS / page).parent.joinpath(image).read_bytes().startswith((b"\x89PNG", b"<?xml"))
        assert (DOCS / page).parent.joinpath(image).stat().st_size < 400_000
    known = {command.group or command.name for command in commands()}
    assert set(re.findall(r"howsmooth (\w+)", text)) <= known
