"""The numerics contract: every floating-point step of the engine, in the order that all backends must follow.

`docs/numerics.md` states the same rules in prose. All arithmetic here is IEEE 754 binary32, round to nearest
even, one rounding per operation: a multiplication is never fused with an addition, and denormals are kept.
That makes each function reproducible on any CPU and any GPU, provided the additions happen in the order below.

Sums. A row is summed by `n_lanes` accumulators. Element k belongs to lane (k // 4) % n_lanes; each lane starts
at +0 and adds its elements in increasing k; the lanes are then folded by `tree`. Because accumulators start at
+0 they can never become -0, so lanes and elements that do not exist may be treated as +0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

LANES_HEAD = 32
"""Lanes of a sum over one head, one matrix row or one KV split: a single warp."""
LANES_EMBD = 256
"""Lanes of the sum of squares over n_embd: eight warps, since only one block works on that row."""
ELEMENTS_PER_LANE_STEP = 4
"""Consecutive elements that a lane takes at a time: one 16-byte load of f32."""
SUB_BLOCK = 32
"""Values that share one activation scale, and weights that share one f32 step of a dot product."""
KV_SPLIT = 32
"""KV positions per attention split; a split is summed on its own, then splits are combined in order."""

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HI = np.float32(0.693359375)  # 355/512: nine significant bits, so n * LN2_HI is exact for |n| < 2^15
_LN2_LO = np.float32(0.6931471805599453 - 0.693359375)
_EXP_COEFFICIENTS = tuple(np.float32(1.0 / f) for f in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0))
_LOG_COEFFICIENTS = tuple(np.float32(2.0 / n) for n in (9.0, 7.0, 5.0, 3.0))
_SQRT2 = np.float32(1.4142135623730951)
_ONE = np.float32(1.0)


def tree(values: F32, axis: int = -1) -> F32:
    """Fold `axis`, whose length is a power of two, by halves: v[i] + v[i + n/2], until one value is left.

    With 32 lanes this is the butterfly of xor shuffles by 16, 8, 4, 2, 1. Returns `values` without `axis`.
    """
    v = np.moveaxis(values, axis, 0)
    while v.shape[0] > 1:
        half = v.shape[0] // 2
        v = v[:half] + v[half:]
    return v[0]


def row_sum(terms: F32, n_lanes: int = LANES_HEAD) -> F32:
    """Sum `terms` (..., n) f32 over the last axis in the contract's order and return (...) f32.

    Lanes of 32 are folded first (within a warp), then the n_lanes / 32 partial sums (across warps).
    """
    step = n_lanes * ELEMENTS_PER_LANE_STEP
    n = terms.shape[-1]
    if n % step:
        widths = [(0, 0)] * (terms.ndim - 1) + [(0, step - n % step)]
        terms = np.pad(terms, widths)
    v = terms.reshape(*terms.shape[:-1], -1, n_lanes, ELEMENTS_PER_LANE_STEP)
    lanes = v[..., 0, :, 0]
    for i in range(v.shape[-3]):
        for e in range(ELEMENTS_PER_LANE_STEP):
            if i or e:
                lanes = lanes + v[..., i, :, e]
    warps = tree(lanes.reshape(*lanes.shape[:-1], -1, LANES_HEAD))
    # The first addition above starts from the first term instead of +0; adding +0 here restores the sign of zero.
    return tree(warps) + np.float32(0.0)


def exp(x: F32) -> F32:
    """Return e^x for f32 `x`, within 2 ulp, denormal results included; NaN stays NaN.

    x = n ln2 + r with |r| <= ln2 / 2; e^r by its Taylor series to r^7; then two exact scalings by powers of two.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        x = np.where(x > np.float32(90.0), np.float32(90.0), x)
        x = np.where(x < np.float32(-105.0), np.float32(-105.0), x)
        n = np.rint(x * _LOG2_E)
        r = (x - n * _LN2_HI) - n * _LN2_LO
        q = np.full_like(r, _EXP_COEFFICIENTS[0])
        for c in _EXP_COEFFICIENTS[1:]:
            q = q * r + c
        p = _ONE + (r + (r * r) * q)
        k = n.astype(np.int32)
        return np.asarray((p * _power_of_two(k >> 1)) * _power_of_two(k - (k >> 1)), dtype=np.float32)


def _power_of_two(k: NDArray[np.int32]) -> F32:
    """Return 2^k for int32 `k` in -126..127, by writing the exponent field."""
    return ((k + np.int32(127)) << np.int32(23)).view(np.float32)


def log(u: F32) -> F32:
    """Return ln(u) for finite normal f32 `u` >= 1.

    u = m 2^e with m in (sqrt2 / 2, sqrt2]; ln m = 2 atanh(s), s = (m - 1) / (m + 1), as a series to s^9.
    """
    bits = np.asarray(u, dtype=np.float32).view(np.int32)
    e = (bits >> np.int32(23)) - np.int32(127)
    m = ((bits & np.int32(0x007FFFFF)) | np.int32(0x3F800000)).view(np.float32)
    high = m > _SQRT2
    m = np.where(high, m * np.float32(0.5), m)
    ef = (e + high).astype(np.float32)
    f = m - _ONE
    s = f / (np.float32(2.0) + f)
    z = s * s
    q = np.full_like(z, _LOG_COEFFICIENTS[0])
    for c in _LOG_COEFFICIENTS[1:]:
        q = q * z + c
    return ef * _LN2_HI + ((s + s) + (s * (z * q) + ef * _LN2_LO))


def softplus(x: F32) -> F32:
    """Return ln(1 + e^x), and x itself above 20 (llama.cpp's threshold).

    u = 1 + e^x loses low bits of e^x; the term (e^x - (u - 1)) / u puts them back.
    """
    t = exp(np.where(x > np.float32(20.0), np.float32(20.0), x))
    u = _ONE + t
    return np.where(x > np.float32(20.0), x, log(u) + (t - (u - _ONE)) / u)


def sigmoid(x: F32) -> F32:
    """Return 1 / (1 + e^-x)."""
    return _ONE / (_ONE + exp(-x))


def silu(x: F32) -> F32:
    """Return x / (1 + e^-x)."""
    return x / (_ONE + exp(-x))


def rms_scale(x: F32, eps: float, n_lanes: int) -> F32:
    """Return 1 / sqrt(mean(x^2) + eps) over the last axis, kept as an axis of length 1."""
    mean = row_sum(x * x, n_lanes) / np.float32(x.shape[-1])
    return (_ONE / np.sqrt(mean + np.float32(eps)))[..., None]


def rms_norm(x: F32, weight: F32, eps: float, n_lanes: int) -> F32:
    """Return (x * rms_scale(x)) * weight over the last axis; `weight` is (n,) f32."""
    return (x * rms_scale(x, eps, n_lanes)) * weight


def l2_norm(x: F32, eps: float) -> F32:
    """Return x * (1 / max(sqrt(sum(x^2)), eps)) over the last axis."""
    norm = np.sqrt(row_sum(x * x))
    return x * (_ONE / np.maximum(norm, np.float32(eps)))[..., None]


@dataclass(frozen=True)
class Q8:
    """Vectors quantised in groups of 32 (Q8_F32S).

    q: (n_tokens, n / 32, 32) int8; d: (n_tokens, n / 32) f32 scale; total: (n_tokens, n / 32) int32, the sum of
    the 32 int8 values.
    """

    q: NDArray[np.int8]
    d: F32
    total: NDArray[np.int32]


@dataclass(frozen=True)
class Activation:
    """Vectors as the matrix ops take them: x (n_tokens, n) f32 for float weights, q8 for quantised ones.

    q8 is None where n is not a multiple of 32; such rows exist only in float matrices.
    """

    x: F32
    q8: Q8 | None


_SMALLEST_AMAX = np.float32(2.0**-100)


def quantize(x: F32) -> Activation:
    """Quantise `x` (n_tokens, n) f32 to int8 with one f32 scale per 32 values.

    d = amax / 127; q = rint(x * (127 / amax)), halves to even. A group whose amax is below 2^-100 becomes
    zeros with d = 0, so that neither division can overflow.
    """
    if x.shape[-1] % SUB_BLOCK:
        return Activation(x, None)
    groups = x.reshape(x.shape[0], -1, SUB_BLOCK)
    amax = np.abs(groups).max(axis=-1)
    small = amax < _SMALLEST_AMAX
    safe = np.where(small, _ONE, amax)
    inverse = np.where(small, np.float32(0.0), np.float32(127.0) / safe)
    d = np.where(small, np.float32(0.0), amax / np.float32(127.0))
    with np.errstate(invalid="ignore"):
        q = np.rint(groups * inverse[..., None]).astype(np.int8)
    return Activation(x, Q8(q, d, q.sum(axis=-1, dtype=np.int32)))


def to_f16(x: F32) -> NDArray[np.float16]:
    """Round f32 to f16, halves to even: the rounding of the KV cache. Overflow gives infinity."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16)


def rope_frequencies(n_rot: int, freq_base: float, sections: tuple[int, ...]) -> NDArray[np.float64]:
    """Return the angle per position, (n_rot / 2,) f64, of interleaved multi-section RoPE for text.

    freq_base^(-2i / n_rot) in 50-digit decimal arithmetic, so no libm decides a bit. Text gives the same
    position to sections t, h and w and position 0 to the fourth, whose pairs therefore do not turn
    (llama.cpp b8763, `ggml_mrope_cache_init` with `is_imrope`, and the text branch of its position input).
    """
    n_pairs = n_rot // 2
    n_sections = sum(sections)
    angles = np.zeros(n_pairs, dtype=np.float64)
    with localcontext() as context:
        context.prec = 50
        base = Decimal(freq_base)
        for i in range(n_pairs):
            sector = i % n_sections
            if sector < 3 * sections[sector % 3]:
                angles[i] = float(base ** (Decimal(-2 * i) / Decimal(n_rot)))
    return angles


# pi/2 = P1 + P2 + P3, the first two of 33 bits, so that n * P1 and n * P2 are exact for n < 2^20 (Cody, Waite).
_HALF_PI = (
    float.fromhex("0x1.921fb54400000p+0"),
    float.fromhex("0x1.0b4611a600000p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
_SIN_TERMS = tuple(float(Decimal((-1) ** k) / Decimal(math.factorial(2 * k + 1))) for k in range(8, 0, -1))
_COS_TERMS = tuple(float(Decimal((-1) ** k) / Decimal(math.factorial(2 * k))) for k in range(8, 0, -1))


def rope_table(positions: NDArray[np.int64], frequencies: NDArray[np.float64]) -> tuple[F32, F32]:
    """Return cos and sin of position * frequency, each (n_positions, n_rot / 2) f32.

    Computed in float64 from additions and multiplications only (Taylor series after reduction by pi / 2) and
    rounded once, on the host for every backend: no two maths libraries agree on the last bit.
    """
    theta = positions.astype(np.float64)[:, None] * frequencies[None, :]
    quadrant = np.rint(theta * (2.0 / math.pi))
    r = ((theta - quadrant * _HALF_PI[0]) - quadrant * _HALF_PI[1]) - quadrant * _HALF_PI[2]
    z = r * r
    sin = r + r * (z * _horner(z, _SIN_TERMS))
    cos = 1.0 + z * _horner(z, _COS_TERMS)
    k = quadrant.astype(np.int64) & 3
    swapped = (k & 1) == 1
    sin_sign = np.where(k >= 2, -1.0, 1.0)
    cos_sign = np.where((k == 1) | (k == 2), -1.0, 1.0)
    return (
        (cos_sign * np.where(swapped, sin, cos)).astype(np.float32),
        (sin_sign * np.where(swapped, cos, sin)).astype(np.float32),
    )


def _horner(z: NDArray[np.float64], terms: tuple[float, ...]) -> NDArray[np.float64]:
    value = np.full_like(z, terms[0])
    for term in terms[1:]:
        value = value * z + term
    return value
