"""Facts have a form, and the page says what is in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conformance import cli
from conformance.bench.verify import verify_paths
from conformance.facts import PAGE, page_findings, verify_facts

ROOT = Path(__file__).resolve().parents[2]
FACTS = ROOT / "results" / "facts"
RIGHT: dict[str, Any] = {
    "date": "2026-11-30",
    "gpu": "NVIDIA H200",
    "source": "copied",
    "commit": "404712b",
    "method": "median",
    "rows": [{"variant": "a", "time_us": 163.75, "n_bytes": 17_694_720, "step_time_ms": [8.2, 8.4, 8.3]}],
}


def test_published_facts_and_the_page_agree() -> None:
    assert list(page_findings(ROOT)) == []
    found, n_rows = verify_paths([FACTS])
    assert (found, n_rows) == ([], len(list(FACTS.glob("*.json"))))
    assert n_rows >= 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"date": "yesterday"}, "date: Input should be a valid date"),
        ({"gpu": None}, "neither gpu nor machine says where it ran"),
        ({"commit": None}, "neither commit nor command says what made it"),
        ({"commit": "main"}, "commit: String should match pattern"),
        ({"source": ""}, "source: String should have at least 1 character"),
        ({"rows": []}, "rows: List should have at least 1 item"),
        ({"rows": [{"variant": "a", "predicted_step_time_ms": 1.0, "n_bytes": 3}]}, "row 0 has no time, rate or size"),
        ({"rows": [{"step_time_ms": []}]}, "rows.0.step_time_ms"),
        ({"rows": [{"time_us": None}]}, "row 0 has no time, rate or size"),
        ({"extra": 1}, "extra: Extra inputs are not permitted"),
    ],
)
def test_what_is_no_file_of_facts(change: dict[str, Any], says: str) -> None:
    assert list(verify_facts(RIGHT)) == []
    (found,) = verify_facts(RIGHT | change)
    assert says in found


def project(folder: Path, block: str) -> Path:
    """Make a project with one file of facts and a page with this block."""
    (folder / "results" / "facts").mkdir(parents=True)
    (folder / "results" / "facts" / "a.json").write_text(json.dumps(RIGHT))
    (folder / PAGE).parent.mkdir()
    (folder / PAGE).write_text(f"# Facts\n\n[rows](../results/facts/a.json)\n\n{block}\n")
    return folder


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("164 us", []),
        ("163.8 us", []),
        ("163.75", []),
        ("163.6 us", ["163.6 us"]),
        ("165 us", ["165 us"]),
        ("164 ms", ["164 ms"]),
        ("8.30 ms, median and mean of 8.2 to 8.4 ms", []),
        ("8.25 ms", ["8.25 ms"]),
        ("17.7 MB in 16 MiB, 4 blocks", []),
        ("17.8 MB", ["17.8 MB"]),
        ("4502 GB/s", ["4502 GB/s"]),
        ("164 us became 8.21", ["8.21"]),
        ("163.75, and 9.99 ms of [row](../results/v1/x.json)", None),
        ("| what | predicted | measured |\n| --- | --- | --- |\n| a | 5.5 ms | 8.3 ms |", []),
        ("| what | predicted | measured |\n| --- | --- | --- |\n| a | 5.5 ms | 5.6 ms |", ["5.6 ms"]),
        ("| a | 8.3 ms | 9.99 ms ([row](../results/v1/x.json)) |", []),
    ],
)
def test_each_figure_is_looked_up(tmp_path: Path, line: str, missing: list[str] | None) -> None:
    root = project(tmp_path, f"<!-- facts: a.json -->\n{line}\n<!-- /facts -->")
    page = root / PAGE
    if missing is None:  # a line of prose that names another source has no figure of this file
        assert list(page_findings(root)) == [f"{page}: marks no figures as taken from a.json"]
    else:
        assert list(page_findings(root)) == [f"{page}: {figure} is not in a.json" for figure in missing]


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ("no marker", "cites a.json and marks no figures as taken from it"),
        ("<!-- facts: a.json -->\nnothing\n<!-- /facts -->", "marks no figures as taken from a.json"),
        ("<!-- facts: a.json -->\n164 us", "a marker of facts has no partner"),
        ("<!-- facts: b.json -->\n164 us\n<!-- /facts -->", "b.json cannot be read"),
    ],
)
def test_a_page_that_marks_nothing_is_found(tmp_path: Path, block: str, says: str) -> None:
    assert any(says in found for found in page_findings(project(tmp_path, block)))


def test_verify_ends_with_1_for_a_changed_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("results/facts", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    n_rows = len(list((tmp_path / "results" / "facts").glob("*.json")))
    right = CliRunner().invoke(cli.app, ["verify"])
    assert (right.exit_code, right.output.splitlines()[-1]) == (0, f"{n_rows} rows verified, 0 findings")
    page = tmp_path / PAGE
    page.write_text(page.read_text().replace("5.45 to 5.49 ms", "5.35 to 5.49 ms"))
    wrong = CliRunner().invoke(cli.app, ["verify"])
    says = f"FAIL: {PAGE}: 5.35 is not in 2026-11-30-h200-streams.json\n{n_rows} rows verified, 1 findings\n"
    assert (wrong.exit_code, wrong.output) == (1, says)
