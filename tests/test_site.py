"""The site as a reader has it, in headless Chromium, and the playground's numbers beside the package's."""

import functools
import http.server
import random
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import howsmooth as hs
from checks import violations
from marks import first

pytest.importorskip("mkdocs", reason="builds the site; pip install 'howsmooth[docs]' runs this")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright runs this")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found; install the package chromium to run this"),
]

ROOT = Path(__file__).parents[1]
PLAYGROUND = ROOT / "docs" / "assets" / "playground"
# What a page shows: how far it scrolls sideways, formulas set, dollars outside code and formulas.
SURVEY = """() => {
  const text = document.querySelector(".md-content")?.cloneNode(true);
  text?.querySelectorAll("pre, code, .katex, script, style").forEach((node) => node.remove());
  return { over: document.documentElement.scrollWidth - innerWidth, raw: (text?.textContent.match(/.{0,30}\\$.{0,30}/g) ?? []),
    formulas: document.querySelectorAll(".katex").length, marked: document.querySelectorAll(".arithmatex").length,
    images: [...document.images].filter((i) => i.complete && !i.naturalWidth).map((i) => i.src) };
}"""


Look = tuple[int, str]  # how wide, and in which scheme
DESK: Look = (1300, "light")
PHONE: Look = (360, "dark")
SCHEMES = {"light": "default", "dark": "slate"}  # the theme's names


@dataclass
class Visitor:
    """A browser's window, and what went wrong in it."""

    page: Any
    home: str
    troubles: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda m: self.troubles.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda e: self.troubles.append(str(e)))
        self.page.on("requestfailed", self._failed)
        self.page.on("response", lambda r: self.troubles.append(f"{r.status}: {r.url}") if r.status >= 400 else None)
        self.page.on("request", self._same_host)

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the visitor itself went on to the next page
            self.troubles.append(f"failed: {request.url}, {request.failure}")

    def _same_host(self, request: Any) -> None:
        if not request.url.startswith((self.home, "data:", "blob:", "about:")):
            self.troubles.append(f"another host: {request.url}")

    def survey(self, path: str, looks: Sequence[Look] = (DESK,)) -> dict[str, Any]:
        """Open a page and look at it in every way; what it shows in the last."""
        self.page.emulate_media(color_scheme=looks[0][1])
        self.page.goto(self.home + path, timeout=90_000)
        assert self.page.evaluate("document.body.dataset.mdColorScheme") in (SCHEMES[looks[0][1]], None)
        seen = {}
        for width, scheme in looks:
            self.page.set_viewport_size({"width": width, "height": 900})
            self.page.emulate_media(color_scheme=scheme)
            self.page.evaluate(
                "name => document.body.setAttribute('data-md-color-scheme', name)", SCHEMES[scheme]
            )  # the switch
            for _ in range(20):  # charts follow the width when the browser finds the time
                seen = self.page.evaluate(SURVEY)
                if seen["over"] <= 0:
                    break
                self.page.wait_for_timeout(100)
            where = (path, width, scheme, seen)
            assert not self.troubles, (*where, self.troubles)
            assert seen["over"] <= 0, where
            assert not seen["raw"], where
            assert seen["formulas"] == seen["marked"], where
            assert not seen["images"], where
        return seen


@pytest.fixture(scope="module")
def server(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}/"
        running.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


def visitor(browser: Any, home: str) -> Visitor:
    """The only one: pages left open go on drawing."""
    for earlier in browser.contexts:
        earlier.close()
    return Visitor(browser.new_page(), home)


def pages(site: Path) -> list[str]:
    found = sorted(str(path.relative_to(site)) for path in site.rglob("*.html"))
    return [path for path in found if path != "404.html" and not path.startswith("live/")]


@pytest.mark.parametrize(("width", "scheme"), first([PHONE, DESK]))
def test_every_page_from_the_file_system(browser, site, width, scheme):
    seen = visitor(browser, site.as_uri() + "/")
    surveys = {path: seen.survey(path, [(width, scheme)]) for path in pages(site)}
    assert len(surveys) >= 20
    assert surveys["explanation/bounds.html"]["formulas"] > 300
    for path in ("live/demo.html", "live/smollm2.html"):
        seen.survey(path, [(width, scheme)])


@pytest.mark.parametrize(
    "path", first(["index", "reference/api/measure", "tutorial", "explanation/bounds", "reference/cli", "gallery"], 2)
)
def test_pages_of_every_kind_from_a_server(browser, server, path):
    visitor(browser, server).survey(f"{path}.html", [(360, "light"), (1300, "dark")])


@pytest.mark.parametrize(
    ("path", "look"),
    [
        *first([(path, DESK) for path in ("tutorial", "gallery", "index", "explanation/bounds")], 2),
        *first([(path, (390, "dark")) for path in ("index", "reference/cli", "howto/models", "reference/api/measure")], 2),
    ],
)
def test_pages_are_accessible(browser, site, path, look):
    """The rules of WCAG 2.1, levels A and AA, as axe checks them."""
    seen = visitor(browser, site.as_uri() + "/")
    seen.survey(f"{path}.html", [look])
    assert violations(seen.page) == []


def test_what_is_not_accessible_is_seen(browser, tmp_path):
    (tmp_path / "bad.html").write_text(
        "<html lang=en><title>x</title><p style='color: #999; background: #fff'>pale</p><img src=data:,>"
    )
    seen = visitor(browser, tmp_path.as_uri() + "/")
    seen.page.goto(seen.home + "bad.html")
    assert {rule for rule, _ in violations(seen.page)} == {"color-contrast", "image-alt"}


def test_copy_buttons_copy_what_one_types(browser, site):
    seen = visitor(browser, site.as_uri() + "/")
    seen.survey("tutorial.html")
    for shown, copied in [
        (">>> x = 1\n>>> for i in x:\n...     i\n...\n3\n>>> x\n1\n", "x = 1\nfor i in x:\n    i\n\nx\n"),
        ("$ howsmooth demo \\\n    --quick\nL = 3\n$ ls\na  b\n", "howsmooth demo \\\n    --quick\nls\n"),
        ("import torch\n\nx = 1\n", "import torch\n\nx = 1\n"),
        ("make demo    # a report\n", "make demo    # a report\n"),
    ]:
        assert seen.page.evaluate("text => HowSmoothTyped(text)", shown) == copied


def test_numbers_of_equations_stand_beside_them(browser, site):
    seen = visitor(browser, site.as_uri() + "/")
    seen.survey("explanation/bounds.html", [PHONE])
    numbers = seen.page.evaluate("""() => [...document.querySelectorAll(".katex-tag")].map((tag) => {
      const left = tag.getBoundingClientRect().left, parts = tag.parentElement.querySelectorAll(".katex-base");
      return [tag.textContent, Math.max(...[...parts].map((part) => part.getBoundingClientRect().right)) - left]; })""")
    assert len(numbers) > 5
    assert [number for number, over in numbers if over > 1] == []


def test_every_copy_button_copies_code_alone(browser, server):
    seen = visitor(browser, server)
    seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    for path in ("index", "tutorial", "howto/own-module", "reference/api/measure"):
        seen.survey(f"{path}.html")
        texts = seen.page.evaluate("""async () => { const texts = [];
          for (const button of [...document.querySelectorAll("[data-clipboard-target]")].slice(0, 12)) {
            button.click(); texts.push(await navigator.clipboard.readText()); }
          return texts; }""")
        assert texts, path
        for text in texts:
            assert not any(line.startswith((">>>", "$ ", "...")) for line in text.splitlines()), text


def test_keys_of_the_playground_do_not_turn_the_page(browser, site):
    seen = visitor(browser, site.as_uri() + "/")
    seen.survey("index.html")
    seen.page.focus(".hs-tokens")
    before = seen.page.evaluate("HowSmoothPlayground[0].selected")
    seen.page.keyboard.press("n")
    seen.page.wait_for_timeout(300)
    assert seen.page.url.endswith("index.html")
    assert seen.page.evaluate("HowSmoothPlayground[0].selected") == before + 1


def test_the_search_works_without_a_server(browser, site):
    seen = visitor(browser, site.as_uri() + "/")
    seen.survey("index.html")
    seen.page.fill(".md-search__input", "splitting")
    seen.page.wait_for_selector(".md-search-result__link", timeout=10_000)
    assert not seen.troubles


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("sink", "glossary.html"),
        ("exploding logits", "training.html"),
        ("out of memory", "gpu.html"),
        ("cite", "cite.html"),
        ("FAQ", "faq.html"),
        ("quantization", "faq.html"),
        ("notebook", "results.html"),
        ("MPS", "faq.html"),
    ],
)
def test_the_search_finds_what_helps_first(browser, site, words, page):
    """Among the first three; proofs and records come behind."""
    seen = visitor(browser, site.as_uri() + "/")
    seen.survey("index.html")
    seen.page.fill(".md-search__input", words)
    seen.page.wait_for_selector(".md-search-result__link", timeout=10_000)
    seen.page.wait_for_timeout(300)
    found = seen.page.eval_on_selector_all(
        ".md-search-result__item > a, .md-search-result__link", "links => links.map((a) => a.pathname.split('/').at(-1))"
    )
    assert page in list(dict.fromkeys(found))[:3], found[:10]


def test_trouble_is_seen(browser, tmp_path):
    """The visitor reports a missing file, an error, a raw dollar, and a page that is too wide."""
    (tmp_path / "bad.html").write_text("<img src=none.png><script>undefined.x</script>")
    (tmp_path / "wide.html").write_text("<div class=md-content style='width: 2000px'>x</div>")
    (tmp_path / "raw.html").write_text("<div class=md-content>costs $x$ and <code>$y</code></div>")
    for name, said in {"bad": "none.png", "wide": "over", "raw": "costs"}.items():
        with pytest.raises(AssertionError, match=said):
            visitor(browser, tmp_path.as_uri() + "/").survey(f"{name}.html", [PHONE])


def setting(seed: int) -> dict[str, Any]:
    """A random configuration of the playground: some places several times, some maps with V = I, half of them causal."""
    draw = random.Random(seed)
    places = draw.randint(1, 7)
    size = draw.choice([0.3, 1.0, 2.0])
    points = [[draw.gauss(0, size), draw.gauss(0, size)] for _ in range(places)]
    a = [draw.gauss(0, 1) for _ in range(4)]
    return {
        "points": points,
        "counts": [draw.choice([1, 1, 2, 5]) for _ in range(places)],
        "A": [a[0], a[1], a[1], a[3]] if seed % 3 == 0 else a,
        "V": [1, 0, 0, 1] if seed % 4 == 0 else [draw.gauss(0, 1) for _ in range(4)],
        "causal": seed % 2 == 1,
        "radius": 1.1 * max((x * x + y * y) ** 0.5 for x, y in points),
    }


def block_norms(a: torch.Tensor, v: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> float:
    """The norm of the matrix `N` of Theorem 4.4 for one head."""
    g, means, top = x @ a.T, weights @ x, torch.linalg.matrix_norm(v, 2)
    length = g.norm(dim=-1)
    along = torch.where(length[:, None] > 0, g / length[:, None], torch.eye(2, dtype=x.dtype)[0]) @ v.T
    centred = x[None] - means[:, None]  # (i, j, 2)
    u = centred @ v.T
    plain = top + u.norm(dim=-1) * length[:, None]
    sharp = ((along[:, None] + length[:, None, None] * u).square().sum(-1) + top**2).sqrt()
    own = v @ torch.einsum("ij,ija,ijb->iab", weights, centred, centred) @ a
    norms = weights * torch.minimum(plain, sharp) + torch.diag(torch.linalg.matrix_norm(own, 2))
    return float(torch.linalg.matrix_norm(norms, 2))


def test_the_playground_gives_the_package_s_numbers(browser):
    page = browser.new_page()
    page.add_script_tag(path=PLAYGROUND / "core.js")
    settings = [setting(seed) for seed in range(50)]
    shown = page.evaluate(
        """(settings) => settings.map((s) => { const m = HowSmoothCore.measure(s), g = HowSmoothCore.growth(s, 0, 40);
          return { ...m, P: [...m.P], direction: [...m.direction], image: [...m.image], growth: g[g.length - 1] }; })""",
        settings,
    )
    compared = set()
    for given, told in zip(settings, shown, strict=True):
        a, v, points = (torch.tensor(given[name], dtype=torch.float64) for name in ("A", "V", "points"))
        attn = hs.Attention.from_matrices(a.view(2, 2), v.view(2, 2), causal=given["causal"])
        counts = torch.tensor(given["counts"])
        x = points.repeat_interleave(counts, 0)
        est = hs.lipschitz(attn, x)
        assert told["n"] == len(x)
        assert told["L"] == pytest.approx(est.value, rel=1e-6)
        torch.testing.assert_close(torch.tensor(told["outputs"], dtype=x.dtype), attn(x), rtol=1e-6, atol=1e-9)
        direction, image = (torch.tensor(told[name], dtype=x.dtype).view(-1, 2) for name in ("direction", "image"))
        torch.testing.assert_close(hs.jacobian(attn, x) @ direction, told["L"] * image, rtol=1e-6, atol=1e-8)
        weights = torch.tensor(told["P"], dtype=x.dtype).view(len(x), -1)
        torch.testing.assert_close(weights @ x @ v.view(2, 2).T, attn(x), rtol=1e-6, atol=1e-9)
        measure = x if given["causal"] else hs.Measure(points, counts / counts.sum().double())
        split = hs.splitting(attn, measure)
        assert told["splitting"]["gain"] == pytest.approx(split.gain, rel=1e-6, abs=1e-9)
        table, at = hs.bounds(attn, n=len(x), radius=given["radius"]), hs.bounds(attn, x)
        for row in told["bounds"]:
            compared.add(row["id"])
            if row["id"] == "D5":  # the package bounds this norm from above by a few products
                ours = at.by_id("D5").value
                assert ours is not None
                assert est.value * (1 - 1e-9) <= row["value"] <= ours * (1 + 1e-6)
                assert row["value"] == pytest.approx(block_norms(a.view(2, 2), v.view(2, 2), x, weights), rel=1e-6)
            else:
                assert row["value"] == pytest.approx(table.by_id(row["id"]).value, rel=1e-6), row["id"]
        copies = told["growth"]["n"] - int(counts[1:].sum())
        longer = torch.cat([points[:1].expand(copies, 2), x[counts[0] :]])
        assert told["growth"]["L"] == pytest.approx(hs.lipschitz(attn, longer).value, rel=1e-6)
    assert compared == {"B1", "B2", "B7", "B9", "B12", "D5"}


def test_the_playground_is_quick_and_alive(browser, site):
    """A frame at 64 tokens, measurement and all, takes less than 1/60 s; of a busy machine the best quarter counts."""
    seen = visitor(browser, site.as_uri() + "/")
    seen.survey("index.html")
    page = seen.page
    taken = page.evaluate("""async () => {
      const play = HowSmoothPlayground[0], taken = [];
      play.resize(64);
      for (let i = 0; i < 60; i++) {
        play.setting.points[i][0] *= 0.9;
        play.update();
        await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
        taken.push(play.spent);
      }
      return [play.result.n, ...taken];
    }""")
    assert taken[0] == 64
    assert sorted(taken[1:])[15] < 1000 / 60, sorted(taken[1:])
    before = page.inner_text(".hs-value")
    for name, said in {"split": "Splitting pays", "tie": "n = 32 tokens"}.items():
        page.click(f"[data-name={name}]")
        page.wait_for_function("said => document.querySelector('.hs-read').innerText.includes(said)", arg=said)
    box = page.locator(".hs-tokens").bounding_box()
    reach = box["width"] / 2 / 1.32
    middle = box["x"] + box["width"] / 2, box["y"] + box["width"] / 2
    now = page.inner_text(".hs-value")
    page.mouse.move(middle[0] + reach, middle[1])  # the ringed token of the tie
    page.mouse.down()
    page.mouse.move(middle[0] + reach / 4, middle[1] + reach / 4, steps=4)
    page.mouse.up()
    page.wait_for_function("old => document.querySelector('.hs-value').innerText !== old", arg=now)
    assert before != now
    assert not seen.troubles


def test_the_playground_is_folded_reset_and_linked_to(browser, site):
    seen = visitor(browser, site.as_uri() + "/")
    seen.survey("index.html")
    page = seen.page
    assert not page.is_visible(".hs-controls")
    page.click(".hs-more > summary")
    page.wait_for_function("document.querySelector('.hs-wide canvas').width > 100")
    first = page.evaluate("HowSmoothPlayground[0].result.L")
    page.fill(".hs-slider input", "0.5")  # the radius
    page.wait_for_function("first => Math.abs(HowSmoothPlayground[0].result.L - first) > 0.01", arg=first)
    shown, link = page.evaluate("[HowSmoothPlayground[0].result.L, HowSmoothPlayground[0].link.href]")
    page.click(".hs-again button")
    page.wait_for_function("first => HowSmoothPlayground[0].result.L === first", arg=first)
    for address, expected in {link: shown, f"{seen.home}index.html#play=%7B%22points%22:1%7D": first}.items():
        page.goto("about:blank")
        page.goto(address)
        page.wait_for_function("window.HowSmoothPlayground && HowSmoothPlayground[0].result")
        assert page.evaluate("HowSmoothPlayground[0].result.L") == pytest.approx(expected, rel=1e-2)
    assert not seen.troubles


def test_pages_that_explain_carry_the_playground(browser, site):
    seen = visitor(browser, site.as_uri() + "/")
    for name, least in {"idea": 4, "worst-inputs": 1, "meanfield": 1}.items():
        seen.survey(f"explanation/{name}.html")
        assert seen.page.evaluate("HowSmoothPlayground.filter((play) => play.result.L > 0).length") >= least
