"""Other kinds of attention in a layer: the scale found, the constants measured, what is left out and why."""

import math
from dataclasses import replace

import pytest
import torch

import howsmooth as hs
from howsmooth import kinds
from howsmooth.errors import BadInputError
from howsmooth.report.assemble import variants_report
from howsmooth.study import variants
from howsmooth.study.choices import KINDS, USUAL, choice_jobs, cost_of, kind_names, matched_scale, mean_entropy, put_in
from howsmooth.study.fit import slope
from howsmooth.study.jobs import run_here
from howsmooth.study.layers import LayerRow
from howsmooth.study.reader import Reader
from howsmooth.study.scope import Scope, settle
from howsmooth.study.swapped import VARIANTS, summary, variants_of
from problems import readers
from problems.kinds import layer_of
from problems.layers import gaussian
from problems.zoo import ZOO, randomize

SCALED = [name for name in KINDS if not isinstance(KINDS[name](0), kinds.Linear | kinds.Hard)]


def found(reader, *lengths: int, names=USUAL, samples: int = 1, factors=(1.0,)):
    setting = settle(reader, Scope(lengths or (10,), samples))
    return variants_of(VARIANTS.ask(VARIANTS.tasks(setting, kinds=names, factors=factors), lambda jobs: run_here(reader, jobs)))


@pytest.fixture(scope="module")
def measured():
    return found(readers.reader(), 8, 16, samples=2, factors=(0.5, 1.0, 2.0))


def test_entropy_is_that_of_weights_written_down():
    x = gaussian(7, 8, seed=5)
    uniform = replace(layer_of(kinds.Softmax()), scale=0.0)
    assert mean_entropy(uniform, x) == pytest.approx(math.log(7))
    assert mean_entropy(layer_of(kinds.Hard()), x) == pytest.approx(0.0, abs=1e-12)
    causal = replace(uniform, causal=True)
    assert mean_entropy(causal, x) == pytest.approx(sum(math.log(i) for i in range(1, 8)) / 7)
    attn = layer_of(kinds.Sigmoid())
    q, k, _ = attn.vectors(x[None])
    rows = torch.sigmoid(attn.scale * q @ k.mT - math.log(7))
    rows = rows / rows.sum(-1, keepdim=True)
    assert mean_entropy(attn, x) == pytest.approx(float(-(rows * rows.log()).sum(-1).mean()))
    both = layer_of(kinds.Differential(0.7))
    parts = [torch.softmax(both.scale * a @ b.mT, -1) for a, b in zip(*(t[0] for t in both.vectors(x[None])[:2]), strict=True)]
    assert mean_entropy(both, x) == pytest.approx(float(torch.stack([-(p * p.log()).sum(-1) for p in parts]).mean()))


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("target", [2.3, 1.9])
def test_the_scale_found_gives_the_entropy_asked_for(name, target):
    attn, x = put_in(layer_of(kinds.Softmax()), KINDS[name](0)), 2 * gaussian(12, 8, seed=6)
    scale, entropy = matched_scale(attn, x, target)
    assert entropy == pytest.approx(mean_entropy(replace(attn, scale=scale), x), abs=1e-9)
    assert entropy == pytest.approx(target, abs=1e-3)


def test_an_entropy_out_of_reach_gets_the_nearest():
    """Sigmoid's weights saturate: normalised rows become even over all keys with a positive logit."""
    attn, x = layer_of(kinds.Sigmoid()), 2 * gaussian(12, 8, seed=6)
    scale, entropy = matched_scale(attn, x, 0.1)
    assert entropy > 0.5
    assert entropy == pytest.approx(min(mean_entropy(replace(attn, scale=attn.scale * 2.0**k), x) for k in range(13)))
    assert scale > attn.scale
    scale, entropy = matched_scale(layer_of(kinds.Softmax()), x, 9.0)
    assert entropy == pytest.approx(math.log(12), abs=1e-2)


@pytest.mark.slow
def test_every_row_is_the_constant_of_the_layer_with_that_kind(measured):
    reader = readers.reader()
    captured = reader.capture(16, [0])[0]
    rows = [r for r in measured.rows if (r.layer, r.n, r.sample) == (1, 16, 0)]
    assert {(r.variant, r.factor) for r in rows} == {(name, f) for name in USUAL for f in (0.5, 1.0, 2.0)}
    own = captured.attention(1)
    for row in rows:
        attn = replace(own, kind=KINDS[row.variant](1), scale=row.scale)
        x = row.factor * captured.tokens(1).double()
        assert row.value == pytest.approx(hs.lipschitz(attn, x).value, rel=3e-3)
        assert row.lower <= row.upper
        assert row.output == pytest.approx(float(attn(x).norm()), rel=1e-4)
        assert row.relative == pytest.approx(row.value * float(x.norm()) / row.output, rel=1e-4)
        assert row.radius == pytest.approx(float(x.norm()) / 4, rel=1e-5)


def test_ways_and_scales(measured):
    ways = {(r.variant, r.way) for r in measured.rows}
    assert ("softmax", "both") in ways
    assert {way for name, way in ways if name in ("linear", "hard")} == {"published"}
    assert {(name, "matched") for name in ("sigmoid", "l2", "cosine", "sinkhorn", "differential")} <= ways
    softmax = next(r for r in measured.rows if r.variant == "softmax")
    assert softmax.value == pytest.approx(readers.reader().capture(8, [0])[0].measure(softmax.layer).value, rel=3e-3)
    for row in measured.rows:
        if row.matched:
            assert row.entropy == pytest.approx(row.target, abs=0.01)
        assert (row.cost is None) == (row.factor != 1)
    assert len({(r.layer, r.scale) for r in measured.rows if (r.variant, r.way) == ("cosine", "matched")}) == 2


def test_the_table_sets_kinds_against_softmax(measured):
    table = {(line["kind"], line["scale"]): line for line in measured.table()}
    assert next(iter(table)) == ("softmax", "both")
    assert table["softmax", "both"]["×softmax"] == pytest.approx(1.0)
    line = table["linear", "published"]
    rows = {(r.variant, r.layer, r.sample): r.value for r in measured.rows if (r.n, r.factor) == (16, 1)}
    logs = [math.log(rows["linear", k, s] / rows["softmax", k, s]) for k in (0, 1) for s in (0, 1)]
    assert line["×softmax"] == pytest.approx(math.exp(sum(logs) / 4))
    assert "linear (published)" in str(measured)
    assert len(measured.to_frame()) == len(measured.rows)


def test_the_power_of_a_power_law():
    assert slope({n: 3 * n**0.4 for n in (8, 16, 64)}) == pytest.approx(0.4)
    assert slope({8: 1.0}) is None


def test_kinds_without_a_causal_form_are_left_out_with_a_reason():
    result = found(readers.reader(readers.gpt2()), names=("softmax", "sigmoid", "sinkhorn"))
    assert {r.variant for r in result.rows} == {"softmax", "sigmoid"}
    assert {(r.variant, r.layer) for r in result.left_out} == {("sinkhorn", 0), ("sinkhorn", 1)}
    assert all("a causal mask" in r.reason for r in result.left_out)


def test_a_model_with_phases_keeps_them():
    reader = Reader.of(hs.load(randomize(ZOO["llama"].build())), readers.ids())
    result = found(reader, names=("softmax", "cosine", "l2", "l2-tied"))
    assert {"softmax", "cosine", "l2"} <= {r.variant for r in result.rows}
    row = next(r for r in result.rows if (r.variant, r.way, r.layer) == ("cosine", "published", 0))
    captured = reader.capture(10, [0])[0]
    attn = captured.attention(0)
    assert attn.rotary is not None
    truth = hs.lipschitz(replace(attn, kind=kinds.Cosine(), scale=None), captured.tokens(0).double())
    assert row.value == pytest.approx(truth.value, rel=3e-3)


@pytest.mark.filterwarnings("ignore::howsmooth.models.FallbackWarning")
def test_a_layer_that_is_no_formula_is_refused_in_one_sentence():
    reader = Reader.of(hs.load(randomize(ZOO["deberta-v2"].build())), readers.ids())
    with pytest.raises(BadInputError, match="expected"):
        found(reader)


def test_bad_kinds_and_factors():
    with pytest.raises(BadInputError, match="kinds of attention"):
        variants(readers.bert(), readers.ids(), kinds=["sofmax"])
    with pytest.raises(BadInputError, match="positive factors"):
        variants(readers.bert(), readers.ids(), kinds=["linear"], lengths=[8], samples=1, factors=[0.0])
    assert kind_names(["linear", "linear"]) == ("softmax", "linear")
    setting = settle(readers.reader(), Scope((8,), 1, map="block"))
    assert choice_jobs(setting, USUAL) == []


def test_a_layer_costs_as_much_as_itself():
    attn, x = layer_of(kinds.Softmax()), gaussian(1, 32, 8, seed=3)
    assert 0.05 < cost_of(attn, attn, x) < 20


def test_the_studys_own_page_has_its_layers_and_kinds(measured, tmp_path):
    reader = readers.reader()
    setting = settle(reader, Scope((8, 16), 2))
    rows = run_here(reader, choice_jobs(setting, ["softmax"]))
    report = variants_report(reader, setting, replace(rows, rows=measured.rows), "howsmooth study variants mine")
    page = report.save(tmp_path / "page", figures=False)
    assert len(report.data.of(LayerRow)) == 2 * 2 * 2
    assert "Which kind is smoothest?" in page.read_text("utf-8")
    assert len(summary(report.data)) == 2 * 13 * (1 + 3)
