"""Messages: one printable line, whatever a file puts into it."""

from __future__ import annotations

import pytest

from engine.errors import EngineError, ModelFileError, one_line, shown


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("größe 模型", "größe 模型"),
        ("a\nb\x1b[31m\x00", r"a\nb\x1b[31m\x00"),
        ("\udcff\u202e", r"\udcff\u202e"),
        ("a" * 600, "a" * 600),
        ("a" * 400 + "b" * 400, "a" * 300 + " [...] " + "b" * 300),
    ],
)
def test_one_line(text: str, line: str) -> None:
    assert one_line(text) == line
    assert str(EngineError(text)) == line
    assert str(ModelFileError(text)) == line


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "3"),
        ("a'b", '"a\'b"'),
        (b"\xff", r"b'\xff'"),
        ("x" * 200, f"'{'x' * 120}'..."),
        ([7] * 100, "[" + "7, " * 39 + "7, "[:2] + "..."),
    ],
)
def test_shown(value: object, text: str) -> None:
    assert shown(value) == text
