"""Random quantised blocks, written directly: random quants under block scales chosen for a wanted deviation.

Nothing is quantised here. For each format the variance of a weight made of uniformly random bits is known exactly
(`_MEAN_SQUARE`, in units of d**2), so picking d gives any standard deviation. Every field is exercised: sub-block
scales take all their values, mins differ from scales, d varies from block to block and is negative half of the
time where real quantisers write negative ones (Q6_K, IQ4_XS).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from conformance.models.streams import RandomStream

Bytes = NDArray[np.uint8]

# Mean square of one weight over d**2. sc, m: 6 bits, E[sc**2] = 1333.5; m shares its two high bits with sc and has
# low bits of its own, so E[(sc - m)**2] = 42.5. q of n bits, centred: (4**n - 1) / 12.
_MEAN_SQUARE = {
    "Q4_K": 1333.5 * 21.25 + 7.5**2 * 42.5,
    "Q5_K": 1333.5 * 85.25 + 15.5**2 * 42.5,
    "Q6_K": 5461.5 * 341.5,  # int8 scale (-128..127), quant -32..31
    "IQ4_XS": 341.5 * (72768 / 16),  # scale -32..31, mean square of the 16 values of the non-linear table
    "IQ3_S": 341.0 * (118112 / 2048),  # scale 1, 3, .. 31, mean square of the 512 x 4 values of the grid
    "Q8_0": 5460.5,  # quant -127..127, -127 twice as likely
}


def random_rows(type_name: str, stream: RandomStream, n_rows: int, n_in: int, sigma: float) -> Bytes:
    """Return n_rows rows of n_in random weights of mean 0 and standard deviation sigma.

    Result (n_rows, row bytes) u8 in the layout of `type_name`. Raises ValueError for a format without a writer
    and for a sigma too small for a half-precision block scale.
    """
    if type_name in _FLOAT_ENCODERS:
        values = stream.symmetric(n_rows * n_in) * np.float32(sigma * math.sqrt(3.0))
        return encode_floats(type_name, values).reshape(n_rows, -1)
    if type_name not in _MEAN_SQUARE:
        raise ValueError(f"{type_name}: no random block writer, expected one of {', '.join(supported_types())}")
    n_block, block_n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    blocks = stream.bytes((n_rows * n_in // n_block, block_n_bytes))
    _WRITERS[type_name](blocks, sigma / math.sqrt(_MEAN_SQUARE[type_name]))
    return blocks.reshape(n_rows, -1)


def supported_types() -> list[str]:
    """List the formats `random_rows` can write."""
    return [*_WRITERS, *_FLOAT_ENCODERS]


def encode_floats(type_name: str, values: NDArray[np.float32]) -> Bytes:
    """Return float32 values as little-endian bytes of F32, F16 or BF16, rounded to nearest even."""
    return _FLOAT_ENCODERS[type_name](values).view(np.uint8)


def half(value: float) -> int:
    """Return the bits of a value that float16 holds exactly; raises ValueError if it does not."""
    rounded = np.float16(value)
    if float(rounded) != value:
        raise ValueError(f"block scale {value!r} is not a float16")
    return int(rounded.view(np.uint16))


def scale_steps(target: float) -> tuple[list[int], float]:
    """Return eight mantissas M and a power of two u, with M * u spread by an eighth around target.

    The mantissas have 6 bits, so that 15 * M and 31 * M, the mins of Q4_K and Q5_K, still fit a float16.
    """
    fraction, exponent = math.frexp(target)
    exponent -= 5 if fraction >= 0.875 else 6
    if exponent < -23:
        raise ValueError(f"block scale {target!r} is too small for a float16 with spread")
    centre = int(math.ldexp(target, -exponent) + 0.5)
    return [centre - 4 + step for step in range(8)], math.ldexp(1.0, exponent)


def _write_scale(blocks: Bytes, at: int, table: list[int]) -> None:
    """Replace the two random bytes at `at` of each block by the entry of `table` that the first of them picks."""
    bits = np.array(table, dtype="<u2")[blocks[:, at] % len(table)]
    blocks[:, at : at + 2] = bits.view(np.uint8).reshape(-1, 2)


def _signed_scales(d: float) -> list[int]:
    mantissas, unit = scale_steps(d)
    return [half(sign * mantissa * unit) for sign in (1, -1) for mantissa in mantissas]


def _write_k_quant(blocks: Bytes, d: float, centre: float) -> None:
    """Q4_K and Q5_K: d u16, dmin u16, 12 bytes of scales and mins; dmin = centre * d makes the mean zero."""
    mantissas, unit = scale_steps(d)
    pick = blocks[:, 0] % len(mantissas)
    for at, factor in ((0, 1.0), (2, centre)):
        table = np.array([half(mantissa * unit * factor) for mantissa in mantissas], dtype="<u2")
        blocks[:, at : at + 2] = table[pick].view(np.uint8).reshape(-1, 2)
    blocks[:, 8:12] = blocks[:, 4:8] ^ (blocks[:, 8:12] & 0x0F)


def _write_q4_k(blocks: Bytes, d: float) -> None:
    _write_k_quant(blocks, d, 7.5)


def _write_q5_k(blocks: Bytes, d: float) -> None:
    _write_k_quant(blocks, d, 15.5)


def _write_q6_k(blocks: Bytes, d: float) -> None:
    _write_scale(blocks, 208, _signed_scales(d))


def _write_iq4_xs(blocks: Bytes, d: float) -> None:
    _write_scale(blocks, 0, _signed_scales(d))


def _write_iq3_s(blocks: Bytes, d: float) -> None:
    mantissas, unit = scale_steps(d)
    _write_scale(blocks, 0, [half(mantissa * unit) for mantissa in mantissas])


def _write_q8_0(blocks: Bytes, d: float) -> None:
    mantissas, unit = scale_steps(d)
    _write_scale(blocks, 0, [half(mantissa * unit) for mantissa in mantissas])
    blocks[:, 2:][blocks[:, 2:] == 0x80] = 0x81  # quantisers never write -128


def _to_f32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return values.astype("<f4", copy=False)


def _to_f16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return values.astype("<f2")


def _to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.astype("<f4", copy=False).view("<u4")
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    halves: NDArray[np.uint16] = (rounded >> np.uint32(16)).astype("<u2")
    return halves


_WRITERS: dict[str, Callable[[Bytes, float], None]] = {
    "Q4_K": _write_q4_k,
    "Q5_K": _write_q5_k,
    "Q6_K": _write_q6_k,
    "IQ4_XS": _write_iq4_xs,
    "IQ3_S": _write_iq3_s,
    "Q8_0": _write_q8_0,
}
_FLOAT_ENCODERS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.generic]]] = {
    "F32": _to_f32,
    "F16": _to_f16,
    "BF16": _to_bf16,
}
