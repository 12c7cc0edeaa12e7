"""The page as a reader has it, in headless Chromium."""

import csv
import io
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checks import violations
from howsmooth.errors import ResultsError
from howsmooth.report import ReportData, write_page
from howsmooth.report.page import write_radii_page
from howsmooth.search import Radius
from howsmooth.study import Radii
from marks import first
from problems import reports
from problems.desks import LENGTHS

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright runs this")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; install the package chromium to run this")

CHARTS = {
    "layers-by-length": 4 * 8,
    "growth": 4 * 8,
    "token-share": 4,
    "held": 2 * 4,
    "maps": 3 * 4,
    "layers-by-heads": 4 * 5,
    "bound-ladder": 4,
    "near": 3 * 4,
    "radii": 3 * 4,
    "token-shares": 100,
    "influence": 44,
    "splitting": 8,
    "worst-inputs": 4 + 4,
    "variants-length": 2 * 2,
    "variants-radius": 2 * 3,
    "variants-cost": 2,
}

# Every chart by name: shapes drawn, size, and attributes that are no numbers.
SURVEY = """() => Object.fromEntries([...document.querySelectorAll("[data-chart]")].map((chart) => {
  const sheet = chart.querySelector("svg"), nodes = sheet ? [...sheet.querySelectorAll("*")] : [];
  const bad = nodes.flatMap((n) => [...n.attributes]).filter((a) => /NaN|undefined|Infinity|null/.test(a.value));
  return [chart.dataset.chart, { shapes: nodes.filter((n) => /^(rect|circle|path)$/.test(n.tagName)).length,
    width: sheet?.clientWidth ?? 0, height: sheet?.clientHeight ?? 0, bad: bad.map((a) => a.name + "=" + a.value),
    label: sheet?.getAttribute("aria-label") ?? "" }];
}))"""


# Opens what is folded, and waits for the charts in there.
UNFOLD = """async () => {
  document.querySelectorAll("main details[data-name]").forEach((part) => (part.open = true));
  for (let i = 0; i < 3; i++) await new Promise((done) => requestAnimationFrame(done));
}"""


@dataclass
class Visit:
    """An open page and what went wrong on it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def visit(browser: Any, path: Path, width: int = 1100, scheme: str = "light", folded: bool = False) -> Iterator[Visit]:
    """The page with all its parts open, or folded as it comes."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True)
    page = context.new_page()
    seen = Visit(page)
    page.on("console", lambda m: seen.errors.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: seen.errors.append(str(e)))
    page.on("request", lambda r: seen.requests.append(r.url))
    page.on("dialog", lambda d: (seen.errors.append(d.message), d.dismiss()))
    try:
        page.goto(path.as_uri())
        if not folded:
            page.evaluate(UNFOLD)
        yield seen
    finally:
        context.close()


def calm(seen: Visit, path: Path) -> None:
    """No error, and no request but for the page and images made of it."""
    assert seen.page.evaluate("document.documentElement.dataset.ready") == "yes"
    assert seen.errors == []
    assert [url for url in seen.requests if url != path.as_uri() and not url.startswith(("data:", "blob:"))] == []


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(reports.full(), tmp_path_factory.mktemp("full"))


@pytest.mark.slow
def test_a_page_with_errors_and_requests_is_not_calm(browser, tmp_path):
    bad = tmp_path / "index.html"
    bad.write_text("<html data-ready='yes'><script>throw new Error('x')</script>")
    with visit(browser, bad) as seen, pytest.raises(AssertionError):
        calm(seen, bad)
    bad.write_text("<html data-ready='yes'><img src='http://localhost:9/a.png'>")
    with visit(browser, bad) as seen, pytest.raises(AssertionError):
        calm(seen, bad)
    bad.write_text("<html>")
    with visit(browser, bad) as seen, pytest.raises(AssertionError):
        calm(seen, bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "scheme"),
    first([(1100, "light"), (320, "dark"), (320, "light"), (390, "light"), (390, "dark"), (1100, "dark")], 2),
)
def test_every_chart_draws_at_every_width_without_errors_or_requests(browser, full, width, scheme):
    with visit(browser, full, width, scheme) as seen:
        charts = seen.page.evaluate(SURVEY)
        assert set(charts) == set(CHARTS)
        for name, least in CHARTS.items():
            chart = charts[name]
            assert chart["shapes"] >= least, name
            assert chart["bad"] == [], name
            assert chart["width"] > 0.75 * min(width - 60, 700), name
            assert chart["height"] > 60, name
            assert chart["label"], name
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        calm(seen, full)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), first([(1280, "light"), (390, "dark"), (390, "light"), (1280, "dark")], 2))
def test_the_page_is_accessible(browser, full, width, scheme):
    with visit(browser, full, width, scheme) as seen:
        assert violations(seen.page) == []
        calm(seen, full)


def test_the_verdict_is_on_the_first_screen_and_the_rest_is_folded(browser, full):
    with visit(browser, full, 1280, folded=True) as seen:
        page = seen.page
        head = page.locator("[data-table=layers] thead")
        assert head.bounding_box()["y"] < 900
        assert page.locator("#more details[open]").count() == 0
        assert not page.locator("[data-chart=influence] svg").count()
        assert "Splitting pays in 1 of 4 cases" in page.inner_text("#splitting summary")
        page.locator("[data-table=layers] a").first.click()
        assert page.evaluate("location.hash") == "#advice-jump"
        page.evaluate("location.hash = '#influence'")
        page.wait_for_selector("[data-chart=influence] svg")
        page.evaluate("scrollTo({ top: document.body.scrollHeight, behavior: 'instant' })")
        assert page.locator("nav").bounding_box()["y"] == pytest.approx(0, abs=1)
        calm(seen, full)


def test_every_chart_opens_on_the_layer_of_the_headline(browser, full):
    with visit(browser, full) as seen:
        page = seen.page
        assert page.inner_text(".answer").startswith("Layer 0 amplifies most")
        assert page.inner_text("[data-table=layers] tr.marked td").strip() == "0"
        assert page.inner_text("#growth-names [aria-pressed=true]") == "layer 0"
        for pick in ("text-layer", "bounds-layer"):
            assert page.input_value(f"[data-pick={pick}]") == "0"
        calm(seen, full)


@pytest.mark.slow
@pytest.mark.parametrize("name", first(CHARTS, 5))
def test_arrow_keys_read_the_values_of_every_chart(browser, full, name):
    with visit(browser, full) as seen:
        page = seen.page
        page.locator(f"[data-chart={name}] svg").focus()
        said = []
        for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
            assert page.locator(".tip").is_visible()
            said.append(page.inner_text(".tip"))
        assert len(set(said)) > 1, said
        page.keyboard.press("Escape")
        assert not page.locator(".tip").is_visible()
        calm(seen, full)


def test_what_a_finger_touches_stays_until_it_touches_something_else(browser, full):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    page = context.new_page()
    try:
        page.goto(full.as_uri())
        cell = page.locator("[data-chart=layers-by-length] .cell").nth(5)
        cell.evaluate("node => node.scrollIntoView({ block: 'center', behavior: 'instant' })")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        cell.tap()
        page.wait_for_timeout(100)
        assert page.inner_text(".tip").startswith("layer 0, n = 136\nL = ")
        page.locator("#heat h2").tap()
        assert not page.locator(".tip").is_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    finally:
        context.close()


def test_kinds_change_with_the_scale_the_layer_and_the_quantity(browser, full):
    def drawn(page: Any, chart: str) -> set[str]:
        return set(page.eval_on_selector_all(f"[data-chart={chart}] [data-series]", "g => g.map(s => s.dataset.series)"))

    def lines(page: Any) -> dict[tuple[str, str], list[str]]:
        rows = page.eval_on_selector_all(
            "[data-table=variants] tbody tr", "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
        )
        return {(row[0], row[1]): row for row in rows}

    with visit(browser, full) as seen:
        page = seen.page
        assert drawn(page, "variants-length") == {"softmax", "cosine"}  # linear has no scale to match
        assert "cosine has the smallest L, 0.5 times softmax's" in page.inner_text("#variants")
        page.select_option("[data-pick=variants-way]", "published")
        assert drawn(page, "variants-radius") == drawn(page, "variants-cost") == {"softmax", "cosine", "linear"}
        page.select_option("[data-pick=variants-layer]", "1")
        one = lines(page)
        softmax, linear = (float(one[key][2]) for key in (("softmax", "the layer's"), ("linear", "published")))
        assert softmax == pytest.approx(reports.value(1, 128), rel=1e-2)
        assert linear == pytest.approx(4 * softmax, rel=1e-2)
        assert one["cosine", "matched"][7:] == ["1", "1 of 1"]
        page.select_option("[data-pick=variants-quantity]", "relative")
        assert "Relative constant against n, layer 1" in page.inner_text("[data-chart=variants-length]")
        calm(seen, full)


def shading(page: Any) -> list[float]:
    return page.eval_on_selector_all("#text .token", "spans => spans.map(s => Number(s.style.getPropertyValue('--share')))")


def test_radii_and_inputs_are_picked(browser, full):
    def series(name: str) -> list[str]:
        return page.eval_on_selector_all(f"[data-chart={name}] .series", "all => all.map(s => s.dataset.series)")

    with visit(browser, full) as seen:
        page = seen.page
        assert series("near") == ["at the text", "attained", "certified"]
        assert "within 0.001 of" in page.inner_text("[data-chart=near] .chart-title")
        page.select_option("[data-pick=near-radius]", "1")
        assert "within 1 of" in page.inner_text("[data-chart=near] .chart-title")
        assert series("near") == ["at the text", "attained"]  # nothing is certified there
        assert len(page.query_selector_all("[data-chart=radii] .spread")) == 3
        page.select_option("[data-pick=radii-input]", "0")
        assert "input 1" in page.inner_text("[data-chart=radii] .chart-title")
        assert page.query_selector_all("[data-chart=radii] .spread") == []
        assert len(page.query_selector_all("[data-chart=radii] [data-series=attack] .dot")) == 3  # one attack found nothing
        calm(seen, full)


def test_the_selector_changes_the_shading(browser, full):
    with visit(browser, full) as seen:
        page = seen.page
        for layer in (0, 2, 3):
            page.select_option("[data-pick=text-layer]", str(layer))
            shares = shading(page)
            assert shares.index(max(shares)) == layer
            assert shares[layer] == pytest.approx(0.85)
            assert f"“word{layer}” (token {layer}) 50.0 %" in page.inner_text("#text .note")
            colours = page.eval_on_selector_all(
                "#text .token", "s => [...new Set(s.map(t => getComputedStyle(t).backgroundColor))]"
            )
            assert len(colours) == 2
        before = len(shading(page))
        page.select_option("[data-pick=text-length]", "128")
        assert (before, len(shading(page))) == (136, 128)
        calm(seen, full)


def column(page: Any, name: str, index: int) -> list[str]:
    return page.eval_on_selector_all(
        f"table[data-table={name}] tbody tr", f"rows => rows.map(r => r.cells[{index}].textContent)"
    )


@pytest.mark.slow
def test_tables_sort_by_number_both_ways_and_by_text(browser, full):
    with visit(browser, full) as seen:
        page = seen.page
        heads = page.locator("table[data-table=fits] th button")
        for index in (1, 0):
            heads.nth(index).click()
            values = [float(v) for v in column(page, "fits", index)]
            assert values == sorted(values)
            heads.nth(index).click()
            assert [float(v) for v in column(page, "fits", index)] == sorted(values, reverse=True)
        assert page.locator("table[data-table=fits] th").nth(0).get_attribute("aria-sort") == "descending"
        assert len(column(page, "measurements", 1)) == 25
        page.click("#numbers .more")
        assert len(column(page, "measurements", 1)) == 4 * 8 * 6
        page.locator("table[data-table=measurements] th button").nth(1).click()
        lengths = [int(v) for v in column(page, "measurements", 1)]
        assert lengths == sorted(lengths)
        assert lengths[0] == 8
        calm(seen, full)


def hover(page: Any, selector: str, index: int = 0) -> None:
    """Scrolling hides the tip, so scroll first and let that pass."""
    target = page.locator(selector).nth(index)
    target.evaluate("node => node.scrollIntoView({ block: 'center', behavior: 'instant' })")
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    target.hover()


@pytest.mark.slow
def test_hovering_shows_the_numbers(browser, full):
    with visit(browser, full) as seen:
        page = seen.page
        hover(page, "[data-chart=layers-by-length] .cell", 5)
        assert page.inner_text(".tip").startswith("layer 0, n = 136\nL = ")
        hover(page, "[data-chart=growth] svg")
        assert "L = " in page.inner_text(".tip")
        hover(page, "[data-chart=bound-ladder] .row")
        assert "bound" in page.inner_text(".tip")
        hover(page, "[data-chart=held] svg")
        assert "frozen: " in page.inner_text(".tip")
        hover(page, "[data-chart=near] svg")
        assert "certified: at most " in page.inner_text(".tip")
        hover(page, "[data-chart=radii] svg")
        assert page.inner_text(".tip").split("\n")[0].endswith("3 inputs")
        hover(page, "[data-chart=maps] svg")
        assert "relative: " in page.inner_text(".tip")
        hover(page, "#text .token", 4)
        assert page.inner_text(".tip").startswith("token 4: word4")
        page.mouse.move(2, 2)
        assert not page.locator(".tip").is_visible()
        calm(seen, full)


@pytest.mark.slow
def test_the_jump_is_marked_and_another_layer_can_be_put_in_focus(browser, full):
    with visit(browser, full) as seen:
        page = seen.page
        label = page.locator("[data-chart=growth] .break-label")
        assert "from 128 to 136" in label.first.text_content()
        assert page.locator("#growth-names .key[aria-pressed=true]").inner_text() == "layer 0"
        page.locator("#growth-names .key", has_text="layer 2").click()
        assert label.count() == 0
        assert page.locator("[data-chart=growth] .interval").count() == 1
        page.locator("#growth-names .key", has_text="all").click()
        assert label.count() == 1
        page.select_option("[data-pick=quantity]", "radius")
        assert page.locator("[data-chart=growth] .chart-title").inner_text() == "R against n"
        calm(seen, full)


@pytest.mark.slow
def test_the_picture_shows_which_token_moves_which(browser, full):
    """Its middle, below and above the diagonal, and its pixels."""
    with visit(browser, full) as seen:
        page = seen.page
        net = page.locator("[data-chart=influence] .frame")
        net.evaluate("node => node.scrollIntoView({ block: 'center', behavior: 'instant' })")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        box = net.bounding_box()
        cell = box["width"] / 136
        for i, j, norm in ((40, 37, 0.25), (136 - 1, 0, 1 / 136), (3, 90, 0)):
            page.mouse.move(box["x"] + (j + 0.5) * cell, box["y"] + (i + 0.5) * cell)
            where, said = page.inner_text(".tip").split("\n")
            assert where == f"token {j} “word{j}” → token {i} “word{i}”"
            shade = 136 ** (0.5 / 126) - 1  # half of one, between 1/136 and 1
            assert said == "no influence" if norm == 0 else float(said.split("= ")[1]) == pytest.approx(norm, rel=shade)
        drawn = "[...document.querySelector('.picture canvas').getContext('2d').getImageData(0, 0, 136, 136).data]"
        pixels = np.array(page.evaluate(drawn)).reshape(136, 136, 4)
        assert pixels[3, 90, 3] == 0  # nothing is drawn where there is nothing
        assert pixels[40, 40].tolist() == [0x8C, 0x1C, 0x33, 255]  # the strongest shade
        assert pixels[135, 0].tolist() == [0xFB, 0xF4, 0xE9, 255]  # the faintest
        calm(seen, full)


@pytest.mark.slow
def test_maps_can_be_shown_relative_to_input_and_output(browser, full):
    with visit(browser, full) as seen:
        title = seen.page.locator("[data-chart=maps] .chart-title")
        assert title.inner_text() == "L of each map, n = 512"
        assert seen.page.inner_text("#maps-names").split() == ["attention", "normed", "block"]
        seen.page.select_option("[data-pick=maps-quantity]", "relative")
        assert title.inner_text() == "Relative constant of each map, n = 512"
        assert "They differ most in layer 1" in seen.page.inner_text("#maps")
        calm(seen, full)


def test_heads_and_bounds_follow_their_selectors(browser, full):
    with visit(browser, full) as seen:
        page = seen.page
        cell = page.locator("[data-chart=layers-by-heads] .inside").nth(2)
        assert cell.text_content() == "12"
        page.select_option("[data-pick=heads-length]", "128")
        assert cell.text_content() == "3"
        page.select_option("[data-pick=bounds-layer]", "3")
        assert page.locator("[data-chart=bound-ladder] .chart-title").inner_text() == "Measured and bounds, layer 3, n = 512"
        assert "it has several heads" in page.locator("#bounds-missing").text_content()
        assert "10³⁸⁶" in page.locator("[data-chart=bound-ladder] svg").text_content()
        calm(seen, full)


@pytest.mark.slow
@pytest.mark.parametrize("name", first(CHARTS, 6))
def test_every_chart_downloads_as_numbers(browser, full, name):
    with visit(browser, full, scheme="dark") as seen:
        with seen.page.expect_download() as caught:
            seen.page.locator(f"[data-chart={name}] .tool").click()
        assert caught.value.suggested_filename == f"{name}.csv"
        rows = list(csv.DictReader(io.StringIO(Path(caught.value.path()).read_text("utf-8"))))
        assert len(rows) >= 4
        calm(seen, full)


@pytest.mark.slow
def test_downloaded_numbers_are_those_of_the_report(browser, full):
    with visit(browser, full) as seen:
        with seen.page.expect_download() as caught:
            seen.page.locator("[data-chart=layers-by-heads] .tool").click()
        rows = csv.DictReader(io.StringIO(Path(caught.value.path()).read_text("utf-8")))
        saved = {(int(r["layer"]), int(r["head"]), int(r["n"])): float(r["value"]) for r in rows}
        assert saved == {(h["layer"], h["head"], h["n"]): h["value"] for h in reports.heads()}


@pytest.mark.slow
def test_the_theme_can_be_turned(browser, full):
    with visit(browser, full) as seen:
        page, paper = seen.page, "getComputedStyle(document.body).backgroundColor"
        first = "document.querySelector('[data-chart=layers-by-length] .cell').style.fill"
        light = page.evaluate(paper), page.evaluate(first)
        page.click("#theme")
        dark = page.evaluate(paper), page.evaluate(first)
        assert light[0] != dark[0]
        assert light[1] != dark[1]
        page.click("#theme")
        assert (page.evaluate(paper), page.evaluate(first)) == light


def test_hostile_text_is_shown_as_text(browser, tmp_path):
    path = write_page(reports.harmful(), tmp_path / "page")
    with visit(browser, path, 390) as seen:
        page = seen.page
        shown = page.eval_on_selector_all("#text .token", "spans => spans.map(s => s.textContent)")
        assert shown == list(reports.HOSTILE)
        assert page.evaluate("window.harmed") is None
        assert page.evaluate("document.querySelectorAll('main script, main img, main b b').length") == 0
        bad = reports.harmful().title
        assert page.inner_text("h1") == bad
        assert bad in page.locator("#methods").text_content()
        assert bad in page.locator(".finding").last.text_content()
        for selector in ("[data-chart=bound-ladder] .row", "[data-chart=worst-inputs] .row"):
            hover(page, selector)
            assert bad in page.locator(".tip").text_content()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        calm(seen, path)


ODD = ["one number", "one layer", "one length", "zeros", "two lengths"]
ODD += ["no words", "80 layers", "not finite", "ends not finite"]


def odd(kind: str) -> ReportData:
    """Reports that lack something."""
    rows = reports.layers(3, 2, (8, 16))
    if kind == "not finite":
        bad = {(1, 8): math.inf, (1, 16): None, (2, 16): math.nan}
        some = [r | {"value": bad.get((r["layer"], r["n"]), r["value"])} for r in rows]
        return reports.report([*some, *(r | {"averaging": math.inf, "gain": None} for r in reports.yardsticks(3, 16))])
    if kind == "ends not finite":
        some = [r | {"upper": math.inf, "relative": math.inf} for r in rows]
        rest = [r | {"value": math.inf} for r in (*reports.held(3, 16), *reports.splits(3), *reports.worst(3))]
        return reports.report([*some, *rest, *(r | {"gain": math.nan} for r in reports.yardsticks(3, 16))])
    return {
        "one number": reports.report(reports.layers(1, 1, (8,))),
        "one layer": reports.report([*reports.layers(1), *reports.yardsticks(1), *reports.heads(1, 1), *reports.held(1)]),
        "one length": reports.report([*reports.layers(4, 3, (512,)), *reports.yardsticks(), *reports.held(), *reports.maps()]),
        "zeros": reports.report([row | {"radius": 0.0} for row in reports.zeros()]),
        "two lengths": reports.report(reports.layers(2, 1, (8, 16))),
        "no words": reports.report([r | {"top_token": 3, "top_share": 0.9} for r in reports.with_shares(rows, (16,))]),
        "80 layers": reports.full(
            reports.layers(80, 2),
            reports.heads(80, 24),
            reports.bounds(),
            reports.held(80),
            reports.maps(80),
            reports.yardsticks(80),
        ),
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["one number", "one layer", "one length", "zeros", "two lengths", "no words", "80 layers", "not finite", "ends not finite"],
)
@pytest.mark.parametrize("width", first([900, 390]))
def test_odd_reports_draw_what_they_have(browser, tmp_path, kind, width):
    path = write_page(odd(kind), tmp_path / "page")
    with visit(browser, path, width) as seen:
        charts = seen.page.evaluate(SURVEY)
        assert "layers-by-length" in charts
        assert ("growth" in charts) == (kind not in ("one number", "one length", "zeros"))
        assert ("exponents" in charts) == ("layers-by-heads" in charts and kind != "one layer") == (kind == "80 layers")
        assert {name: chart for name, chart in charts.items() if chart["bad"] or not chart["shapes"]} == {}
        words = seen.page.inner_text("body")
        assert not re.search(r"\b(NaN|nan|inf|Infinity|undefined|null|None)\b", words)
        assert ("could not be measured or left the range of numbers" in words) == ("not finite" in kind)
        links = seen.page.eval_on_selector_all(
            "nav a, td a", "all => all.every(a => document.querySelector(a.getAttribute('href')))"
        )
        assert links
        assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
        calm(seen, path)


@pytest.mark.slow
def test_a_model_becomes_a_page_that_works(browser, desk):
    """From weights and text to the reader: every part measured, drawn, and true to the measurement."""
    path = desk.report / "index.html"
    longest = [row for row in desk.rows if row["kind"] == "layer" and row["n"] == max(LENGTHS)]
    with visit(browser, path) as seen:
        charts = seen.page.evaluate(SURVEY)
        assert set(charts) == set(CHARTS) | {"shuffled", "depth"}
        assert all(chart["shapes"] and not chart["bad"] for chart in charts.values())
        spoken = " ".join(seen.page.inner_text(".answer").split())
        assert f"Layer {max(longest, key=lambda row: row['value'])['layer']} amplifies most" in spoken
        assert len(seen.page.query_selector_all("#text .token")) in set(LENGTHS)
        shades = []
        for layer in ("0", "1"):
            seen.page.select_option("[data-pick=text-layer]", layer)
            shades.append(shading(seen.page))
        assert shades[0] != shades[1]
        calm(seen, path)


@pytest.mark.slow
def test_radii_become_a_page(browser, tmp_path):
    """Two inputs at three layers; one attack found nothing, one layer is refused with words that mean harm."""
    rows: list[tuple[int, int, Radius | str]] = []
    for window in (0, 1):
        for layer in (0, 2, 5):
            r = 0.01 * (1 + window) * (1 + layer)
            attacked = float("inf") if (window, layer) == (1, 5) else 9 * r
            rows.append((window, layer, Radius(r, attacked, 2 * r, "token", 7, 0.5, 10.0, 0.999999, "a reason")))
    rows.append((1, 6, reports.HOSTILE[0]))
    page = tmp_path / "radii.html"
    write_radii_page(Radii(tuple(rows)), page, model="a <b>model", command="howsmooth certify m", change=None)
    with pytest.raises(ResultsError, match="--force"):
        write_radii_page(Radii(tuple(rows)), page, model="m", command="", change=0.1)
    for width in (1100, 340):
        with visit(browser, page, width) as seen:
            text = seen.page.inner_text("body")
            assert "0.001 of a token's length, for input 1 at layer 0, where an attack needs 0.009" in text
            assert "before the answer changes?" in text
            chart = seen.page.evaluate(SURVEY)["radii"]
            assert chart["bad"] == []
            assert chart["shapes"] >= 3 * 3
            assert seen.page.evaluate("window.harmed") is None
            seen.page.select_option("[data-pick=radii-input]", "1")
            assert len(seen.page.query_selector_all("[data-series=attack] .dot")) == 2
            assert len(seen.page.query_selector_all("[data-table=radii] tbody tr")) == 6
            assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
            calm(seen, page)
    write_radii_page(Radii(((0, 0, "no such layer"),)), page, model="m", command="", change=0.1, force=True)
    with visit(browser, page) as seen:
        assert "No radius could be certified" in seen.page.inner_text("body")
        calm(seen, page)
