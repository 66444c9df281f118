"""The numerics contract once more, one f32 scalar at a time: written from docs/numerics.md, not from the engine.

Nothing here is vectorised and nothing is imported from the engine, so a mistake in an order or a rounding of
`engine.numerics` or `engine.reference` cannot be repeated here by accident. Values are np.float32 scalars, whose
operators round once; vectors are lists of them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from decimal import Decimal, localcontext
from functools import cache
from operator import mul
from typing import Any, NamedTuple

import gguf.quants
import numpy as np

Vector = list[np.float32]
Rows = list[Vector]

F = np.float32
ZERO, ONE = F(0), F(1)


def _hex(text: str) -> np.float32:
    return F(float.fromhex(text))


def assert_same_bits(got: Any, expected: Any) -> None:
    """Fail unless `got` is f32 and equal to `expected` bit for bit, signs of zero included."""
    assert np.asarray(got).dtype == np.float32
    wanted = np.asarray(expected, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), wanted.view(np.uint32))


def ulps(got: Any, exact: Any) -> Any:
    """Return |got - exact| in units of the last place of f32 at `exact` (f64 array), subnormal range included."""
    exact = np.asarray(exact, dtype=np.float64)
    exponent = np.maximum(np.frexp(exact)[1] - 1, -126)
    return np.abs(np.asarray(got, dtype=np.float64) - exact) / np.ldexp(1.0, exponent - 23)


# The order of a sum


def tree(values: Vector) -> np.float32:
    """Fold a power of two of values by halves."""
    v = list(values)
    m = len(v)
    while m > 1:
        m //= 2
        for i in range(m):
            v[i] = v[i] + v[i + m]
    return v[0]


@np.errstate(all="ignore")
def row_sum(terms: Sequence[np.float32], n_lanes: int = 32) -> np.float32:
    """Sum terms by n_lanes lanes in steps of four; warps of 32 lanes are folded first."""
    lanes = [ZERO] * n_lanes
    for k, term in enumerate(terms):
        lane = (k // 4) % n_lanes
        lanes[lane] = lanes[lane] + term
    return tree([tree(lanes[w : w + 32]) for w in range(0, n_lanes, 32)])


# Elementary functions


@np.errstate(all="ignore")
def exp(x: np.float32) -> np.float32:
    """e^x."""
    if np.isnan(x):
        return x
    if x > F(90):
        x = F(90)
    if x < F(-105):
        x = F(-105)
    n = F(round(float(x * _hex("0x1.715476p+0"))))  # round() takes halves to even
    r = (x - n * _hex("0x1.63p-1")) - n * _hex("-0x1.bd0106p-13")
    q = _hex("0x1.a01a02p-13")
    for c in ("0x1.6c16c2p-10", "0x1.111112p-7", "0x1.555556p-5", "0x1.555556p-3", "0x1p-1"):
        q = q * r + _hex(c)
    p = ONE + (r + (r * r) * q)
    a = int(n) >> 1
    return (p * F(2.0**a)) * F(2.0 ** (int(n) - a))


def log(u: np.float32) -> np.float32:
    """Ln u for finite u >= 1."""
    significand, exponent = math.frexp(float(u))
    m, e = F(2 * significand), exponent - 1
    if m > _hex("0x1.6a09e6p+0"):
        m, e = m * F(0.5), e + 1
    g = F(e)
    f = m - ONE
    s = f / (F(2) + f)
    z = s * s
    q = _hex("0x1.c71c72p-3")
    for c in ("0x1.24924ap-2", "0x1.99999ap-2", "0x1.555556p-1"):
        q = q * z + _hex(c)
    return g * _hex("0x1.63p-1") + ((s + s) + (s * (z * q) + g * _hex("-0x1.bd0106p-13")))


@np.errstate(all="ignore")
def softplus(x: np.float32) -> np.float32:
    """Ln(1 + e^x); x above 20."""
    if x > F(20):
        return x
    t = exp(x)
    u = ONE + t
    return log(u) + (t - (u - ONE)) / u


@np.errstate(all="ignore")
def sigmoid(x: np.float32) -> np.float32:
    """1 / (1 + e^-x)."""
    return ONE / (ONE + exp(-x))


@np.errstate(all="ignore")
def silu(x: np.float32) -> np.float32:
    """x / (1 + e^-x)."""
    return x / (ONE + exp(-x))


# Activations


class Group(NamedTuple):
    """32 quantised activations."""

    q: list[int]
    d: np.float32
    total: int


def quantize(x: Sequence[np.float32]) -> list[Group]:
    """Quantise a vector in groups of 32."""
    return [_quantize_group(x[i : i + 32]) for i in range(0, len(x), 32)]


def _quantize_group(x: Sequence[np.float32]) -> Group:
    amax = max(abs(value) for value in x)
    if amax < F(2.0**-100):
        return Group([0] * 32, ZERO, 0)
    inverse = F(127) / amax
    q = [round(float(value * inverse)) for value in x]
    return Group(q, amax / F(127), sum(q))


# Matrices


class SubBlock(NamedTuple):
    """32 weights: scale * q - minimum."""

    q: list[int]
    scale: np.float32
    minimum: np.float32 | None


@cache
def sub_blocks(type_name: str, row: bytes) -> list[SubBlock]:
    """Take a row of a quantised matrix apart."""
    unpack, n_bytes = _UNPACK[type_name]
    return [sub for i in range(0, len(row), n_bytes) for sub in unpack(row[i : i + n_bytes])]


def dequantize(type_name: str, row: bytes) -> Vector:
    """Return the weights of a row of any format."""
    if type_name == "F32":
        return [F(value) for value in struct.unpack(f"<{len(row) // 4}f", row)]
    if type_name == "F16":
        return [F(value) for value in struct.unpack(f"<{len(row) // 2}e", row)]
    if type_name == "BF16":
        return [F(struct.unpack("<f", b"\0\0" + row[i : i + 2])[0]) for i in range(0, len(row), 2)]
    weights = []
    for sub in sub_blocks(type_name, row):
        products = [sub.scale * F(q) for q in sub.q]
        weights += products if sub.minimum is None else [w - sub.minimum for w in products]
    return weights


def matmul(type_name: str, rows: Sequence[bytes], x: Vector) -> Vector:
    """Multiply the rows of a matrix with a vector, which is quantised where the format wants it."""
    if type_name in ("F32", "F16", "BF16"):
        return [row_sum(list(map(mul, dequantize(type_name, row), x))) for row in rows]
    groups = quantize(x)
    return [_dot(sub_blocks(type_name, row), groups) for row in rows]


def _dot(subs: Sequence[SubBlock], groups: Sequence[Group]) -> np.float32:
    lanes = [ZERO] * 32
    for b, (sub, group) in enumerate(zip(subs, groups, strict=True)):
        integer = sum(map(mul, sub.q, group.q))
        assert abs(integer) < 2**24
        term = sub.scale * F(integer)
        if sub.minimum is not None:
            term = term - sub.minimum * F(group.total)
        lanes[b % 32] = lanes[b % 32] + term * group.d
    return tree(lanes)


def _half(block: bytes, offset: int) -> np.float32:
    return F(struct.unpack_from("<e", block, offset)[0])


def _nibble(byte: int, high: bool) -> int:
    return byte >> 4 if high else byte & 15


def _six_bit(scales: bytes, s: int) -> tuple[int, int]:
    if s < 4:
        return scales[s] % 64, scales[s + 4] % 64
    low = scales[s + 4]
    return (low & 15) + 16 * (scales[s - 4] // 64), (low >> 4) + 16 * (scales[s] // 64)


def _with_minimum(block: bytes, s: int, q: list[int]) -> SubBlock:
    scale, minimum = _six_bit(block[4:16], s)
    return SubBlock(q, _half(block, 0) * F(scale), _half(block, 2) * F(minimum))


def _q4_k(block: bytes) -> list[SubBlock]:
    qs = block[16:]
    return [_with_minimum(block, s, [_nibble(qs[32 * (s // 2) + j], s % 2 == 1) for j in range(32)]) for s in range(8)]


def _q5_k(block: bytes) -> list[SubBlock]:
    qh, qs = block[16:48], block[48:]
    return [
        _with_minimum(
            block,
            s,
            [_nibble(qs[32 * (s // 2) + j], s % 2 == 1) + 16 * ((qh[j] >> s) & 1) for j in range(32)],
        )
        for s in range(8)
    ]


def _q6_k(block: bytes) -> list[SubBlock]:
    ql, qh, scales = block[:128], block[128:192], struct.unpack_from("<16b", block, 192)
    subs = []
    for s in range(8):
        h, t = s // 4, s % 4
        q = []
        for j in range(32):
            value = _nibble(ql[64 * h + 32 * (t % 2) + j], t >= 2)
            value += 16 * ((qh[32 * h + j] >> (2 * t)) & 3) - 32
            q.append(value * scales[2 * s + j // 16])
        subs.append(SubBlock(q, _half(block, 208), None))
    return subs


_TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _iq4_xs(block: bytes) -> list[SubBlock]:
    (scales_h,), scales_l, qs = struct.unpack_from("<H", block, 2), block[4:8], block[8:]
    subs = []
    for s in range(8):
        ls = _nibble(scales_l[s // 2], s % 2 == 1) + 16 * ((scales_h >> (2 * s)) & 3)
        q = [_TABLE[_nibble(qs[16 * s + j % 16], j >= 16)] for j in range(32)]
        subs.append(SubBlock(q, _half(block, 0) * F(ls - 32), None))
    return subs


def _iq3_s(block: bytes) -> list[SubBlock]:
    gguf.quants.IQ3_S.init_grid()  # type: ignore[no-untyped-call]
    grid = np.asarray(gguf.quants.IQ3_S.grid).reshape(512, 4)
    qs, qh, signs, scales = block[2:66], block[66:74], block[74:106], block[106:110]
    subs = []
    for s in range(8):
        q = []
        for j in range(32):
            g = 8 * s + j // 4
            magnitude = int(grid[qs[g] + 256 * ((qh[g // 8] >> (g % 8)) & 1)][j % 4])
            q.append(-magnitude if (signs[4 * s + j // 8] >> (j % 8)) & 1 else magnitude)
        subs.append(SubBlock(q, _half(block, 0) * F(1 + 2 * _nibble(scales[s // 2], s % 2 == 1)), None))
    return subs


def _q8_0(block: bytes) -> list[SubBlock]:
    return [SubBlock(list(struct.unpack_from("<32b", block, 2)), _half(block, 0), None)]


_UNPACK = {
    "Q4_K": (_q4_k, 144),
    "Q5_K": (_q5_k, 176),
    "Q6_K": (_q6_k, 210),
    "IQ4_XS": (_iq4_xs, 136),
    "IQ3_S": (_iq3_s, 110),
    "Q8_0": (_q8_0, 34),
}


# Norms


def rms_norm(x: Sequence[np.float32], weight: Sequence[np.float32], eps: float, n_lanes: int) -> Vector:
    """Normalise one vector."""
    mean = row_sum([value * value for value in x], n_lanes) / F(len(x))
    scale = ONE / np.sqrt(mean + F(eps))
    return [(value * scale) * w for value, w in zip(x, weight, strict=True)]


def l2_norm(x: Sequence[np.float32], eps: float) -> Vector:
    """Divide one vector by its length."""
    length = np.sqrt(row_sum([value * value for value in x]))
    inverse = ONE / max(length, F(eps))
    return [value * inverse for value in x]


# Gated DeltaNet


def conv_silu(qkv: Rows, weight: Rows, state: Rows) -> tuple[Rows, Rows]:
    """Return the convolved tokens and the new state: the last inputs, oldest first."""
    inputs = [*state, *qkv]
    n_taps = len(weight[0])
    out = []
    for t in range(len(qkv)):
        row = []
        for c, taps in enumerate(weight):
            y = ZERO
            for i in range(n_taps):
                y = y + taps[i] * inputs[t + i][c]
            row.append(silu(y))
        out.append(row)
    return out, inputs[len(qkv) :]


def delta_step(state: Rows, q: Vector, k: Vector, v: Vector, decay: np.float32, beta: np.float32) -> Vector:
    """Advance the state of one value head (d rows of d) in place by one token and return its output."""
    d = len(v)
    scale = F(1.0 / math.sqrt(d))
    out = []
    for i, row in enumerate(state):
        decayed = [s * decay for s in row]
        m = row_sum([s * key for s, key in zip(decayed, k, strict=True)])
        delta = (v[i] - m) * beta
        row[:] = [s + key * delta for s, key in zip(decayed, k, strict=True)]
        out.append(row_sum([s * query for s, query in zip(row, q, strict=True)]) * scale)
    return out


def gated_delta(
    qkv: Vector, alpha: Vector, beta: Vector, dt: Vector, a: Vector, states: list[Rows], eps: float
) -> Rows:
    """Advance the states of all value heads in place by one token; return n_v_heads outputs of d."""
    n_v, d = len(states), len(states[0])
    n_k = (len(qkv) // d - n_v) // 2
    heads = [qkv[i * d : (i + 1) * d] for i in range(len(qkv) // d)]
    q = [l2_norm(head, eps) for head in heads[:n_k]]
    k = [l2_norm(head, eps) for head in heads[n_k : 2 * n_k]]
    return [
        delta_step(
            states[v],
            q[v % n_k],
            k[v % n_k],
            heads[2 * n_k + v],
            exp(softplus(alpha[v] + dt[v]) * a[v]),
            sigmoid(beta[v]),
        )
        for v in range(n_v)
    ]


def gated_norm(o: Rows, z: Vector, weight: Vector, eps: float) -> Vector:
    """Normalise each head, multiply by silu(z), join."""
    joined = [value for head in o for value in rms_norm(head, weight, eps, 32)]
    return [value * silu(gate) for value, gate in zip(joined, z, strict=True)]


# Full attention

_SIN = (
    "-0x1.5555555555555p-3 0x1.1111111111111p-7 -0x1.a01a01a01a01ap-13 0x1.71de3a556c734p-19 "
    "-0x1.ae64567f544e4p-26 0x1.6124613a86d09p-33 -0x1.ae7f3e733b81fp-41 0x1.952c77030ad4ap-49"
)
_COS = (
    "-0x1.0000000000000p-1 0x1.5555555555555p-5 -0x1.6c16c16c16c17p-10 0x1.a01a01a01a01ap-16 "
    "-0x1.27e4fb7789f5cp-22 0x1.1eed8eff8d898p-29 -0x1.93974a8c07c9dp-37 0x1.ae7f3e733b81fp-45"
)


def rope_frequency(i: int, n_rot: int, freq_base: float, sections: Sequence[int]) -> float:
    """Return the f64 angle per position of pair i."""
    c = i % sum(sections)
    if c >= 3 * sections[c % 3]:
        return 0.0
    with localcontext() as context:
        context.prec = 50
        return float(Decimal(freq_base) ** (Decimal(-2 * i) / Decimal(n_rot)))


def rope_cos_sin(position: int, frequency: float) -> tuple[np.float32, np.float32]:
    """Return cos and sin of the angle; Python floats are f64 and never fused."""
    theta = float(position) * frequency
    k = float(round(theta * float.fromhex("0x1.45f306dc9c883p-1")))
    r = theta - k * float.fromhex("0x1.921fb544p+0")
    r = r - k * float.fromhex("0x1.0b4611a6p-34")
    r = r - k * float.fromhex("0x1.3198a2e037073p-69")
    z = r * r
    s, c = 0.0, 0.0
    for term in reversed(_SIN.split()):
        s = s * z + float.fromhex(term)
    for term in reversed(_COS.split()):
        c = c * z + float.fromhex(term)
    sin, cos = r + r * (z * s), 1.0 + z * c
    cos, sin = [(cos, sin), (-sin, cos), (-cos, -sin), (sin, -cos)][int(k) % 4]
    return F(cos), F(sin)


def rotate(x: Vector, position: int, frequencies: Sequence[float]) -> Vector:
    """Rotate one head."""
    half = len(frequencies)
    out = list(x)
    for i, frequency in enumerate(frequencies):
        cos, sin = rope_cos_sin(position, frequency)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i] * sin + x[i + half] * cos
    return out


def attend(q: Vector, keys: Rows, values: Rows) -> Vector:
    """Attend with one query head to keys and values (f16 values widened) of one KV head."""
    scale = F(1.0 / math.sqrt(len(q)))
    scores = [row_sum([a * b for a, b in zip(q, key, strict=True)]) * scale for key in keys]
    splits = [_attend_split(scores[b : b + 32], values[b : b + 32]) for b in range(0, len(scores), 32)]
    largest = max(m for m, _, _ in splits)
    total, out = ZERO, [ZERO] * len(q)
    for m, weight, value in splits:
        f = exp(m - largest)
        total = total + f * weight
        out = [o + f * v for o, v in zip(out, value, strict=True)]
    return [o / total for o in out]


def _attend_split(scores: Vector, values: Rows) -> tuple[np.float32, np.float32, Vector]:
    largest = max(scores)
    weights = [exp(score - largest) for score in scores]
    out = [ZERO] * len(values[0])
    for weight, value in zip(weights, values, strict=True):
        out = [o + weight * v for o, v in zip(out, value, strict=True)]
    return largest, tree(weights + [ZERO] * (32 - len(weights))), out


def to_f16(x: np.float32) -> np.float32:
    """Round to f16 by way of the integers and widen again; magnitudes below 65520 only."""
    exponent = max(math.frexp(float(x))[1] - 11, -24)
    return F(math.copysign(math.ldexp(round(math.ldexp(float(x), -exponent)), exponent), float(x)))
