"""Draw the README's picture of the page, light and dark, from a report: `python docs/tools/pictures.py demo-report/index.html`.

Needs playwright and Chromium, as the tests of the page do.
"""

import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parents[1] / "img"
# the verdict and the table of layers
LAYOUT = """
body { padding: 0 30px !important; }
header button, #contents { display: none !important; }
header { margin-top: 20px !important; padding-top: 0 !important; }
"""
FOOT = "document.querySelector('#layers').getBoundingClientRect().bottom"
WIDTH = 1060


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
            Image.open(picture).convert("RGB").quantize(256).save(picture, optimize=True)
        browser.close()


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
