"""Draw the README's picture of the page, light and dark, from a report: `python docs/tools/pictures.py demo-report/index.html`.

Needs playwright and Chromium, as the tests of the page do.
"""

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "img"
# the answer, and the charts of layers and of growth beside each other
LAYOUT = """
body, main, header { max-width: none !important; }
body { padding: 0 30px !important; }
header button, #contents, .finding, .answer p:nth-child(n+3), footer { display: none !important; }
section, section > p, section > h2, .controls, #fit-table, #residual-chart { display: none !important; }
header { margin-top: 26px !important; padding-top: 0 !important; }
.answer p { font-size: 21px !important; max-width: none !important; }
#heat, #growth { display: block !important; width: 49%; float: left; }
#heat, #growth { border: 0 !important; margin: 10px 0 0 !important; padding: 0 !important; }
#growth { float: right; }
"""
FOOT = "Math.max(...[...document.querySelectorAll('#heat, #growth')].map((s) => s.getBoundingClientRect().bottom))"
WIDTH = 1240


def draw(page: Path) -> None:
    """Two pictures of the head of a report."""
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            tab = browser.new_page(viewport={"width": WIDTH, "height": 700}, color_scheme=scheme, device_scale_factor=1.25)
            tab.goto(page.resolve().as_uri())
            tab.add_style_tag(content=LAYOUT)
            tab.evaluate("dispatchEvent(new Event('resize'))")
            tab.wait_for_timeout(400)  # charts are drawn again once the window has come to rest
            picture, height = IMAGES / f"page-{scheme}.png", float(tab.evaluate(FOOT)) + 14
            tab.screenshot(path=picture, full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height})
            Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
