"""One row per CUDA kernel, from the comment that each .cu file begins with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from conformance.errors import ConformanceError
from conformance.publishing.tables import markdown

FOLDER = Path("engine/cuda/kernels")
_FIRST = re.compile(r"(\w+): (.+)")
_FIELD = re.compile(r"(bytes|launch|numerics|order|faults|races|tuned)\s+(.+)")


@dataclass(frozen=True)
class Kernel:
    """What a file says of itself: its name, what it computes, and its fields by name."""

    name: str
    computes: str
    fields: dict[str, str]


def parse_header(path: Path) -> Kernel:
    """Read the comment at the beginning of a kernel's file; raises ConformanceError where there is none."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("//"):
            break
        lines.append(line[2:].strip())
    first = _FIRST.fullmatch(lines[0]) if lines else None
    if first is None:
        raise ConformanceError(f"{path}: expected a first line `// NAME: WHAT IT COMPUTES`")
    fields: dict[str, str] = {}
    current = ""
    for line in lines[1:]:
        found = _FIELD.fullmatch(line)
        if found:
            current = found[1]
            fields[current] = found[2]
        elif current:
            fields[current] += f" {line}"
    return Kernel(first[1], first[2].rstrip(":"), fields)


def kernels_table(root: Path) -> str:
    """Return one row per .cu file, with links to them."""
    rows = []
    for path in sorted((root / FOLDER).glob("*.cu")):
        kernel = parse_header(path)
        fields = (kernel.fields.get(name, "see the file") for name in ("bytes", "launch", "numerics"))
        rows.append((f"[{path.name}](../{FOLDER.as_posix()}/{path.name})", kernel.computes, *fields))
    headers = ("kernel", "computes", "bytes", "launch", "numerics")
    return markdown([[_plain(cell) for cell in row] for row in rows], headers)


def _plain(text: str) -> str:
    """Keep signs of multiplication and placeholders from being read as Markdown."""
    return text.replace("*", "\\*").replace("<", "&lt;")
