"""What a comparison found, as a file for results/pydoc: machine, versions, files, and one row a variant."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from conformance.machine import Machine, these_versions, this_machine
from conformance.scenario import Data, Sha256

__all__ = ["FIGURES_FOLDER", "Figures", "verify_figures", "write_figures"]

FIGURES_FOLDER = "pydoc"
_Text = Annotated[str, Field(min_length=1)]


class Figures(Data):
    """The figures of one comparison; files: SHA256 by base name. gpu is None where none took part."""

    date: datetime.date
    gpu: _Text | None
    machine: Machine
    versions: dict[str, Any]
    method: _Text
    files: Annotated[dict[str, Sha256], Field(min_length=1)]
    rows: Annotated[list[dict[str, str | int | float | None]], Field(min_length=1)]


def write_figures(out: Path, method: str, files: Sequence[Path], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `rows` to `out`, with date, machine and versions of this run and the SHA256 of `files`; raises OSError."""
    machine = this_machine()
    found = Figures(
        date=datetime.datetime.now(datetime.timezone.utc).date(),
        gpu=machine.gpu.name if machine.gpu else None,
        machine=machine,
        versions={
            **these_versions().model_dump(mode="json", exclude_none=True),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        method=method,
        files={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        rows=[dict(row) for row in rows],
    )
    out.write_text(json.dumps(found.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")


def verify_figures(data: Any) -> Iterator[str]:
    """Yield what is wrong with the content of a file that `write_figures` wrote."""
    try:
        Figures.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        yield f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
