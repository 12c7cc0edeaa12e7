"""What every page stands in: one HTML file that fetches nothing and works from any folder.

All data goes in as one JSON block that the page's own script reads; text reaches the document through `textContent` or escaped
in Python. A content security policy names that one script by its hash and allows no request at all.
"""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from howsmooth.errors import ResultsError
from howsmooth.run import writing

_THEME = '<button type="button" id="theme">light / dark</button>'
_PLAIN = '<noscript><p class="finding">The charts need JavaScript; the answer above does not.</p></noscript>'


def whole_page(
    main: str,
    *,
    title: str,
    answer: Sequence[str],
    description: str,
    version: str,
    name: str | None = None,
    meta: str = "",
    below: str = "",
    command: str = "",
    style: str = "",
    script: str = "",
    data: Any = None,
) -> str:
    """A whole page as text. `main`, `answer` and `below` are HTML; all other text is escaped here.

    main: its sections.  title: its heading.  answer: the sentences at its head.  description: for those who list pages.
    version: of the software.  name: of the window, the title by default.  meta: a line under the title.
    below: what follows the answer.  command: that made it, for the footer.  style: rules of its own.
    script: its own, behind that of all charts; without one its charts are images.  data: what the script reads.
    """
    script = asset("charts.js") + script if script else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}'" if script else "img-src data:"
    block = f'<script type="application/json" id="data">{embed(data)}</script>\n<script>{script}</script>'
    return Template(asset("shell.html")).substitute(
        policy=f"default-src 'none'; {allowed}; style-src 'unsafe-inline'; base-uri 'none'",
        description=escape(description),
        name=escape(title if name is None else name),
        style=asset("page.css") + style,
        title=escape(title),
        top="\n".join(filter(None, [f'<p class="meta">{escape(meta)}</p>' if meta else "", _THEME if script else ""])),
        answer="".join(f"<p>{sentence}</p>" for sentence in answer),
        below=below,
        main=f"{_PLAIN}\n{main}" if script else main,
        footer=f"Made by howsmooth {escape(version)}{f' with <code>{escape(command)}</code>' if command else ''}.",
        scripts=block if script else "",
    )


def asset(name: str, room: str = "report") -> str:
    """A file that pages are made of: shell.html, page.css, charts.js, or what a page of that room has of its own."""
    return resources.files(f"howsmooth.{room}").joinpath("assets", name).read_text("utf-8")


def embed(value: Any) -> str:
    """JSON that no parser can leave: pure ASCII, without `<`, `>` or `&`.

    >>> embed("</script>\\u2028")
    '"\\\\u003c/script\\\\u003e\\\\u2028"'
    """
    text = json.dumps(finite(value, digits=6), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def finite(value: Any, digits: int = 17) -> Any:
    """What is not finite has no JSON and becomes None. digits: of floats; 17 leave them as they are."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v, digits) for k, v in value.items()}
    return [finite(v, digits) for v in value] if isinstance(value, list | tuple) else value


def check_page(page: Path, force: bool) -> None:
    """Refuse a page that would take the place of a file, before any work."""
    if page.exists() and not force:
        raise ResultsError(f"expected a new file, got {page}, which exists; pass force=True (--force) to overwrite it")


def save(text: str, page: Path) -> Path:
    """Write a page, whole or not at all."""
    with writing(page, parents=True) as part:
        part.write_bytes(encoded(text))
    return page


def encoded(text: str) -> bytes:
    """As it is written; what is no character becomes a question mark."""
    return text.encode("utf-8", "replace")
