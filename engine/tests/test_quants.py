"""Block formats against the gguf package and against blocks worked out by hand."""

from __future__ import annotations

import gguf
import gguf.quants
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import quants


def random_rows(type_name: str, n_rows: int = 5, n: int = 512, seed: int = 1) -> NDArray[np.uint8]:
    """Return random rows (n_rows, row_n_bytes) u8 whose f16 fields are finite."""
    form = quants.QUANT_FORMATS[type_name]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, (n_rows, n // form.n_weights, form.block.itemsize), dtype=np.uint8)
    blocks = raw.view(form.block)[..., 0]
    for field in ("d", "dmin"):
        if field in (form.block.names or ()):
            blocks[field] = rng.standard_normal(blocks.shape).astype(np.float16)
    return raw.reshape(n_rows, -1)


@pytest.mark.parametrize("type_name", sorted(quants.QUANT_FORMATS))
def test_block_size_and_weights_equal_the_gguf_package(type_name: str) -> None:
    qtype = gguf.GGMLQuantizationType[type_name]
    form = quants.QUANT_FORMATS[type_name]
    assert gguf.GGML_QUANT_SIZES[qtype] == (form.n_weights, form.block.itemsize)
    raw = random_rows(type_name)
    np.testing.assert_array_equal(quants.dequantize(type_name, raw), gguf.quants.dequantize(raw, qtype))


@pytest.mark.parametrize("type_name", sorted(quants.FLOAT_FORMATS))
def test_float_formats_equal_the_gguf_package(type_name: str) -> None:
    values = np.random.default_rng(2).standard_normal((3, 64)).astype(np.float32)
    qtype = gguf.GGMLQuantizationType[type_name]
    raw = gguf.quants.quantize(values, qtype).view(np.uint8).reshape(3, -1)
    np.testing.assert_array_equal(quants.dequantize(type_name, raw), gguf.quants.dequantize(raw, qtype))


@pytest.mark.parametrize("type_name", sorted(quants.QUANT_FORMATS))
def test_integer_dots_of_the_largest_weights_stay_exact_in_f32(type_name: str) -> None:
    form = quants.QUANT_FORMATS[type_name]
    worst = 0
    for fill in (0x00, 0xFF, 0x7F, 0x80):
        raw = np.full((1, 256 // form.n_weights * form.block.itemsize), fill, dtype=np.uint8)
        for field_fill in (0x00, 0xFF, 0x7F, 0x80):
            blocks = raw.copy().view(form.block)
            for name in form.block.names or ():
                if name in ("scales", "scales_h", "scales_l"):
                    blocks[name] = np.full(blocks[name].shape, field_fill).astype(blocks[name].dtype)
            q = np.abs(form.unpack(blocks).q.astype(np.int64)).reshape(-1, 32)
            worst = max(worst, int(q.sum(axis=1).max()) * 127)
    assert worst < 2**24


def test_q4_k_by_hand() -> None:
    block = np.zeros(1, dtype=quants.QUANT_FORMATS["Q4_K"].block)
    block["d"], block["dmin"] = 0.5, 0.25
    block["scales"][0, 0] = 3  # scale of sub-block 0
    block["scales"][0, 5] = 4 | (2 << 6)  # minimum of sub-block 1, and the top bits of minimum 5
    block["scales"][0, 9] = 0x7A  # low nibbles of scale 5 (0xA) and minimum 5 (0x7)
    block["qs"][0, 0] = 0x96  # weight 0 is 6, weight 32 is 9
    weights = quants.dequantize("Q4_K", block.view(np.uint8).reshape(1, -1))[0]
    assert weights[0] == 0.5 * 3 * 6
    assert weights[32] == -0.25 * 4
    assert weights[160] == -0.25 * (7 + 32)


def test_iq3_s_by_hand() -> None:
    block = np.zeros(1, dtype=quants.QUANT_FORMATS["IQ3_S"].block)
    block["d"] = 2.0
    block["scales"][0, 0] = 0x50  # sub-block 1 has s = 5
    block["signs"][0, 4] = 0x02  # weight 33 is negative
    weights = quants.dequantize("IQ3_S", block.view(np.uint8).reshape(1, -1))[0]
    first = np.asarray(gguf.quants.IQ3_S.grid).reshape(512, 4)[0]
    assert weights[32] == 2.0 * 11 * first[0]
    assert weights[33] == -2.0 * 11 * first[1]
