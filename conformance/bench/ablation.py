"""Records of an ablation: decoding on the GPU with one surgery after the other switched off, sealed and verified."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Field, ValidationError

from conformance.bench.records import SCHEMA_VERSION, broken_seals, write_sealed
from conformance.machine import Machine, Versions, these_versions, this_machine
from conformance.records import ModelIdentity
from conformance.scenario import Data
from engine.ablation import Ablation


class AblationRecord(Data):
    """One ablation with every sample; digests as in a bench record."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    kind: Literal["ablation"] = "ablation"
    run_id: str
    time_utc: AwareDatetime
    versions: Versions
    machine: Machine
    model: ModelIdentity
    ablation: Ablation
    digests: dict[str, str] = Field(default_factory=dict)


def make_ablation_record(ablation: Ablation, model: ModelIdentity) -> AblationRecord:
    """Return the record of a measurement that was just made on this machine."""
    return AblationRecord(
        run_id=str(uuid.uuid4()),
        time_utc=datetime.now(timezone.utc),
        versions=these_versions(),
        machine=this_machine(),
        model=model,
        ablation=ablation,
    )


def write_ablation_record(record: AblationRecord, folder: Path) -> Path:
    """Seal and write `record` below `folder`; return its path. Raises RecordError."""
    return write_sealed(record.model_dump(mode="json"), record.machine, folder, "ablation", f"cuda-{record.run_id}")


def verify_ablation(data: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the content of an ablation record."""
    yield from broken_seals(data)
    try:
        record = AblationRecord.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors()[0]
        yield f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        return
    for index, row in enumerate(record.ablation.rows):
        full_us, without_us = median(row.full_samples_us), median(row.samples_us)
        derived = {"full_us": full_us, "without_us": without_us, "difference_us": without_us - full_us}
        for key, value in derived.items():
            if getattr(row, key) != value:
                where = f"record.ablation.rows[{index}].{key}"
                yield f"{where}: {getattr(row, key)} in the row, {value} from its samples"
