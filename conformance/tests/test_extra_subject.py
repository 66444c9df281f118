"""Other engines as subjects: a program and a server that only pretend, and every way in which they can go wrong."""

from __future__ import annotations

import re
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conformance import cli
from conformance.bench.verify import verify_record
from conformance.command_line import known_subjects
from conformance.errors import ConformanceError, ScenarioError
from conformance.extra_subject import ExtraResult, run_extra_subject
from conformance.gate import Outcome, judge
from conformance.http_json import is_loopback
from conformance.records import Record, read_records, write_record
from conformance.report import render
from conformance.runner import Runner
from conformance.scenario import ScenarioFile, load_scenario
from conformance.tests.fake_subject import FakeServer, serve
from conformance.tests.fakes import N_PREDICT, N_PROMPT, FakeLlama, Silent, run_here, write_scenario

PROGRAM = Path(__file__).parent / "fake_subject.py"


def with_subject(short: ScenarioFile, tmp_path: Path, spec: dict[str, Any], **changes: Any) -> ScenarioFile:
    """Return the short scenario with another engine and without controls."""
    values = short.scenario.model_dump(mode="json") | {"controls": False, "subjects": [spec]} | changes
    values["model"]["file"] = str(short.path.parent / "tiny.gguf")
    return load_scenario(write_scenario(tmp_path / "short.yaml", values))


def command(ids: list[int], fault: str = "") -> dict[str, Any]:
    return {"name": "fake", "api": "command", "command": [sys.executable, str(PROGRAM), ",".join(map(str, ids)), fault]}


@pytest.fixture
def right_ids(records: list[Record]) -> list[int]:
    output = next(record.output for record in records if record.engine == "engine-numpy")
    assert output is not None
    return output.generated_token_ids


def run(file: ScenarioFile, out: Path, url: str | None = None) -> list[Record]:
    return Runner(FakeLlama().open, out, Silent(), subject=run_here, extra={"fake": url}).run([file])


def subject_of(records: list[Record]) -> Record:
    return next(record for record in records if record.role == "subject")


def test_the_right_ids_of_a_command_pass(short: ScenarioFile, tmp_path: Path, right_ids: list[int]) -> None:
    file = with_subject(short, tmp_path, command(right_ids))
    records = run(file, tmp_path / "r")
    record = subject_of(records)
    assert (record.engine, record.status, record.reason) == ("subject-fake", "ok", None)
    assert [check.name for check in record.checks if check.passed] == [
        "second_run_token_ids_equal",
        "final_greedy_token_id",
        "generated_token_ids_le64_sha256",
        "generated_token_ids_equal llama.cpp",
    ]
    assert len(record.checks) == 4
    assert [(t.server_prompt_time_ns, t.server_generation_time_ns) for t in record.request_times] == [(7, 9)] * 2
    assert all(times.client_wall_time_ns > 0 for times in record.request_times)
    assert record.requested["api"] == "command"
    assert str(PROGRAM.parent) not in record.model_dump_json()
    judgement = judge(records, [file], ["numpy"], subjects=["fake"])
    assert judgement.outcome is Outcome.MATCH
    assert ("short", "subject-fake") in judgement.asked
    assert re.search(r"subject-fake +4/4 +\w{12} +- +- +pass", render(records, [file], judgement))
    assert list(verify_record(record, {file.version: file.scenario})) == []
    assert read_records(tmp_path / "r") == sorted(records, key=lambda r: r.engine)


def test_a_wrong_id_fails_with_the_margin_there(short: ScenarioFile, tmp_path: Path, right_ids: list[int]) -> None:
    wrong = [*right_ids[:2], right_ids[2] + 1, right_ids[3]]
    records = run(with_subject(short, tmp_path, command(wrong)), tmp_path / "r")
    record = subject_of(records)
    assert record.comparison is not None
    assert record.comparison.first_difference is not None
    assert record.comparison.first_difference.position == 2
    assert record.comparison.first_difference.top2_gap is None
    assert record.comparison.first_difference.gap_under_margin is False
    judgement = judge(records, [load_scenario(tmp_path / "short.yaml")], ["numpy"], subjects=["fake"])
    assert judgement.outcome is Outcome.MISMATCH
    assert {finding.engine for finding in judgement.findings} == {"subject-fake"}


@pytest.mark.parametrize(
    ("fault", "status", "says"),
    [
        ("crash", "failed", "ended with exit code 1: no such kernel"),
        ("text", "failed", "answered 'hello', expected one line of JSON"),
        ("list", "failed", "expected an object"),
        ("hang", "timeout", "no answer after 1 s"),
    ],
)
def test_what_a_command_can_do_wrong(
    short: ScenarioFile, tmp_path: Path, right_ids: list[int], fault: str, status: str, says: str
) -> None:
    deadline_s = 1.0 if fault == "hang" else 30.0
    file = with_subject(short, tmp_path, command(right_ids, fault), deadline_s=deadline_s)
    found = run_extra_subject(file.scenario.subjects[0], None, file, Path("tiny.gguf"))
    assert (found.status, found.answers) == (status, [])
    assert says in str(found.reason)


def test_an_engine_that_answers_in_two_ways_fails(short: ScenarioFile, tmp_path: Path, right_ids: list[int]) -> None:
    record = subject_of(run(with_subject(short, tmp_path, command(right_ids, "unsteady")), tmp_path / "r"))
    assert [check.name for check in record.checks if not check.passed] == ["second_run_token_ids_equal"]
    assert record.checks[0].detail == f"position 3: id {right_ids[3]} first, {right_ids[3] + 1} then"


def test_too_few_ids_and_a_missing_program(short: ScenarioFile, tmp_path: Path, right_ids: list[int]) -> None:
    few = with_subject(short, tmp_path, command(right_ids[:3]))
    assert ask(few).reason == f"gave 3 token ids, expected {N_PREDICT}: it must not stop at an end token"
    missing = with_subject(short, tmp_path, {"name": "fake", "api": "command", "command": ["./no-such-engine"]})
    assert (ask(missing).status, ask(missing).reason) == (
        "not_measured",
        "no-such-engine cannot be started: No such file or directory: ./no-such-engine",
    )


def ask(file: ScenarioFile, url: str | None = None) -> ExtraResult:
    return run_extra_subject(file.scenario.subjects[0], url, file, Path("tiny.gguf"))


def server_spec(server: FakeServer, api: str) -> dict[str, Any]:
    return {"name": "fake", "api": api, "url": server.url}


@pytest.mark.parametrize(
    ("api", "path", "model", "times"),
    [
        ("llama-server", "/completion", "x.gguf", (1_500_000, 2_500_000)),
        ("openai", "/v1/completions", "x", (None, None)),
    ],
)
def test_a_server_is_asked_twice_for_greedy_ids(
    short: ScenarioFile,
    tmp_path: Path,
    right_ids: list[int],
    api: str,
    path: str,
    model: str,
    times: tuple[int | None, int | None],
) -> None:
    with serve(right_ids) as server:
        found = ask(with_subject(short, tmp_path, server_spec(server, api)))
    assert (found.status, found.reason, found.effective) == ("ok", None, {"model": model})
    assert [answer.token_ids for answer in found.answers] == [right_ids] * 2
    stated = [(a.times.server_prompt_time_ns, a.times.server_generation_time_ns) for a in found.answers]
    assert stated == [times] * 2
    assert [path for path, _ in server.requests] == [path] * 2
    body = server.requests[0][1]
    assert len(body["prompt"]) == N_PROMPT
    assert (body["temperature"], body["ignore_eos"]) == (0.0, True)
    assert N_PREDICT in (body.get("n_predict"), body.get("max_tokens"))


@pytest.mark.parametrize(
    ("api", "answers", "status", "says"),
    [
        ("llama-server", {"completion": None}, "failed", "/completion: HTTP 500: null"),
        ("llama-server", {"completion": b"moved"}, "failed", "/completion: HTTP 302: moved"),
        ("llama-server", {"completion": b"{"}, "failed", "answered b'{', expected JSON"),
        ("llama-server", {"completion": [1]}, "failed", "expected an object"),
        ("llama-server", {"completion": {}}, "failed", "answer that cannot be read: tokens: Field required"),
        ("llama-server", {"completion": "trickle"}, "timeout", "/completion: no answer after 1 s"),
        ("openai", {"v1__models": {"data": []}}, "failed", "/v1/models names no model"),
        ("openai", {"v1__completions": {"choices": [{}]}}, "failed", "can it return token ids?"),
        ("openai", {"v1__completions": {"choices": [{"token_ids": None}]}}, "failed", "gave 'None' as token_ids"),
        ("openai", {"v1__completions": {"choices": [{"token_ids": [1.0]}]}}, "failed", "gave '[1.0]' as token_ids"),
        (
            "openai",
            {"v1__completions": {"choices": [{"token_ids": [1]}], "usage": {"prompt_tokens": 3}}},
            "failed",
            f"took 3 prompt tokens, expected {N_PROMPT}",
        ),
    ],
)
def test_what_a_server_can_do_wrong(
    short: ScenarioFile, tmp_path: Path, api: str, answers: dict[str, Any], status: str, says: str
) -> None:
    with serve([1, 2, 3, 4], **answers) as server:
        file = with_subject(short, tmp_path, server_spec(server, api), deadline_s=1.0)
        start = time.monotonic()
        found = ask(file)
        assert time.monotonic() - start < 5
    assert found.status == status
    assert says in str(found.reason)


def test_nobody_listens(short: ScenarioFile, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spec = {"name": "fake", "api": "openai", "url": f"http://127.0.0.1:{port}"}
    found = ask(with_subject(short, tmp_path, spec))
    assert (found.status, found.reason) == ("not_measured", f"no server at port {port}: Connection refused")


def test_an_address_of_the_run_goes_before_the_scenarios(
    short: ScenarioFile, tmp_path: Path, right_ids: list[int]
) -> None:
    file = with_subject(short, tmp_path, {"name": "fake", "api": "llama-server"})
    assert ask(file).reason == "no address: add --subject fake=URL"
    with serve(right_ids) as server:
        records = run(file, tmp_path / "r", server.url)
    record = subject_of(records)
    assert (record.status, record.requested["server"]) == ("ok", "this machine")
    assert "127.0.0.1" not in record.model_dump_json()


def test_without_being_asked_for_nothing_is_started(
    short: ScenarioFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("started")

    monkeypatch.setattr("conformance.runner.run_extra_subject", fail)
    file = with_subject(short, tmp_path, command([1]))
    records = Runner(FakeLlama().open, tmp_path / "r", Silent(), subject=run_here).run([file])
    assert subject_of(records).reason == "not asked for: add --subject fake"
    assert judge(records, [file], ["numpy"]).outcome is Outcome.MATCH
    assert judge(records, [file], ["numpy"], subjects=["fake"]).outcome is Outcome.NOT_MEASURED


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8080", True),
        ("http://localhost:8080/v1", True),
        ("http://[::1]:8080", True),
        ("http://127.0.0.1.example.org", False),
        ("http://192.168.1.2:8080", False),
        ("https://example.org", False),
    ],
)
def test_what_is_this_machine(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (
            {"name": "a", "api": "openai", "url": "http://example.org"},
            "not this machine, give it with --subject a=URL",
        ),
        ({"name": "a", "api": "openai", "url": "file:///etc/passwd"}, "is no address of a server"),
        ({"name": "a", "api": "openai", "url": "http://u:p@127.0.0.1"}, "expected no user"),
        ({"name": "a", "api": "openai", "command": ["x"]}, "expected command with api: command, and only there"),
        ({"name": "a", "api": "command"}, "expected command with api: command, and only there"),
        ({"name": "a", "api": "command", "command": []}, "subjects[0].command is [], expected"),
        ({"name": "a", "api": "command", "command": ["x"], "url": "http://127.0.0.1"}, "either command or url"),
        ({"name": "a", "api": "grpc"}, "subjects[0].api is"),
        ({"name": "A b", "api": "openai"}, "subjects[0].name is"),
        ({"name": "a", "api": "openai", "uri": "x"}, "is an unknown key, expected one of: name, api, command, url"),
    ],
)
def test_a_subject_that_makes_no_sense(short: ScenarioFile, tmp_path: Path, spec: dict[str, Any], says: str) -> None:
    with pytest.raises(ScenarioError, match=re.escape(says)):
        with_subject(short, tmp_path, spec)


def test_two_subjects_of_one_name(short: ScenarioFile, tmp_path: Path) -> None:
    spec = {"name": "a", "api": "openai"}
    with pytest.raises(ScenarioError, match="expected each subject under a name of its own"):
        with_subject(short, tmp_path, spec, subjects=[spec, spec])


def test_naming_a_subject_makes_another_version_and_naming_none_does_not(short: ScenarioFile, tmp_path: Path) -> None:
    values = short.scenario.model_dump(mode="json") | {"subjects": []}
    assert load_scenario(write_scenario(tmp_path / "s.yaml", values)).version == short.version
    values["subjects"] = [{"name": "a", "api": "openai"}]
    assert load_scenario(write_scenario(tmp_path / "s.yaml", values)).version != short.version


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("other", "--subject is 'other', the scenarios of this run name: fake"),
        ("fake=http://127.0.0.1", "--subject fake: is a command and has no address"),
    ],
)
def test_subjects_that_do_not_fit(short: ScenarioFile, tmp_path: Path, given: str, says: str) -> None:
    file = with_subject(short, tmp_path, command([1]))
    with pytest.raises(ConformanceError, match=says):
        known_subjects([given], [file])


def test_an_address_of_a_run_may_be_elsewhere(short: ScenarioFile, tmp_path: Path) -> None:
    file = with_subject(short, tmp_path, {"name": "fake", "api": "openai"})
    assert known_subjects(["fake=https://example.org/x"], [file]) == {"fake": "https://example.org/x"}
    with pytest.raises(ConformanceError, match="is no address of a server"):
        known_subjects(["fake=ftp://example.org"], [file])


def test_the_gate_asks_for_a_subject(
    short: ScenarioFile, tmp_path: Path, right_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = with_subject(short, tmp_path, command(right_ids))
    monkeypatch.setattr(cli, "select_scenarios", lambda names: [file])
    for record in run(file, tmp_path / "r"):
        write_record(record, tmp_path / "r")
    invoked = CliRunner().invoke(cli.app, ["gate", str(tmp_path / "r"), "--subject", "fake"])
    assert invoked.exit_code == 0, invoked.output
    (tmp_path / "r" / "short" / "subject-fake.json").unlink()
    assert CliRunner().invoke(cli.app, ["gate", str(tmp_path / "r"), "--subject", "fake"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["gate", str(tmp_path / "r")]).exit_code == 0
