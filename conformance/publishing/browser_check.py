"""Look at a built site in a headless Chromium: errors, requests to elsewhere, pages wider than a phone, pictures.

`python -m conformance.publishing.browser_check SITE` needs the extra `browser` and a Chromium: the one that CHROMIUM
names, else one on the PATH. Exit code: 0 nothing found, 1 a fault, 3 there is no browser.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BROWSER_VARIABLE = "CHROMIUM"
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_WIDTHS = (390, 1280)
_SMALLEST_PX = 10.0
_MEASURE = f"""() => {{
  const faults = [], wide = document.scrollingElement.scrollWidth;
  if (wide > window.innerWidth) faults.push(`is ${{wide}} px wide in a window of ${{window.innerWidth}}`);
  for (const img of document.querySelectorAll("article img")) {{
    if (!img.alt.trim()) faults.push(`picture ${{img.src}} has no description`);
    if (!img.complete || !img.naturalWidth) faults.push(`picture ${{img.src}} does not load`);
  }}
  for (const table of document.querySelectorAll("article table")) {{
    const box = table.closest(".md-typeset__scrollwrap");
    const cell = table.querySelector("td");
    if (!box && table.scrollWidth > window.innerWidth) faults.push("a table is too wide and does not scroll");
    if (cell && parseFloat(getComputedStyle(cell).fontSize) < {_SMALLEST_PX}) faults.push("a table has letters below "
      + "{_SMALLEST_PX} px");
  }}
  return faults;
}}"""


def main(argv: list[str]) -> int:
    """Check the site in the folder argv[0]."""
    site = Path(argv[0])
    program = os.environ.get(BROWSER_VARIABLE) or next(filter(None, map(shutil.which, _PROGRAMS)), None)
    if program is None:
        print(f"not measured: no Chromium, expected one of {', '.join(_PROGRAMS)} on the PATH or ${BROWSER_VARIABLE}")
        return 3
    names = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    with _served(site) as address:
        found = list(_look(program, address, names))
    print("\n".join([*found, f"{len(names)} pages at {len(_WIDTHS)} widths, {len(found)} faults"]))
    return 1 if found or not names else 0


@contextmanager
def _served(site: Path) -> Iterator[str]:
    """Serve a folder to this machine while the block runs."""
    handler = partial(_Quiet, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _look(program: str, address: str, names: list[str]) -> Iterator[str]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for width in _WIDTHS:
            context = browser.new_context(viewport={"width": width, "height": 844})
            for name in names:
                yield from (f"{name} at {width} px: {fault}" for fault in _look_at(context, address, name))
            context.close()
        browser.close()


def _look_at(context: Any, address: str, name: str) -> list[str]:
    """Return what is wrong with one page."""
    faults: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("requestfailed", lambda request: faults.append(f"{request.url} cannot be loaded"))
    page.on("request", lambda request: None if _is_here(request.url, address) else faults.append(f"asks {request.url}"))
    response = page.goto(f"{address}/{name}", wait_until="networkidle")
    if response is None or not response.ok:
        faults.append("does not load")
    faults += page.evaluate(_MEASURE)
    page.close()
    return faults


def _is_here(url: str, address: str) -> bool:
    return url.startswith((f"{address}/", "data:", "blob:"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
