"""Matrix products against the scalar twin, which unpacks blocks and multiplies from docs/numerics.md alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import gguf
import gguf.quants
import numpy as np
import pytest
from numpy.typing import NDArray

from engine import numerics, quants
from engine.reference import linear
from engine.reference.linear import FloatMatrix, QuantMatrix
from engine.tests import scalar_twin as twin
from engine.tests.models import random_rows
from engine.tests.scalar_twin import assert_same_bits

QUANTISED = sorted(quants.QUANT_FORMATS)
N_OUT = 5


def vectors(n_tokens: int, n: int, seed: int = 0) -> NDArray[np.float32]:
    """Return activations whose groups differ in size; the second group is zero, the third tiny."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n_tokens, n // 32, 32)) * np.exp2(rng.integers(-8, 8, (n_tokens, n // 32, 1)))
    x[:, 1] = 0.0
    if n > 64:
        x[:, 2] = 1e-33
    return x.reshape(n_tokens, n).astype(np.float32)


def float_rows(type_name: str, n_out: int, n: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return random rows of a float format."""
    w = np.random.default_rng(seed).standard_normal((n_out, n)).astype(np.float32)
    raw = gguf.quants.quantize(w, gguf.GGMLQuantizationType[type_name])
    return np.ascontiguousarray(raw).view(np.uint8).reshape(n_out, -1)


def expected(type_name: str, raw: NDArray[np.uint8], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the twin's W x."""
    rows = [row.tobytes() for row in raw]
    return np.array([twin.matmul(type_name, rows, list(token)) for token in x], dtype=np.float32)


@pytest.mark.parametrize("n_in", [256, 1280, 2560], ids=["one block", "33 to 40 sub-blocks", "80 sub-blocks"])
@pytest.mark.parametrize("type_name", QUANTISED)
def test_quantised_product_follows_the_contract(type_name: str, n_in: int) -> None:
    raw, x = random_rows(type_name, N_OUT, n_in, seed=n_in), vectors(2, n_in)
    assert_same_bits(linear.load(type_name, raw).apply(numerics.quantize(x)), expected(type_name, raw, x))


@pytest.mark.parametrize("n_in", [32, 64, 1056])
def test_q8_0_product_of_rows_that_are_no_super_blocks(n_in: int) -> None:
    raw = random_rows("Q8_0", N_OUT, n_in)
    x = np.random.default_rng(0).standard_normal((3, n_in)).astype(np.float32)
    assert_same_bits(linear.load("Q8_0", raw).apply(numerics.quantize(x)), expected("Q8_0", raw, x))


@pytest.mark.parametrize("n_in", [1, 100, 128, 260, 1056])
@pytest.mark.parametrize("type_name", sorted(quants.FLOAT_FORMATS))
def test_float_product_follows_the_contract(type_name: str, n_in: int) -> None:
    raw = float_rows(type_name, N_OUT, n_in)
    x = np.random.default_rng(1).standard_normal((2, n_in)).astype(np.float32)
    assert_same_bits(linear.load(type_name, raw).apply(numerics.quantize(x)), expected(type_name, raw, x))


@pytest.mark.parametrize("type_name", [*QUANTISED, *sorted(quants.FLOAT_FORMATS)])
def test_dequantised_weights_equal_the_twin(type_name: str) -> None:
    quantised = type_name in quants.QUANT_FORMATS
    raw = random_rows(type_name, N_OUT, 512) if quantised else float_rows(type_name, N_OUT, 100)
    assert_same_bits(quants.dequantize(type_name, raw), [twin.dequantize(type_name, row.tobytes()) for row in raw])


@pytest.mark.parametrize("type_name", QUANTISED)
def test_product_of_the_largest_weights_and_activations_is_exact(type_name: str) -> None:
    raw = np.full((3, 256 // quants.QUANT_FORMATS[type_name].n_weights * block_n_bytes(type_name)), 0xFF, np.uint8)
    raw.view(quants.QUANT_FORMATS[type_name].block)["d"] = 1.0
    if type_name == "Q6_K":  # scale -128 on values of -32: 4096 each
        blocks = raw.view(quants.QUANT_FORMATS[type_name].block)
        blocks["ql"], blocks["qh"], blocks["scales"] = 0, 0, -128
    if "dmin" in (quants.QUANT_FORMATS[type_name].block.names or ()):
        raw.view(quants.QUANT_FORMATS[type_name].block)["dmin"] = 1.0
    x = np.full((1, 256), 1.0, np.float32)
    assert_same_bits(linear.load(type_name, raw).apply(numerics.quantize(x)), expected(type_name, raw, x))


def block_n_bytes(type_name: str) -> int:
    return quants.QUANT_FORMATS[type_name].block.itemsize


@pytest.mark.parametrize("type_name", [*QUANTISED, "F16"])
def test_a_token_has_the_same_bits_alone_and_in_a_pack(type_name: str) -> None:
    quantised = type_name in quants.QUANT_FORMATS
    raw = random_rows(type_name, 40, 1280) if quantised else float_rows(type_name, 40, 1280)
    matrix, x = linear.load(type_name, raw), vectors(7, 1280)
    together = matrix.apply(numerics.quantize(x))
    alone = np.concatenate([matrix.apply(numerics.quantize(x[t : t + 1])) for t in range(7)])
    assert_same_bits(together, alone)


@pytest.mark.parametrize("type_name", ["Q4_K", "Q6_K", "F32"])
def test_threads_and_cache_sized_pieces_change_no_bit(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised = type_name in quants.QUANT_FORMATS
    raw = random_rows(type_name, 101, 2560) if quantised else float_rows(type_name, 101, 2560)
    h = numerics.quantize(vectors(3, 2560))
    whole = linear.load(type_name, raw).apply(h)
    monkeypatch.setattr(linear, "_THREADED_N_WEIGHTS", 1)
    monkeypatch.setattr(linear, "_SCRATCH_N_BYTES", 3 * 101 * 32 * 4)
    monkeypatch.setattr(linear, "_UNPACK_N_WEIGHTS", 3 * raw.shape[1])
    matrix = linear.load(type_name, raw)
    for n_threads in (1, 2, 3, 7):
        with ThreadPoolExecutor(n_threads) as threads:
            assert_same_bits(linear.apply(matrix, h, threads, n_threads), whole)


def test_order_matters_in_the_data_of_these_tests() -> None:
    raw, x = random_rows("Q4_K", 200, 2560), vectors(1, 2560)
    exact = quants.dequantize("Q4_K", raw).astype(np.float64) @ x[0].astype(np.float64)
    ours = linear.load("Q4_K", raw).apply(numerics.quantize(x))[0]
    fold = (quants.dequantize("Q4_K", raw) @ x[0]).astype(np.float32)
    assert (ours != fold).mean() > 0.9
    assert np.abs(ours - exact).max() > 0


@pytest.mark.parametrize("type_name", QUANTISED)
def test_error_is_that_of_the_activations_and_little_more(type_name: str) -> None:
    raw = random_rows(type_name, 64, 5120)
    x = np.random.default_rng(2).standard_normal((4, 5120)).astype(np.float32)
    h = numerics.quantize(x)
    assert h.q8 is not None
    weights = quants.dequantize(type_name, raw).astype(np.float64)
    rounded = (h.q8.q * h.q8.d[..., None].astype(np.float64)).reshape(4, -1)
    ours = linear.load(type_name, raw).apply(h).astype(np.float64)

    def relative_error(reference: NDArray[np.float64]) -> float:
        return float(np.linalg.norm(ours - reference) / np.linalg.norm(reference))

    assert relative_error(rounded @ weights.T) < 2e-7
    assert 4e-3 < relative_error(x.astype(np.float64) @ weights.T) < 7e-3


def test_float_product_error_against_float64() -> None:
    raw = float_rows("F32", 64, 5120)
    x = np.random.default_rng(2).standard_normal((4, 5120)).astype(np.float32)
    exact = x.astype(np.float64) @ quants.dequantize("F32", raw).astype(np.float64).T
    ours = linear.load("F32", raw).apply(numerics.quantize(x))
    assert np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 4e-7


def test_loaded_matrices_know_their_shape() -> None:
    quantised = linear.load("Q5_K", random_rows("Q5_K", 7, 512))
    floats = linear.load("BF16", float_rows("BF16", 7, 100))
    assert isinstance(quantised, QuantMatrix)
    assert isinstance(floats, FloatMatrix)
    assert (quantised.n_in, quantised.n_out) == (512, 7)
    assert (floats.n_in, floats.n_out) == (100, 7)


def test_quantised_matrix_refuses_a_vector_that_was_not_quantised() -> None:
    matrix = linear.load("Q8_0", random_rows("Q8_0", 2, 64))
    with pytest.raises(ValueError, match="a quantised matrix needs rows of 32 n, not 48"):
        matrix.apply(numerics.quantize(np.zeros((1, 48), dtype=np.float32)))


def test_denormal_terms_are_kept() -> None:
    raw = np.zeros((1, 34), dtype=np.uint8)
    blocks = raw.view(quants.QUANT_FORMATS["Q8_0"].block)
    blocks["d"], blocks["qs"][..., 0] = 2.0**-24, 1
    x = np.zeros((1, 32), dtype=np.float32)
    x[0, 0] = 2.0**-100
    y = linear.load("Q8_0", raw).apply(numerics.quantize(x))
    assert 0 < y[0, 0] < 2.0**-123  # (2^-24 * 127) * (2^-100 / 127)
    assert_same_bits(y, expected("Q8_0", raw, x))
