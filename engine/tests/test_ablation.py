"""How an ablation alternates and what it reports, with runs whose times are known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine.ablation import Ablation, AblationRow, Code, alternate, check_variants, render
from engine.cuda.variants import FULL, Variant, variant
from engine.errors import RequestError
from engine.tests.models import SHAPES, write_model

ROWS = variant("rows")
CODE, FULL_CODE = Code(2000, 3000, False, "a" * 64), Code(1000, 2000, True, "a" * 64)


def measured(sha256: str = "b" * 64, code: Code = CODE) -> tuple[AblationRow, list[str]]:
    order: list[str] = []
    times = {FULL.name: iter([100.0, 102.0, 101.0]), ROWS.name: iter([120.0, 150.0, 119.0])}

    def decode(one: Variant) -> tuple[float, str]:
        order.append(one.name)
        return next(times[one.name]), "b" * 64 if one is FULL else sha256

    done: list[int] = []
    row = alternate(ROWS, code, FULL_CODE, 3, decode, done.append)
    assert done == [1, 1, 1]
    return row, order


def test_runs_alternate_and_take_turns_at_going_first() -> None:
    row, order = measured()
    assert order == ["full", "rows", "rows", "full", "full", "rows"]
    assert (row.full_samples_us, row.samples_us) == ([100.0, 102.0, 101.0], [120.0, 150.0, 119.0])
    assert (row.full_us, row.without_us, row.difference_us, row.same_bits) == (101.0, 120.0, 19.0, True)


def test_other_ids_or_other_logits_are_other_bits() -> None:
    assert not measured(sha256="c" * 64)[0].same_bits
    assert not measured(code=Code(2000, 3000, False, "d" * 64))[0].same_bits


def test_the_table_says_what_a_surgery_brings() -> None:
    same = measured(code=Code(1000, 2000, True, "a" * 64))[0]
    rows = [measured()[0], same, measured(sha256="c" * 64)[0]]
    text = render(Ablation("model.gguf", 512, 70, 128, {"device": "none"}, FULL_CODE, rows))
    assert "70 prompt tokens, 128 steps, medians of 3; PTX of the whole engine 2 kB" in text
    lines = [line.split() for line in text.splitlines() if " rows " in line]
    assert lines[0][:8] == ["2", "rows", "101.0", "120.0", "+19.0", "+18.8%", "3", "same"]
    assert lines[1][7:10] == ["same,", "same", "kernels"]
    assert lines[2][7] == "DIFFERENT"


def test_the_whole_engine_cannot_be_switched_off() -> None:
    for chosen in ([], [FULL], [ROWS, FULL]):
        with pytest.raises(RequestError, match="expected others"):
            check_variants(chosen)
    check_variants([ROWS])


def test_json_has_every_sample() -> None:
    found = Ablation("model.gguf", 512, 70, 128, {"device": "none"}, FULL_CODE, [measured()[0]])
    row = json.loads(json.dumps(found.to_dict()))["rows"][0]
    assert (row["samples_us"], row["code"]["ptx_n_bytes"]) == ([120.0, 150.0, 119.0], 3000)


@pytest.mark.parametrize("command", ["ablation", "opbench", "profile"])
def test_without_a_gpu_a_measurement_says_so_and_ends_with_3(command: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", next(iter(SHAPES.values())), seed=1)
    code = (
        "import engine.cli, engine.generate, engine.opbench, engine.cuda.device as device\n"
        "from engine.errors import NoDeviceError\n"
        "def fails(scheduling='spin'): raise NoDeviceError('there is none')\n"
        "device.open_device = engine.opbench.open_device = fails\n"
        "engine.cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, command, str(path)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr.strip().splitlines()[-1] == "error: not measured: there is none"
