"""Tables in README and docs are what the records make of them, and no figure comes from two machines."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from baselines.published import all_published
from conformance import cli
from conformance.bench.records import BenchRecord
from conformance.errors import ConformanceError
from conformance.publishing import tables
from conformance.publishing.kernels import FOLDER, kernels_table, parse_header
from conformance.publishing.pages import PAGES, render, sections, stale_pages
from conformance.publishing.rows import BenchRow, Results, machine_name, read_results

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def results() -> Results:
    return read_results(ROOT)


def test_readme_and_docs_are_up_to_date() -> None:
    assert [str(path) for path, _ in stale_pages(ROOT)] == [], "run `nox -s report`"


def copy_of_project(folder: Path) -> Path:
    for name in ("results", "docs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copytree(ROOT / FOLDER, folder / FOLDER)
    shutil.copy(ROOT / "README.md", folder)
    return folder


def test_report_writes_once_and_check_finds_a_changed_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copy_of_project(tmp_path))
    page = tmp_path / "docs" / "results.md"
    before = page.read_text()
    assert before.count("0.2137") > 1
    page.write_text(before.replace("0.2137", "0.2138"))
    checked = CliRunner().invoke(cli.app, ["report", "--check"])
    assert (checked.exit_code, checked.output) == (1, "docs/results.md: not up to date, run `nox -s report`\n")
    written = CliRunner().invoke(cli.app, ["report"])
    assert (written.exit_code, written.output) == (0, "docs/results.md: written\n")
    assert page.read_text() == before
    assert CliRunner().invoke(cli.app, ["report"]).output == ""


def test_a_new_record_replaces_an_older_one_of_its_machine(tmp_path: Path) -> None:
    copy_of_project(tmp_path)
    old = next((tmp_path / "results" / "v1").glob("xeon*/tiny-c512/engine-numpy.json"))
    values = json.loads(old.read_text()) | {"time_utc": "2027-01-01T00:00:00Z"}
    values["output"]["smallest_top2_gap"] = 0.1234
    new = tmp_path / "results" / "v1" / "later" / "tiny-c512" / "engine-numpy.json"
    new.parent.mkdir(parents=True)
    new.write_text(json.dumps(values))
    paths = [row.path for row in read_results(tmp_path).rows]
    assert "results/v1/later/tiny-c512/engine-numpy.json" in paths
    assert old.relative_to(tmp_path).as_posix() not in paths
    assert "0.1234" in dict(stale_pages(tmp_path))[tmp_path / "docs" / "results.md"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- generated: tokens -->", "has no partner"),
        ("<!-- generated: tokens -->\n<!-- end of steps -->", "has no partner"),
        ("<!-- generated: other -->\n<!-- end of other -->", "no generated section 'other', expected one of: tokens"),
    ],
)
def test_markers_that_are_none(text: str, says: str) -> None:
    with pytest.raises(ConformanceError, match=says):
        render(text, {"tokens": lambda depth: "x"}, "")


def test_a_section_is_replaced_and_the_rest_is_left_alone() -> None:
    page = "a\n<!-- generated: tokens -->\nold\n<!-- end of tokens -->\nb \\1\n"
    found = {"tokens": lambda depth: f"\\1 new {depth}"}
    once = render(page, found, "../")
    assert once == "a\n<!-- generated: tokens -->\n\\1 new ../\n<!-- end of tokens -->\nb \\1\n"
    assert render(once, found, "../") == once


def test_a_page_that_is_missing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "engine" / "cuda" / "kernels").mkdir(parents=True)
    with pytest.raises(ConformanceError, match=r"README\.md: cannot be read: No such file"):
        list(stale_pages(tmp_path))


def every_cell(text: str) -> list[list[str]]:
    """Return the cells of tables, each row with the machine above its table in front."""
    rows: list[list[str]] = []
    machine, header = "", True
    for line in text.splitlines():
        if line.startswith("**"):
            machine, header = line.strip("*"), True
        elif line.startswith("|") and not header:
            rows.append([machine, *(cell.strip() for cell in line.strip("|").split(" | "))])
        elif line.startswith("|--"):
            header = False
    return rows


def test_ratios_are_those_of_single_records(results: Results) -> None:
    """What stands in the ratio column is in the very record that the row links to, and on its machine."""
    rows = every_cell(tables.comparisons_table(results, ""))
    assert len(rows) == sum(len(row.record.comparisons) for row in results.bench) > 10
    for cells in rows:
        path = re.findall(r"\((.+)\)", cells[1])[-1]
        record = BenchRecord.model_validate_json((ROOT / path).read_text())
        assert cells[0] == machine_name(record.machine)
        assert cells[5] in {f"{found.ratio:.3f}" for found in record.comparisons if found.ratio}


def test_rows_of_two_machines_are_never_set_against_each_other(results: Results) -> None:
    """With a second machine a thousand times as fast, each table is that of one machine, and none changes."""
    first = results.bench[0]
    machine = first.record.machine.model_copy(update={"cpu": "Other"})
    figures = [f.model_copy(update={"tok_per_s": f.tok_per_s * 1000}) for f in first.record.figures]
    record = first.record.model_copy(update={"machine": machine, "figures": figures})
    both = Results(results.rows, [*results.bench, BenchRow(record, first.path)], results.ops)
    for make in (tables.measured_table, tables.comparisons_table, tables.speed_table, tables.cold_table):
        alone, beside = make(results, ""), make(both, "")
        assert beside.startswith(f"{alone}\n\n**Other, 2 cores, no GPU**\n\n|")
        others = [cells for cells in every_cell(beside) if cells[0] == "Other, 2 cores, no GPU"]
        assert others
        assert len(others) + len(every_cell(alone)) == len(every_cell(beside))
    here, there = every_cell(tables.measured_table(results, "")), every_cell(tables.measured_table(both, ""))
    assert [cells[6:] for cells in there[len(here) :]] == [cells[6:] for cells in here[: len(there) - len(here)]]


def test_no_page_has_a_ratio_with_a_claim(results: Results) -> None:
    claims = tables.claims_table()
    assert claims.count("claimed, not measured here") == 1
    assert "llama.cpp b8763" in claims
    assert "NVIDIA GeForce RTX 5060 Ti" in claims
    text = tables.all_claims()
    assert text.count("**Claimed, not measured here.**") == len(all_published()) == 3
    assert "| 25.14 |" in text
    assert "| NVIDIA GeForce RTX 5060 Ti 16GB | Q4-XYZ-v2, 15.06 GB | 32K, q4_0 | b10472 | 26.3 |" in text


def test_a_failed_check_is_no_pass(results: Results) -> None:
    record = next(row.record for row in results.rows if row.record.checks)
    assert tables.verdict(record) == "pass"
    failed = record.checks[0].model_copy(update={"passed": False})
    unknown = record.checks[0].model_copy(update={"passed": None})
    assert tables.verdict(record.model_copy(update={"checks": [failed]})) == "FAIL"
    assert tables.verdict(record.model_copy(update={"checks": [unknown]})) == "not measured"
    assert tables.verdict(record.model_copy(update={"status": "crashed"})) == "FAIL"


def test_what_is_not_measured_is_said(results: Results) -> None:
    nothing = Results([], [], [])
    assert tables.speed_table(nothing, "") == "Not measured."
    lines = tables.missing_list(nothing).splitlines()
    assert "- Not measured: 27b-c512 on the cuda backend, speed (bench)." in lines
    assert "- Not measured: pydoc-with-c512 on the cuda backend, tokens and logits." in lines
    assert "- Not measured: pydoc-with-c512 on the cuda backend, speed (bench)." not in lines
    assert "- Not measured: bandwidth by op against the ceiling: of the CUDA backend no record is published." in lines
    here = tables.missing_list(results)
    assert "tiny-c512 on the numpy backend" not in here


def test_every_kernel_has_a_row_and_every_page_a_section() -> None:
    names = {path.name for path in (ROOT / FOLDER).glob("*.cu")}
    assert len(names) > 12
    assert {cells[1].split("]")[0].strip("[") for cells in every_cell(kernels_table(ROOT))} == names
    used: set[str] = set()
    for page in PAGES:
        used |= set(re.findall(r"<!-- generated: ([a-z-]+) -->", (ROOT / page).read_text()))
    assert used == set(sections(ROOT))


def test_a_header_is_read_with_its_continued_lines(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_text("// k: adds:\n// x (n) f32\n// bytes   4 * n\n//   and more\n// launch grid (1)\n\n// bytes no\n")
    kernel = parse_header(path)
    assert (kernel.name, kernel.computes) == ("k", "adds")
    assert kernel.fields == {"bytes": "4 * n and more", "launch": "grid (1)"}
    path.write_text("int x;\n")
    with pytest.raises(ConformanceError, match="expected a first line"):
        parse_header(path)


def changed(values: dict[str, Any], **changes: Any) -> str:
    return json.dumps(values | changes)


@pytest.mark.parametrize("change", [{"kind": "other"}, {"schema_version": 2}, {"figures": 1}])
def test_a_record_that_cannot_be_read_ends_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.chdir(copy_of_project(tmp_path))
    path = sorted((tmp_path / "results" / "bench-v1").glob("*/tiny-c512/*.json"))[0]
    path.write_text(changed(json.loads(path.read_text()), **change))
    result = CliRunner().invoke(cli.app, ["report"])
    assert (result.exit_code, result.output.count("\n")) == (3, 1)
    assert path.name in result.output
