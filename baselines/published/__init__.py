"""Figures that others have published: data with a source, claimed and not measured here, part of no ratio of ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from baselines.errors import BaselineError

FOLDER = Path(__file__).parent
Cell = str | int | float | None


class PublishedError(BaselineError):
    """A file of published figures does not follow its schema."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(_Data):
    """Where figures were published; url is None where only the text is at hand."""

    title: Annotated[str, Field(min_length=1)]
    publisher: str | None
    url: str | None
    language: str
    section: str | None = None


class Column(_Data):
    """A column of a table; unit is None for words. Units end in plain names: tok_per_s, us, gb_per_s, n_bytes."""

    name: Annotated[str, Field(min_length=1)]
    unit: str | None = None


class Table(_Data):
    """One table of the source. A value that the source leaves out is null.

    headline: name of the column whose figures stand beside ours, in rows whose first cell is what was measured.
    """

    id: Annotated[str, Field(pattern="^[a-z0-9-]+$")]
    title: Annotated[str, Field(min_length=1)]
    section: Annotated[str, Field(min_length=1)]
    columns: Annotated[list[Column], Field(min_length=2)]
    rows: Annotated[list[list[Cell]], Field(min_length=1)]
    headline: dict[str, str] = Field(default_factory=dict)
    note: str | None = None

    @model_validator(mode="after")
    def _rectangular(self) -> Table:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.id}: a row has {len(row)} cells, expected {len(self.columns)}")
            for cell, column in zip(row, self.columns, strict=True):
                if cell is not None and isinstance(cell, str) != (column.unit is None):
                    raise ValueError(f"table {self.id}, column {column.name}: {cell!r} does not fit its unit")
        unknown = set(self.headline) - {column.name for column in self.columns}
        if unknown:
            raise ValueError(f"table {self.id}: headline {min(unknown)!r} is no column")
        return self


class Published(_Data):
    """All that one source claims."""

    status: Literal["claimed, not measured here"]
    source: Source
    machine: Annotated[str, Field(min_length=1)]
    model: Annotated[str, Field(min_length=1)]
    setting: Annotated[str, Field(min_length=1)]
    tables: Annotated[list[Table], Field(min_length=1)]


@dataclass(frozen=True)
class PublishedRow:
    """One claimed figure; headline ones are shown beside ours."""

    engine: str
    what: str
    value: float
    unit: str
    machine: str
    source: str
    headline: bool


def load_published(path: Path) -> Published:
    """Read and check one file; raises PublishedError naming file, key and what is wrong."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Published.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        raise PublishedError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise PublishedError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None


def all_published() -> list[Published]:
    """Return every file of this folder; raises PublishedError."""
    return [load_published(path) for path in sorted(FOLDER.glob("*.yaml"))]


def published_rows() -> Iterator[PublishedRow]:
    """Yield every claimed figure as a row of its own; in a column with a headline that is the engine's name."""
    for published in all_published():
        for table in published.tables:
            for row in table.rows:
                for column, cell in list(zip(table.columns, row, strict=True))[1:]:
                    if column.unit is not None and isinstance(cell, (int, float)):
                        yield PublishedRow(
                            engine=table.headline.get(column.name, column.name),
                            what=str(row[0]),
                            value=float(cell),
                            unit=column.unit,
                            machine=published.machine,
                            source=published.source.title,
                            headline=column.name in table.headline,
                        )
