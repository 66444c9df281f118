"""Measured facts: numbers of experiments that are no records. What their files must say, and the page that cites them.

In docs/measured-facts.md the figures taken from a file stand between `<!-- facts: FILE -->` and `<!-- /facts -->`. What
was computed from several of them stands outside.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from conformance.scenario import Data

FACTS_FOLDER = "facts"
PAGE = Path("docs/measured-facts.md")
Samples = Annotated[list[int | float], Field(min_length=1)]
Row = dict[str, str | bool | int | float | Samples | None]
_Text = Annotated[str, Field(min_length=1)]
_MEASURED = re.compile(r"(?!predicted_)\w*(_us|_ms|_ms_median|_s|resident_n_bytes)")
_BLOCK = re.compile(r"<!-- facts: (\S+) -->\n(.*?)<!-- /facts -->", re.DOTALL)
_MARKER = re.compile(r"<!-- (?:facts:|/facts)")
_CITED = re.compile(r"\]\(\.\./results/facts/([^)#]+)\)")
_FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?: (us|ms|tok/s|MB|GB/s)\b)?(?![\w.]*\d)")
_UNITS = {
    "us": ("_us", 1.0),
    "ms": ("_ms", 1.0),
    "tok/s": ("_tok_per_s", 1.0),
    "MB": ("n_bytes", 1e-6),
    "GB/s": ("gb_per_s", 1.0),
    "": ("", 1.0),
}
"""What the key of a figure with this unit has in it, and the factor from the value to the figure."""


class _Rows(Data):
    rows: Annotated[list[Row], Field(min_length=1)]

    @model_validator(mode="after")
    def _measured(self) -> _Rows:
        for at, row in enumerate(self.rows):
            found = [value for key, value in row.items() if _MEASURED.fullmatch(key) and value is not None]
            if not found:
                raise ValueError(f"row {at} has no time, rate or size that was measured")
        return self


class WithoutKernel(_Rows):
    """Times of a graph without one of its kernels, against full_us, that of the whole."""

    method: _Text
    full_us: float


class Facts(_Rows):
    """The numbers of one experiment, one row a variant; a list in a row has a value for each run.

    gpu is None where none took part; machine then says where it ran. commit: the one measured, or the first that has
    the file; command: what printed the numbers.
    """

    date: datetime.date
    gpu: _Text | None
    machine: _Text | None = None
    driver: _Text | None = None
    cupy: _Text | None = None
    source: _Text
    commit: Annotated[str, Field(pattern="^[0-9a-f]{7,40}$")] | None = None
    command: _Text | None = None
    method: _Text
    prefill: list[Row] = Field(default_factory=list)
    graph_without_kernel: WithoutKernel | None = None

    @model_validator(mode="after")
    def _origin(self) -> Facts:
        if self.commit is None and self.command is None:
            raise ValueError("neither commit nor command says what made it")
        if self.gpu is None and self.machine is None:
            raise ValueError("neither gpu nor machine says where it ran")
        return self


def verify_facts(data: Any) -> Iterator[str]:
    """Yield what is wrong with the content of a file of facts."""
    try:
        Facts.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        yield ": ".join(filter(None, (".".join(map(str, first["loc"])), first["msg"])))


def page_findings(root: Path) -> Iterator[str]:
    """Yield every figure of the page that is not in the file it is said to be from; nothing where there is no page."""
    page = root / PAGE
    if not page.is_file():
        return
    text = page.read_text(encoding="utf-8")
    blocks = _BLOCK.findall(text)
    if len(_MARKER.findall(text)) != 2 * len(blocks):
        yield f"{page}: a marker of facts has no partner"
    for name in sorted({*_CITED.findall(text)} - {name for name, _ in blocks}):
        yield f"{page}: cites {name} and marks no figures as taken from it"
    for name, block in blocks:
        try:
            known = list(_values(json.loads((root / "results" / FACTS_FOLDER / name).read_bytes()), ""))
        except (OSError, ValueError) as error:
            yield f"{page}: {name} cannot be read: {error}"
            continue
        figures = list(_figures(block))
        if not figures:
            yield f"{page}: marks no figures as taken from {name}"
        yield from (
            f"{page}: {figure} {unit}".rstrip() + f" is not in {name}"
            for figure, unit in figures
            if not any(_is_rounded(figure, unit, key, value) for key, value in known)
        )


def _figures(block: str) -> Iterator[tuple[str, str]]:
    """Yield figure and unit of what was measured: numbers with a unit or a decimal point.

    Left out are columns of predictions and cells that name another file as their own source.
    """
    skipped: set[int] = set()
    for line in block.splitlines():
        cells = line.strip("|").split(" | ") if line.startswith("|") else [line]
        predicted = {at for at, cell in enumerate(cells) if cell.strip() == "predicted"}
        skipped = predicted or (skipped if line.startswith("|") else set())
        for at, cell in enumerate(cells):
            if at not in skipped and "](../results/v1/" not in cell:
                yield from ((n, unit) for n, unit in _FIGURE.findall(cell) if unit or "." in n)


def _values(data: Any, key: str) -> Iterator[tuple[str, float]]:
    """Yield every number with its key, and median and mean of every list of them."""
    if isinstance(data, dict):
        for name, value in data.items():
            yield from _values(value, name)
    elif isinstance(data, list):
        numbers = [value for value in data if isinstance(value, (int, float))]
        for value in data:
            yield from _values(value, key)
        if numbers:
            yield from ((key, float(median(numbers))), (key, mean(numbers)))
    elif isinstance(data, (int, float)) and not isinstance(data, bool):
        yield key, float(data)


def _is_rounded(figure: str, unit: str, key: str, value: float) -> bool:
    """Say whether a figure is this value, rounded to the figure's decimals."""
    decimals = len(figure.partition(".")[2])
    part, factor = _UNITS[unit]
    return part in key and abs(float(figure.replace(",", "")) - factor * value) <= 0.5000001 * 10**-decimals
