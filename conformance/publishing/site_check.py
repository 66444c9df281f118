"""Check a built site as files: links inside lead somewhere, nothing is fetched from elsewhere, pictures are described.

`python -m conformance.publishing.site_check SITE` prints one line per fault and ends with 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src"}
"""Attributes whose address a browser fetches by itself; of links only those of `_FETCHED_LINKS`."""
_FETCHED_LINKS = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}
_CSS_ADDRESS = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')\s]+)")


@dataclass
class Html(HTMLParser):
    """What a page fetches, links to, and can be linked to at; pictures without a description."""

    fetched: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    undescribed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take note of one element."""
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if values.get(name)}
        address = values.get(_FETCHED.get(tag, ""))
        if tag == "link" and _FETCHED_LINKS & {*values.get("rel", "").split()}:
            address = values.get("href")
        if address:
            self.fetched.append(address)
        elif tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag == "img" and not values.get("alt", "").strip():
            self.undescribed.append(values.get("src", ""))


def faults(site: Path) -> Iterator[str]:
    """Yield what is wrong with the site in a folder, one line each."""
    pages = {path.relative_to(site).as_posix(): _parse(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no page"
    for name, page in pages.items():
        yield from (f"{name}: fetches {address}" for address in page.fetched if _is_elsewhere(address))
        yield from (f"{name}: picture {source} has no description" for source in page.undescribed)
        for address in (*page.links, *page.fetched):
            if not _is_elsewhere(address) and not _exists(address, name, site, pages):
                yield f"{name}: {address} leads nowhere"
    for path in sorted(site.rglob("*.css")):
        for found in _CSS_ADDRESS.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site).as_posix()}: fetches {found}"


def _parse(path: Path) -> Html:
    page = Html()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _is_elsewhere(address: str) -> bool:
    parts = urlsplit(address)
    return bool(parts.netloc) or parts.scheme not in ("", "data")


def _exists(address: str, name: str, site: Path, pages: dict[str, Html]) -> bool:
    parts = urlsplit(address)
    if parts.scheme == "data":
        return True
    folder = site if parts.path.startswith("/") else (site / name).parent
    path = folder / unquote(parts.path).lstrip("/") if parts.path else site / name
    if path.is_dir():
        path = path / "index.html"
    target = path.resolve().relative_to(site.resolve()).as_posix() if _is_inside(path, site) else ""
    if not parts.fragment or target not in pages:
        return bool(target) and path.is_file()
    return unquote(parts.fragment) in pages[target].ids


def _is_inside(path: Path, site: Path) -> bool:
    return path.resolve().is_relative_to(site.resolve())


def main(argv: list[str]) -> int:
    """Check the site in the folder argv[0]."""
    found = list(faults(Path(argv[0])))
    n_pages = len(list(Path(argv[0]).rglob("*.html")))
    print("\n".join([*found, f"{n_pages} pages, {len(found)} faults"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
