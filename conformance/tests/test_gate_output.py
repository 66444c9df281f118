from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from conformance import cli
from conformance.gate import Finding, Judgement, Outcome
from conformance.gate_output import (
    SUMMARY_VARIABLE,
    github_annotations,
    github_command,
    github_plain,
    github_summary,
    junit,
    junit_of_error,
)
from conformance.records import Record, write_record
from conformance.scenario import ScenarioFile

JUDGEMENT = Judgement(
    findings=(
        Finding("a", "engine-x", Outcome.NOT_MEASURED, "there is no record"),
        Finding("a", "engine-x", Outcome.MISMATCH, "finite: found 1\nlimit 0 | <b> \x1b[0m"),
        Finding("a", "engine-y", Outcome.NOT_MEASURED, "there is no record"),
    ),
    asked=(("a", "llama.cpp"), ("a", "engine-x"), ("a", "engine-y")),
)


def test_junit_has_a_case_per_engine_asked_for_and_none_is_skipped() -> None:
    suite = ET.fromstring(junit(JUDGEMENT))
    assert {key: suite.get(key) for key in ("tests", "failures", "errors")} == {
        "tests": "3",
        "failures": "1",
        "errors": "1",
    }
    cases = [(case.get("classname"), case.get("name"), [child.tag for child in case]) for case in suite]
    assert cases == [("a", "llama.cpp", []), ("a", "engine-x", ["failure"]), ("a", "engine-y", ["error"])]
    assert suite[1][0].text == "there is no record\nfinite: found 1\nlimit 0 | <b> ?[0m"


def test_a_gate_that_asks_for_nothing_has_no_cases() -> None:
    assert ET.fromstring(junit(Judgement((), ()))).get("tests") == "0"


def test_junit_of_an_error() -> None:
    suite = ET.fromstring(junit_of_error("r.json: not a record"))
    assert (suite.get("errors"), suite[0][0].get("message")) == ("1", "r.json: not a record")


def test_annotations_are_one_line_each() -> None:
    assert list(github_annotations(JUDGEMENT)) == [
        "::warning title=a%2C engine-x%3A not measured::there is no record",
        "::error title=a%2C engine-x%3A FAIL::finite: found 1%0Alimit 0 | <b> \x1b[0m",
        "::warning title=a%2C engine-y%3A not measured::there is no record",
    ]


def test_what_is_escaped_is_not_escaped_twice() -> None:
    assert github_command("error", "t", "100 %\r\n::x") == "::error title=t::100 %25%0D%0A::x"


def test_text_of_records_is_no_command() -> None:
    first, *text, last = github_plain("::error::oh\n::x").splitlines()
    assert text == ["::error::oh", "::x"]
    assert first == f"::stop-commands::{last.strip(':')}"
    assert len(last) == 36
    assert github_plain("") != github_plain("")


def test_the_summary_has_a_row_per_engine_asked_for() -> None:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in github_summary(JUDGEMENT).splitlines()[2:]]
    assert [row[2] for row in rows] == ["pass", "FAIL", "not measured"]
    assert "|" not in rows[0][3].rstrip("| ")


def _gate(*argv: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["gate", *map(str, argv)])


@pytest.fixture
def only_short(short: ScenarioFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "select_scenarios", lambda names: [short])


@pytest.mark.usefixtures("only_short")
def test_the_gate_writes_all_three(records: list[Record], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUMMARY_VARIABLE, str(tmp_path / "summary.md"))
    for record in records:
        write_record(record, tmp_path / "r")
    (tmp_path / "r" / "short" / "engine-numpy.json").unlink()
    result = _gate(tmp_path / "r", "--junit", tmp_path / "j.xml", "--github")
    assert result.exit_code == 2
    assert result.output.startswith("::stop-commands::")
    assert "::\n::warning title=short%2C engine-numpy%3A not measured::there is no record\n" in result.output
    suite = ET.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("7", "0", "1")
    assert "| short" in (tmp_path / "summary.md").read_text()


@pytest.mark.usefixtures("only_short")
def test_records_that_cannot_be_read_are_said_everywhere(tmp_path: Path) -> None:
    (tmp_path / "r" / "short").mkdir(parents=True)
    (tmp_path / "r" / "short" / "x.json").write_text("{")
    result = _gate(tmp_path / "r", "--junit", tmp_path / "j.xml", "--github")
    assert result.exit_code == 3
    assert result.output.startswith("::error title=records cannot be judged::")
    assert ET.parse(tmp_path / "j.xml").getroot().get("errors") == "1"


@pytest.mark.usefixtures("only_short")
def test_a_junit_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = _gate(tmp_path, "--junit", tmp_path / "none" / "j.xml")
    assert result.exit_code == 3
    assert result.output.count("\n") == 1
    assert "--junit: " in result.output
