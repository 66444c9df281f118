"""The ops of a Gated DeltaNet layer against the scalar twin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.reference import gated_delta
from engine.reference.ops import NumpyOps
from engine.tests import scalar_twin as twin
from engine.tests.scalar_twin import assert_same_bits

EPS = 1e-6
CONFIG: Any = SimpleNamespace(n_rot=16, rope_freq_base=1e7, rope_sections=(3, 3, 2, 0), rms_eps=EPS)


@pytest.fixture
def ops() -> NumpyOps:
    return NumpyOps(CONFIG, n_threads=1)


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rows(x: NDArray[np.float32]) -> twin.Rows:
    return [list(row) for row in x]


# Convolution


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5])
def test_conv_follows_the_contract_and_keeps_the_last_inputs(ops: NumpyOps, n_tokens: int) -> None:
    qkv, weight, state = normal(n_tokens, 50), normal(50, 4, seed=1), normal(3, 50, seed=2)
    expected, new_state = twin.conv_silu(rows(qkv), rows(weight), rows(state))
    assert_same_bits(ops.conv_silu(qkv, weight, state), expected)
    assert_same_bits(state, new_state)


def test_conv_by_hand(ops: NumpyOps) -> None:
    qkv = np.array([[1.0], [10.0]], dtype=np.float32)
    weight = np.array([[1000.0, 100.0, 10.0, 1.0]], dtype=np.float32)  # the last tap meets the token itself
    state = np.array([[5.0], [6.0], [7.0]], dtype=np.float32)
    out = ops.conv_silu(qkv, weight, state)
    assert out.ravel().tolist() == [5000 + 600 + 70 + 1, 6000 + 700 + 10 + 10]  # silu changes nothing up there
    assert state.ravel().tolist() == [7.0, 1.0, 10.0]


def test_conv_in_pieces_has_the_same_bits(ops: NumpyOps) -> None:
    qkv, weight = normal(11, 30), normal(30, 4, seed=1)
    whole_state, state = np.zeros((3, 30), np.float32), np.zeros((3, 30), np.float32)
    whole = ops.conv_silu(qkv, weight, whole_state)
    pieces = [ops.conv_silu(qkv[a:b], weight, state) for a, b in [(0, 1), (1, 3), (3, 10), (10, 11)]]
    assert_same_bits(np.concatenate(pieces), whole)
    assert_same_bits(state, whole_state)


# Delta rule


def delta_inputs(n_tokens: int, n_k: int, n_v: int, d: int, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    return {
        "qkv": normal(n_tokens, (2 * n_k + n_v) * d, seed=seed),
        "alpha": normal(n_tokens, n_v, seed=seed + 1) * np.float32(3),
        "beta": normal(n_tokens, n_v, seed=seed + 2),
        "dt": rng.uniform(-4, 25, n_v).astype(np.float32),  # both branches of softplus
        "a": -rng.uniform(0.05, 2, n_v).astype(np.float32),
    }


@pytest.mark.parametrize(("n_k", "n_v", "d"), [(2, 2, 64), (2, 6, 64), (4, 4, 32), (1, 3, 128), (4, 12, 32)])
def test_delta_rule_follows_the_contract(ops: NumpyOps, n_k: int, n_v: int, d: int) -> None:
    inputs, state = delta_inputs(2, n_k, n_v, d), normal(n_v, d, d, seed=7)
    twin_states = [rows(head) for head in state]
    out = ops.gated_delta(**inputs, ssm_state=state)
    for t in range(2):
        expected = twin.gated_delta(
            list(inputs["qkv"][t]),
            list(inputs["alpha"][t]),
            list(inputs["beta"][t]),
            list(inputs["dt"]),
            list(inputs["a"]),
            twin_states,
            EPS,
        )
        assert_same_bits(out[t], expected)
    assert_same_bits(state, twin_states)


def test_value_heads_are_tiled_over_key_heads(ops: NumpyOps) -> None:
    assert gated_delta.key_head_of_value_head(2, 6) == [0, 1, 0, 1, 0, 1]
    d = 32
    qkv = np.zeros((1, (2 * 2 + 6) * d), dtype=np.float32)
    q, k, v = qkv[0, : 2 * d].reshape(2, d), qkv[0, 2 * d : 4 * d].reshape(2, d), qkv[0, 4 * d :].reshape(6, d)
    q[1, 5] = k[1, 5] = 1.0  # only key head 1 speaks
    v[:] = 1.0
    per_token, per_head = np.zeros((1, 6), np.float32), np.zeros(6, np.float32)
    out = ops.gated_delta(qkv, per_token, per_token, per_head, per_head, np.zeros((6, d, d), np.float32))
    assert [bool(head.any()) for head in out[0]] == [False, True, False, True, False, True]


def test_state_holds_value_rows_and_key_columns(ops: NumpyOps) -> None:
    d = 32
    q, k, v = np.zeros((3, 1, 1, d), dtype=np.float32)
    k[0, 0, 3] = q[0, 0, 3] = 1.0
    v[0, 0, 9] = 2.0
    state = np.zeros((1, d, d), dtype=np.float32)
    half = np.full((1, 1), 0.5, dtype=np.float32)
    out = gated_delta.delta_rule(q, k, v, half, half, state)
    assert np.argwhere(state).tolist() == [[0, 9, 3]]
    assert state[0, 9, 3] == 1.0  # beta v
    assert out[0, 0, 9] == np.float32(1 / np.sqrt(32))
    out = gated_delta.delta_rule(q, k, v, half, half, state)
    assert state[0, 9, 3] == 0.5 + (2.0 - 0.5) * 0.5  # decay first, then the correction


def test_delta_rule_in_pieces_has_the_same_bits(ops: NumpyOps) -> None:
    inputs = delta_inputs(9, 2, 6, 32)
    whole_state, state = normal(6, 32, 32), normal(6, 32, 32)
    whole = ops.gated_delta(**inputs, ssm_state=whole_state)
    pieces = []
    for piece in (slice(0, 4), slice(4, 5), slice(5, 9)):
        tokens = {name: inputs[name][piece] for name in ("qkv", "alpha", "beta")}
        pieces.append(ops.gated_delta(**tokens, dt=inputs["dt"], a=inputs["a"], ssm_state=state))
    assert_same_bits(np.concatenate(pieces), whole)
    assert_same_bits(state, whole_state)


def test_value_heads_do_not_depend_on_each_other(ops: NumpyOps) -> None:
    inputs, state = delta_inputs(3, 2, 2, 64), normal(2, 64, 64)
    other = {name: x.copy() for name, x in inputs.items()}
    other["qkv"].reshape(3, 6, 64)[:, [1, 3, 5]] += 1  # q, k and v of head 1
    other["alpha"][:, 1] += 1
    other_state = state.copy()
    out, other_out = ops.gated_delta(**inputs, ssm_state=state), ops.gated_delta(**other, ssm_state=other_state)
    assert_same_bits(out[:, 0], other_out[:, 0])
    assert (out[:, 1] != other_out[:, 1]).any()


def test_strong_decay_forgets_and_no_decay_keeps(ops: NumpyOps) -> None:
    zero, state = np.zeros((1, 1), np.float32), normal(1, 32, 32)
    before = state.copy()
    qkv = np.zeros((1, 3 * 32), np.float32)
    ops.gated_delta(qkv, zero, zero, np.zeros(1, np.float32), np.zeros(1, np.float32), state)
    assert_same_bits(state, before)
    ops.gated_delta(qkv, zero + 200, zero, np.zeros(1, np.float32), np.full(1, -1.0, np.float32), state)
    assert not state.any()


# Gated norm


@pytest.mark.parametrize("d", [64, 128])
def test_gated_norm_follows_the_contract(ops: NumpyOps, d: int) -> None:
    o, z, weight = normal(2, 3, d), normal(2, 3 * d, seed=1) * np.float32(4), normal(d, seed=2)
    h = ops.gated_norm(o, z, weight)
    expected = [twin.gated_norm(rows(o[t]), list(z[t]), list(weight), EPS) for t in range(2)]
    assert_same_bits(h.x, expected)
    assert h.q8 is not None
    assert h.q8.q[1].tolist() == [group.q for group in twin.quantize(expected[1])]
