"""What a comparison found, as a file for results/pydoc: machine, versions, files, and one row a variant."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conformance.machine import these_versions, this_machine

__all__ = ["write_figures"]


def write_figures(out: Path, method: str, files: Sequence[Path], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `rows` to `out`, with date, machine and versions of this run and the SHA256 of `files`; raises OSError."""
    machine = this_machine()
    found = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "gpu": machine.gpu.name if machine.gpu else None,
        "machine": machine.model_dump(mode="json"),
        "versions": {
            **these_versions().model_dump(mode="json", exclude_none=True),
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "method": method,
        "files": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files},
        "rows": list(rows),
    }
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
