"""The command line: what it prints, its exit codes, and one line for every expected failure."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from engine import cli
from engine.errors import NoDeviceError
from engine.generate import load_engine, token_ids_le64_sha256
from engine.tests.models import TINY, write_model

PROMPT = [5, 6, 7]
CONTINUATION = """
************************

   continue_stmt ::= "continue"

"continue" may only occur syntactically nested in a "for" or "while"
loop, but not nested in a function or class definition within that
loop.  It continues with the next cycle of the nearest enclosing loop.

When "continue" passes control out of a "try" statement with a
"finally" clause, that "finally" clause is executed before really
starting the next loop cycle.
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("cli") / "model.gguf", TINY)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command line in this process and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["engine", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def generate(model: Path, *arguments: object) -> tuple[object, ...]:
    return ("generate", "-m", model, "--prompt-ids", "5,6,7", "-c", 32, "-t", 1, "-n", 2, *arguments)


def test_json_holds_the_ids_and_hashes_of_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *generate(model, "-n", 6, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    expected = load_engine(model, n_ctx=32, n_threads=1).run(PROMPT, 6)
    assert found["prompt_token_ids"] == PROMPT
    assert found["generated_token_ids"] == expected.generated_token_ids
    assert found["generated_token_ids_le64_sha256"] == token_ids_le64_sha256(expected.generated_token_ids)
    assert found["final_logits_le32_sha256"] == expected.final_logits_le32_sha256
    assert found["final_greedy_token_id"] == expected.generated_token_ids[0]
    assert len(found["step_time_ns"]) == 5


def test_text_ends_with_speeds_and_hashes(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *generate(model)) == 0
    lines = capsys.readouterr().out.splitlines()
    ids = load_engine(model, n_ctx=32, n_threads=1).run(PROMPT, 2).generated_token_ids
    assert lines[0].split() == [str(token) for token in ids]
    assert [line.split()[0] for line in lines[1:4]] == ["prompt", "decode", "output"]
    assert lines[4].split() == ["generated_token_ids_le64_sha256", token_ids_le64_sha256(ids)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", 0), "-n is 0, expected at least 1"),
        (("-n", -1), "-n is -1, expected at least 1"),
        (("-c", 0), "3 prompt tokens and 1 decode steps need -c 4, the context has 0"),
        (("-c", 2), "3 prompt tokens and 1 decode steps need -c 4, the context has 2"),
        (("-c", 1_600_001), "-c is 1600001, expected 1 to 1600000"),
        (("-t", 1025), "-t is 1025, expected 1 to 1024"),
        (("--prompt-ids", ""), "the prompt has no tokens, expected at least 1"),
        (("--prompt-ids", "5,48"), "token id 48 at position 1 is not in 0..47"),
        (("--prompt-ids", "5,-1"), "--prompt-ids has '-1', expected token ids such as 1,2,3"),
        (("--prompt-ids", "9" * 5000), f"--prompt-ids has '{'9' * 120}'..., expected token ids such as 1,2,3"),
        (("-n", 31), "3 prompt tokens and 30 decode steps need -c 33, the context has 32"),
        (("--backend", "abacus"), "--backend is 'abacus', expected one of: numpy, cuda"),
        (("--scheduling", "nap"), "--scheduling is 'nap', expected one of: spin, auto"),
        (("--vram-budget", 10), "--vram-budget is 10, expected at least 1 byte, and a backend with a device"),
        (("-p", "both"), "give the prompt either as text with -p or as ids with --prompt-ids"),
    ],
)
def test_a_request_that_cannot_be_served_is_one_line(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[object, ...],
    message: str,
) -> None:
    assert run(monkeypatch, *generate(model, *arguments)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1] == f"error: {message}"


def test_ids_that_are_no_numbers_are_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "generate", "-m", model, "--prompt-ids", "1,x") == 1
    assert capsys.readouterr().err == "error: --prompt-ids has 'x', expected token ids such as 1,2,3\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no command; python -m engine --help lists them"),
        (("fly",), "No such command 'fly'."),
        (("generate", "--fly"), "No such option: --fly"),
        (("generate", "-m", "x", "-n", "many"), "Invalid value for '-n' / '--n-predict': "),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_a_file_that_is_no_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.gguf").write_text("<html>")
    assert run(monkeypatch, "inspect", tmp_path / "page.gguf") == 1
    assert capsys.readouterr().err == "error: page.gguf: not a GGUF file: starts with b'<htm', expected b'GGUF'\n"


def test_without_a_model_the_trained_one_writes_sentences_within_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.process_time()
    assert run(monkeypatch, "generate", "-p", "The with statement", "--json") == 0
    cpu_s = time.process_time() - began  # of all threads, so no less than the time on idle cores
    found = json.loads(capsys.readouterr().out)
    assert found["text"] == CONTINUATION
    assert len(found["generated_token_ids"]) == 113  # it ends by itself
    assert cpu_s < 10


class Bytes:
    """A tokenizer whose tokens are single bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def test_the_bytes_of_tokens_are_printed_as_they_are(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    printer = cli._Printer(Bytes(), quiet=False)  # type: ignore[arg-type]
    seen = []
    for token in "a你".encode() + b"\xff\xe4z\xf0\x9f":
        printer.token(token)
        seen.append(capsysbinary.readouterr().out)
    assert seen == [b"a", b"", b"", "你".encode(), b"\xff", b"", b"\xe4z", b"", b""]
    printer.finish()
    assert capsysbinary.readouterr().out == b"\xf0\x9f"
    assert printer.data == "a你".encode() + b"\xff\xe4z\xf0\x9f"


def test_decode_bench_reports_equal_bits_and_one_hash(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("decode-bench", model, 3, 16, 2, "--backend", "numpy", "--prompt-ids", "5,6,7", "-r", 2, "--json")
    assert run(monkeypatch, *arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["final_logits_bitwise_equal"] is True
    assert found["n_steps"] == 3
    assert [len(times) for times in found["step_time_ns"]] == [3, 3]
    expected = load_engine(model, n_ctx=16, n_threads=1).run(PROMPT, 4)
    assert found["generated_token_ids_le64_sha256"] == [expected.generated_token_ids_le64_sha256]


def test_ctrl_c_is_one_line_and_exit_code_130(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "load_engine", stop)
    assert run(monkeypatch, *generate(model)) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "error: interrupted"


def test_a_device_that_fails_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = type("CUDARuntimeError", (RuntimeError,), {"__module__": "cupy_backends.cuda.api.runtime"})

    def fail(*args: object, **options: object) -> None:
        raise lost("cudaErrorIllegalAddress:\nan illegal memory access was encountered")

    monkeypatch.setattr(cli, "load_engine", fail)
    assert run(monkeypatch, *generate(model)) == 1
    line = r"cudaErrorIllegalAddress:\nan illegal memory access was encountered"
    says = f"error: the device failed, what it held is lost: {line}; run again"
    assert capsys.readouterr().err.splitlines()[-1] == says
    monkeypatch.setattr(lost, "__module__", "elsewhere")
    with pytest.raises(lost):
        run(monkeypatch, *generate(model))


def test_a_missing_device_is_exit_code_3(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_device(scheduling: str) -> None:
        raise NoDeviceError("backend cuda finds no CUDA device")

    monkeypatch.setattr("engine.cuda.device.open_device", no_device)
    assert run(monkeypatch, *generate(model, "--backend", "cuda")) == 3
    assert capsys.readouterr().err.splitlines()[-1] == "error: backend cuda finds no CUDA device"
