"""Write generated sections into pages, between markers, and say which pages are not up to date.

A section stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`; everything else in a page is written by
people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from conformance.errors import ConformanceError
from conformance.publishing import tables
from conformance.publishing.kernels import kernels_table
from conformance.publishing.rows import read_results

PAGES = ("README.md", "docs/results.md", "docs/claimed.md", "docs/kernels.md")
_BEGIN, _END = "<!-- generated: {} -->", "<!-- end of {} -->"
_SECTION = re.compile(r"<!-- generated: ([a-z-]+) -->\n(.*?)<!-- end of \1 -->", re.DOTALL)
_MARKER = re.compile(r"<!-- (?:generated:|end of) [^>]*-->")

Sections = Mapping[str, Callable[[str], str]]


def sections(root: Path) -> Sections:
    """Return what makes each section, given the way from a page's folder to the project's; raises RecordError."""
    results = read_results(root)
    return {
        "measured": lambda depth: tables.measured_table(results, depth),
        "tokens": lambda depth: tables.tokens_table(results, depth),
        "steps": lambda depth: tables.steps_table(results, depth),
        "speed": lambda depth: tables.speed_table(results, depth),
        "comparisons": lambda depth: tables.comparisons_table(results, depth),
        "cold-starts": lambda depth: tables.cold_table(results, depth),
        "missing": lambda depth: tables.missing_list(results),
        "claims": lambda depth: tables.claims_table(),
        "all-claims": lambda depth: tables.all_claims(),
        "kernels": lambda depth: kernels_table(root),
    }


def render(text: str, found: Sections, depth: str) -> str:
    """Return a page with its sections made anew; raises ConformanceError for markers that are none."""
    names = [match[1] for match in _SECTION.finditer(text)]
    if len(_MARKER.findall(text)) != 2 * len(names):
        raise ConformanceError("a marker of a generated section has no partner")
    unknown = sorted(set(names) - set(found))
    if unknown:
        raise ConformanceError(f"there is no generated section {unknown[0]!r}, expected one of: {', '.join(found)}")

    def section(match: re.Match[str]) -> str:
        name = match[1]
        return f"{_BEGIN.format(name)}\n{found[name](depth)}\n{_END.format(name)}"

    return _SECTION.sub(section, text)


def stale_pages(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield every page that is not what the records make of it, and what it should be; raises ConformanceError."""
    found = sections(root)
    for name in PAGES:
        path = root / name
        try:
            text = path.read_text(encoding="utf-8")
            new = render(text, found, "../" * name.count("/"))
        except OSError as error:
            raise ConformanceError(f"{path}: cannot be read: {error.strerror}") from None
        except ConformanceError as error:
            raise ConformanceError(f"{path}: {error}") from None
        if new != text:
            yield path, new
