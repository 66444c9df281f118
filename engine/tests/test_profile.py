"""The arithmetic of a profile, with a device whose times are known."""

from __future__ import annotations

import builtins
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine import picture
from engine.cli import app
from engine.cuda.plan import LayerKind, Node
from engine.errors import RequestError
from engine.gguf.reader import TensorInfo
from engine.profile import Launch, Profile, Setting, make_profile, measure, render
from engine.tests.models import SHAPES, write_model

CEILING_GB_PER_S = 1000.0  # 1 us is 1 MB
EMPTY_US, STEP_US = 5.0, 44.0


def matrix(layer: int, n_out: int, n_bytes: int) -> TensorInfo:
    return TensorInfo(f"blk.{layer}.ffn_down.weight", (1024, n_out), "Q4_K", 0, n_bytes)


def node(expression: str, kind: LayerKind, layer: int | None, tensors: tuple[TensorInfo, ...], n_bytes: int) -> Node:
    return Node(expression, layer, kind, tensors, n_bytes)


NODES = [
    node("gemv<Q4_K, 1024, 1>", "recurrent", 0, (matrix(0, 8, 7_000_000),), 8_000_000),
    node("rms_norm<1024>", "recurrent", 0, (), 1_000_000),
    node("gemv<Q4_K, 1024, 1>", "attention", 1, (matrix(1, 8, 7_000_000),), 8_000_000),
    node("gemv<Q4_K, 1024, 1>", "attention", 1, (matrix(1, 16, 14_000_000),), 15_000_000),
    node("argmax", "around", None, (), 0),
]
ADDS_US = [10.0, 3.0, 9.0, 16.0, -1.0]
LAUNCHES: list[Launch] = [(one.expression, (i + 1,)) for i, one in enumerate(NODES)]


def time_step(keeps: Callable[[int], bool]) -> list[float]:
    """Take 2 us more for the whole, and 100 us in a replay that was disturbed."""
    kept = [keeps(i) for i in range(len(NODES))]
    us = EMPTY_US + sum(add for add, keep in zip(ADDS_US, kept, strict=True) if keep)
    return [us, us + 100.0, us]


@pytest.fixture(scope="module")
def profile() -> Profile:
    samples = measure(NODES, LAUNCHES, time_step)
    samples = type(samples)(samples.cut, [STEP_US], samples.without)
    setting = Setting("model.gguf", 512, 70, {"device": "none"}, CEILING_GB_PER_S, 5)
    return make_profile(setting, NODES, LAUNCHES, samples)


def test_what_a_launch_adds_is_the_difference_of_medians(profile: Profile) -> None:
    assert [one.time_us for one in profile.nodes] == ADDS_US
    assert (profile.step_us, profile.empty_us, profile.overhead_us) == (STEP_US, EMPTY_US, STEP_US - 42.0)
    assert len(profile.samples_us.cut) == len(NODES) + 1
    assert profile.samples_us.cut[1] == [15.0, 115.0, 15.0]


def test_speeds_are_bytes_over_time(profile: Profile) -> None:
    first = profile.nodes[0]
    assert (first.gb_per_s, first.ceiling_fraction) == (800.0, 0.8)
    assert (profile.nodes[-1].gb_per_s, profile.nodes[-1].ceiling_fraction) == (None, None)


def test_launches_of_a_kernel_with_the_same_shape_are_one_group(profile: Profile) -> None:
    found = [(g.op, g.shape, g.n_launches, g.n_bytes, g.time_us, g.alone_us) for g in profile.groups]
    whole = STEP_US - 42.0  # the replayed graph took this much more
    assert found == [
        ("gemv", "8 x 1024", 2, 16_000_000, 19.0, 19.0 + whole),
        ("rms_norm", "", 1, 1_000_000, 3.0, 3.0 + whole),
        ("gemv", "16 x 1024", 1, 15_000_000, 16.0, 16.0 + whole),
        ("argmax", "", 1, 0, -1.0, -1.0 + whole),
    ]


def test_sums(profile: Profile) -> None:
    assert profile.by("op") == {"gemv": 35.0, "rms_norm": 3.0, "argmax": -1.0}
    assert profile.by("kind") == {"recurrent": 13.0, "attention": 25.0, "around": -1.0}
    assert profile.without_weights_us == STEP_US - 35.0
    assert profile.floor_us == pytest.approx(32.0)


def test_a_step_that_launches_something_else_is_refused() -> None:
    with pytest.raises(RuntimeError, match="planned was"):
        measure(NODES, LAUNCHES[:-1], time_step)


def test_the_text_has_what_is_asked_of_a_profile(profile: Profile) -> None:
    text = render(profile)
    for line in ("nodes of the graph", "5, 5 of them launches", "launch overhead", "without weights"):
        assert line in text
    assert "blk.0.ffn_down.weight" not in text
    assert "blk.0.ffn_down.weight" in render(profile, with_nodes=True)


def test_json_holds_every_sample_and_sum(profile: Profile) -> None:
    data = json.loads(json.dumps(profile.to_dict()))
    assert data["setting"]["n_nodes"] == 5
    assert data["nodes"][2]["tensors"] == ["blk.1.ffn_down.weight"]
    assert data["nodes"][2]["grid"] == [3]
    assert data["by_op_us"]["gemv"] == 35.0
    assert data["samples_us"]["without"]["argmax "] == [43.0, 143.0, 43.0]


def test_bars_have_no_negative_part(profile: Profile) -> None:
    assert picture.bars(profile) == {
        "empty graph": [EMPTY_US, 0.0],
        "gemv": [35.0, 39.0],
        "rms_norm": [3.0, 5.0],
        "argmax": [0.0, 1.0],
    }


def test_a_picture_is_written(profile: Profile, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pictures not measured")
    picture.draw(profile, tmp_path / "profile.svg")
    text = (tmp_path / "profile.svg").read_text()
    assert text.rstrip().endswith("</svg>")
    with pytest.raises(RequestError, match="cannot be written"):
        picture.draw(profile, tmp_path / "profile.nothing")


def test_without_matplotlib_a_picture_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real_import = builtins.__import__

    def fails(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("no module named matplotlib")
        return real_import(name, *arguments, **options)

    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", fails)
    result = CliRunner().invoke(app, ["profile", str(tmp_path / "no.gguf"), "--picture", str(tmp_path / "p.svg")])
    assert isinstance(result.exception, RequestError)
    assert "install the extra plots" in str(result.exception)


def test_a_depth_beyond_the_context_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", next(iter(SHAPES.values())), seed=1)
    result = CliRunner().invoke(app, ["profile", str(path), "-c", "64", "--depth", "64"])
    assert isinstance(result.exception, RequestError)
    assert "need -c 65" in str(result.exception)
