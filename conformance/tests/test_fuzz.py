"""A bounded look for exceptions that are none of the project's own; `nox -s fuzz` looks longer, guided by coverage."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conformance.fuzz.targets import TARGETS, seeds, token_ids, written_seeds

SEEDS = {target: list(seeds(target)) for target in TARGETS}
WRITTEN = {target: list(written_seeds(target)) for target in TARGETS}

Edit = Callable[[bytes], bytes]
bounded = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def replace(at: float, n: int, piece: bytes) -> Edit:
    """Return an edit that puts `piece` in place of n bytes, at a place given as a share of the length."""
    return lambda data: data[: int(at * len(data))] + piece + data[int(at * len(data)) + n :]


pieces = st.one_of(
    st.binary(max_size=9),
    st.sampled_from(
        [b"\xff" * 8, b"\0" * 8, b"\0" * 7 + b"\x80", b"\n", b"\n\n", b"&a [*a]", b"!!binary x", b"2024-99-99"]
    ),
    st.text(max_size=9).map(str.encode),
)
edits = st.builds(replace, st.floats(0, 1), st.integers(0, 9), pieces)


def edited(target: str) -> st.SearchStrategy[bytes]:
    """Return seeds of `target` with up to six places changed, and some that are cut."""

    def apply(seed: bytes, changes: list[Edit], keep: float) -> bytes:
        for change in changes:
            seed = change(seed)
        return seed[: int(keep * len(seed))]

    keep = st.one_of(st.just(1.0), st.just(1.0), st.floats(0, 1))
    return st.builds(apply, st.sampled_from(SEEDS[target]), st.lists(edits, max_size=6), keep)


def look(target: str, inputs: st.SearchStrategy[bytes]) -> None:
    """Run `target` on a bounded number of inputs."""

    @bounded
    @given(inputs)
    def run(data: bytes) -> None:
        TARGETS[target](data)

    run()


@pytest.mark.parametrize("target", TARGETS)
def test_edited_inputs(target: str) -> None:
    look(target, edited(target))


@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes(target: str) -> None:
    look(target, st.binary(max_size=200))


@pytest.mark.parametrize("target", TARGETS)
def test_seeds(target: str) -> None:
    assert len(SEEDS[target]) >= 1
    for seed in SEEDS[target]:
        TARGETS[target](seed)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [-1, 0, 1 << 31, 1 << 63, 10**400, 1e308, float("nan"), float("inf"), "", "\ud800", "\n\x1b[31m", "/", ".."]
    ),
    st.text(max_size=5),
    st.recursive(
        st.integers(), lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner)
    ),
)


def with_a_value_replaced(data: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:
    """Return `data` with one value, at any depth, replaced, removed or put under another key."""
    if isinstance(data, dict) and data and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(data)))
        rest = {other: value for other, value in data.items() if other != key or draw(st.integers(0, 9))}
        name = key if draw(st.integers(0, 9)) else draw(st.text(max_size=5))
        return {**rest, name: with_a_value_replaced(data[key], draw)}
    if isinstance(data, list) and data and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(data) - 1))
        return [*data[:at], with_a_value_replaced(data[at], draw), *data[at + 1 :]]
    return draw(ODD)


@st.composite
def structured(draw: Callable[[st.SearchStrategy[Any]], Any], target: str) -> bytes:
    """Return a scenario or record as JSON, which is YAML too, with values replaced."""
    data = yaml.safe_load(draw(st.sampled_from(WRITTEN[target])))
    for _ in range(draw(st.integers(1, 3))):
        data = with_a_value_replaced(data, draw)
    return json.dumps(data).encode()


@pytest.mark.parametrize("target", ["scenario", "record"])
def test_values_replaced(target: str) -> None:
    look(target, structured(target))


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_lets_an_unexpected_exception_out(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    for name in ("open_model", "load_scenario", "read_record", "parse_ids"):
        monkeypatch.setattr(f"conformance.fuzz.targets.{name}", fail)
    with pytest.raises(KeyError):
        TARGETS[target](SEEDS[target][-1])


@given(st.text(alphabet="0123456789, x-", max_size=40))
@example("9" * 5000)
@bounded
def test_token_ids(text: str) -> None:
    token_ids(text.encode())
