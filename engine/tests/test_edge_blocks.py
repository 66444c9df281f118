"""Blocks at the edges of their formats, and files with weights that are not finite."""

from __future__ import annotations

from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest

from engine import cli, quants
from engine.errors import ModelFileError, NonFiniteError
from engine.generate import load_engine
from engine.gguf.reader import open_model
from engine.model.config import ModelConfig, expected_tensors
from engine.tests.edge_blocks import EDGES, FORMATS, edge_rows
from engine.tests.models import TINY, write_model

PROMPT = [5, 6, 7]
VALUES = pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("type_name", FORMATS)
def test_weights_equal_the_gguf_package(type_name: str, edge: str) -> None:
    raw = edge_rows(type_name, edge)
    with np.errstate(all="ignore"):
        ours = quants.dequantize(type_name, raw)
        theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name])
    np.testing.assert_array_equal(ours, theirs)
    other_sign = (np.signbit(ours) != np.signbit(theirs)) & ~np.isnan(ours)
    if type_name == "Q6_K":  # here the integer scale meets the integer weight first, and an integer 0 has no sign
        assert not ours[other_sign].any()
    else:
        assert not other_sign.any()


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("type_name", FORMATS)
def test_scales_alone_tell_whether_the_weights_are_finite(type_name: str, edge: str) -> None:
    raw = edge_rows(type_name, edge)
    scales = all(bool(np.isfinite(values).all()) for values in quants.scales(type_name, raw).values())
    with np.errstate(all="ignore"):
        assert scales == bool(np.isfinite(quants.dequantize(type_name, raw)).all())


# Files with weights that are not finite


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sound") / "model.gguf", TINY)


def damaged(sound: Path, folder: Path, name: str, value: float, row: int = 0) -> Path:
    """Return a copy in which the first scale, or weight, of a tensor's row is `value`."""
    content = bytearray(sound.read_bytes())
    info = open_model(sound).tensor(name)
    data = np.frombuffer(content, np.uint8, info.n_bytes, info.offset).reshape(info.n_rows, -1)
    for values in quants.scales(info.type, data).values():
        values[row].flat[0] = value
        break
    path = folder / "damaged.gguf"
    path.write_bytes(content)
    return path


def tensor_names(sound: Path) -> list[str]:
    return list(expected_tensors(ModelConfig.from_model(open_model(sound))))


@VALUES
def test_check_weights_names_every_damaged_tensor(sound: Path, tmp_path: Path, value: float) -> None:
    for name in tensor_names(sound):
        info = open_model(sound).tensor(name)
        path = damaged(sound, tmp_path, name, value, row=info.n_rows - 1)
        with pytest.raises(ModelFileError) as caught:
            load_engine(path, n_ctx=8, n_threads=1, check_weights=True)
        field = "weight" if info.type in quants.FLOAT_FORMATS else "d"
        found = f"row {info.n_rows - 1} has a {field} of {value}, expected finite weights"
        assert str(caught.value) == f"damaged.gguf: tensor {name} {found}"


@VALUES
def test_the_first_step_finds_a_damaged_tensor_in_any_case(sound: Path, tmp_path: Path, value: float) -> None:
    for name in tensor_names(sound):
        row = PROMPT[0] if name == "token_embd.weight" else 0
        engine = load_engine(damaged(sound, tmp_path, name, value, row), n_ctx=8, n_threads=1)
        with pytest.raises(NonFiniteError, match=r"^(layer \d|output head): op \w+ produced (NaN|infinity); "):
            engine.run(PROMPT, 2)


def test_a_sound_file_passes_the_check_with_the_same_result(sound: Path) -> None:
    checked = load_engine(sound, n_ctx=8, n_threads=1, check_weights=True).run(PROMPT, 2)
    assert (
        checked.final_logits_le32_sha256
        == load_engine(sound, n_ctx=8, n_threads=1).run(PROMPT, 2).final_logits_le32_sha256
    )


def test_the_command_line_checks_when_asked(
    sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged(sound, tmp_path, "token_embd.weight", np.nan, row=40)  # a row that the prompt does not use
    arguments = ["engine", "generate", "-m", str(path), "--prompt-ids", "5,6", "-n", "1", "-c", "8"]
    for more, code in (([], 0), (["--check-weights"], 1)):
        monkeypatch.setattr("sys.argv", [*arguments, *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: damaged.gguf: tensor token_embd.weight row 40 has a ")
