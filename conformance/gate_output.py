"""A judgement in the forms that CI systems show: a JUnit file, annotations and a summary for GitHub Actions."""

from __future__ import annotations

import os
import re
import secrets
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from tabulate import tabulate

from conformance.errors import ConformanceError
from conformance.gate import Finding, Judgement, Outcome

SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
"""Names the file to which GitHub Actions lets a step append Markdown."""
_SUITE = "conformance gate"
_COMMAND = "::{kind} title={title}::{text}"
_PLAIN = "::stop-commands::{token}\n{text}\n::{token}::"
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_VERDICTS = {Outcome.MATCH: "pass", Outcome.MISMATCH: "FAIL", Outcome.NOT_MEASURED: "not measured"}


def junit(judgement: Judgement) -> str:
    """Return JUnit XML with one test case per scenario and engine asked for.

    A mismatch is a failure. What was not measured is an error and not "skipped", which many readers count as good.
    """
    suite = ET.Element("testsuite", name=_SUITE, tests=str(len(judgement.asked)))
    counts = dict.fromkeys(("failures", "errors"), 0)
    for scenario, engine in judgement.asked:
        case = ET.SubElement(suite, "testcase", classname=scenario, name=engine)
        findings = judgement.of(scenario, engine)
        if findings:
            is_failure = min(finding.outcome for finding in findings) is Outcome.MISMATCH
            counts["failures" if is_failure else "errors"] += 1
            texts = [_NOT_IN_XML.sub("?", finding.text) for finding in findings]
            child = ET.SubElement(case, "failure" if is_failure else "error", message=texts[0])
            child.text = "\n".join(texts)
    suite.attrib.update({key: str(count) for key, count in counts.items()})
    return _xml(suite)


def junit_of_error(message: str) -> str:
    """Return JUnit XML that says why nothing could be judged, so that no older file is taken for the answer."""
    suite = ET.Element("testsuite", name=_SUITE, tests="1", failures="0", errors="1")
    case = ET.SubElement(suite, "testcase", classname="gate", name="records")
    ET.SubElement(case, "error", message=_NOT_IN_XML.sub("?", message))
    return _xml(suite)


def write_junit(path: Path, text: str) -> None:
    """Write JUnit XML; raises ConformanceError where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConformanceError(f"--junit: {path}: cannot be written: {error.strerror}") from None


def github_annotations(judgement: Judgement) -> Iterator[str]:
    """Yield a workflow command per finding: an error for a mismatch, a warning for what was not measured."""
    for finding in judgement.findings:
        kind = "error" if finding.outcome is Outcome.MISMATCH else "warning"
        title = f"{finding.scenario}, {finding.engine}: {_VERDICTS[finding.outcome]}"
        yield github_command(kind, title, finding.text)


def github_command(kind: str, title: str, text: str) -> str:
    """Return one workflow command; what would end it early, or begin another, is escaped."""
    return _COMMAND.format(kind=kind, title=_escaped(title, ",:"), text=_escaped(text, ""))


def github_plain(text: str) -> str:
    """Return text in which no line counts as a workflow command, whatever strangers wrote into the records."""
    return _PLAIN.format(token=secrets.token_hex(16), text=text)


def append_summary(judgement: Judgement) -> None:
    """Append the verdicts as a Markdown table to the job's summary, where there is one; raises ConformanceError."""
    name = os.environ.get(SUMMARY_VARIABLE)
    if not name:
        return
    try:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(f"{github_summary(judgement)}\n")
    except OSError as error:
        raise ConformanceError(f"{SUMMARY_VARIABLE}: {name}: cannot be written: {error.strerror}") from None


def github_summary(judgement: Judgement) -> str:
    """Return a Markdown table with one row per scenario and engine asked for."""
    rows = []
    for scenario, engine in judgement.asked:
        findings = judgement.of(scenario, engine)
        outcome = min((finding.outcome for finding in findings), default=Outcome.MATCH)
        rows.append((scenario, engine, _VERDICTS[outcome], _first(findings)))
    headers = ("scenario", "engine", "verdict", "because")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _first(findings: list[Finding]) -> str:
    return findings[0].text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") if findings else ""


def _escaped(text: str, also: str) -> str:
    for char in "%\r\n" + also:
        text = text.replace(char, f"%{ord(char):02X}")
    return text


def _xml(suite: ET.Element) -> str:
    ET.indent(suite)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
