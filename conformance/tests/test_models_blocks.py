from __future__ import annotations

import hashlib

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from conformance.models.blocks import half, random_rows, scale_steps, supported_types
from conformance.models.streams import RandomStream

N_ROWS, N_IN, SIGMA = 256, 1024, 0.03125


def _weights(type_name: str, sigma: float = SIGMA) -> NDArray[np.float64]:
    rows = random_rows(type_name, RandomStream(1, type_name), N_ROWS, N_IN, sigma)
    values: NDArray[np.float32] = dequantize(rows, GGMLQuantizationType[type_name])
    return values.reshape(N_ROWS, N_IN).astype(np.float64)


@pytest.mark.parametrize("type_name", supported_types())
def test_weights_have_the_wanted_mean_and_deviation(type_name: str) -> None:
    weights = _weights(type_name)
    assert np.isfinite(weights).all()
    # a block's weights share scales, so the mean of 2**18 of them wanders by about 1/128 of a deviation;
    # the deviation is that of the format's table of 8 steps, within 4 % of the wanted one
    assert abs(weights.mean()) < 0.03 * SIGMA
    assert weights.std() == pytest.approx(SIGMA, rel=0.04)


@pytest.mark.parametrize("type_name", supported_types())
def test_a_random_row_keeps_the_size_of_a_unit_input(type_name: str) -> None:
    x = RandomStream(2, "x").symmetric(N_IN).astype(np.float64) * np.sqrt(3.0)
    y = _weights(type_name, 1 / np.sqrt(N_IN)) @ x
    assert y.std() == pytest.approx(1.0, rel=0.2)


def test_mins_differ_from_scales() -> None:
    blocks = random_rows("Q4_K", RandomStream(1, "mins"), 64, 256, SIGMA)
    scales, mins = blocks[:, 4:8] & 0x3F, blocks[:, 8:12] & 0x3F
    assert (scales != mins).mean() > 0.9


def test_signed_formats_have_both_signs_of_d() -> None:
    for type_name, at in (("Q6_K", 209), ("IQ4_XS", 1)):
        blocks = random_rows(type_name, RandomStream(1, "signs"), 64, 256, SIGMA)
        assert 0.25 < (blocks[:, at] >> 7).mean() < 0.75


def test_q8_0_has_no_minus_128() -> None:
    blocks = random_rows("Q8_0", RandomStream(1, "q8"), 64, 1024, SIGMA).reshape(-1, 34)
    assert not (blocks[:, 2:] == 0x80).any()


def test_scale_steps_surround_the_target_with_few_bits() -> None:
    for target in (1.0, 0.875, 0.001, 3.5e-6):
        mantissas, unit = scale_steps(target)
        assert max(mantissas) < 64
        assert min(mantissas) * unit < target < max(mantissas) * unit
        largest_min = 31 * mantissas[7] * unit / 2
        assert float(np.uint16(half(largest_min)).view(np.float16)) == largest_min


def test_a_scale_below_float16_is_refused() -> None:
    with pytest.raises(ValueError, match="too small"):
        scale_steps(1e-7)
    with pytest.raises(ValueError, match="not a float16"):
        half(1 / 3)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="Q2_K: no random block writer"):
        random_rows("Q2_K", RandomStream(1, "x"), 1, 256, SIGMA)


def test_the_random_stream_is_pinned() -> None:
    words = RandomStream(7, "blk.0.ffn_up.weight").words(1000)
    digest = hashlib.sha256(words.astype("<u8").tobytes()).hexdigest()
    assert digest == "1db22763f79030a672061eb3d95d578e855faa5d92e0b64e3e48ee65de51a1bd"


def test_streams_differ_by_seed_and_label() -> None:
    first = {int(RandomStream(seed, label).words(1)[0]) for seed in (1, 2) for label in ("a", "b")}
    assert len(first) == 4
