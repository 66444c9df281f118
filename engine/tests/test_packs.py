"""How packs of tokens are shared out to blocks; needs no device."""

from __future__ import annotations

import itertools
import re

import pytest

from engine.cuda import packs
from engine.cuda.buffers import MAX_PACK
from engine.cuda.compile import KERNELS_DIR
from engine.cuda.streams import Target

H200 = Target.of("sm_90", 132)


@pytest.mark.parametrize("n_sm", [1, 36, 132])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("n_row_blocks", [0, 1, 32, 160, 1088, 7760])
@pytest.mark.parametrize("n_tokens", [2, 8, 9, 40, 41, MAX_PACK])
def test_no_group_is_empty_or_too_large_for_a_block(n_tokens: int, n_row_blocks: int, arch: str, n_sm: int) -> None:
    target = Target.of(arch, n_sm)
    n_tiles, n_groups = packs.n_tiles(n_tokens), packs.n_groups(n_row_blocks, n_tokens, target)
    edges = [group * n_tiles // n_groups for group in range(n_groups + 1)]  # as block_at shares them out
    sizes = [end - begin for begin, end in itertools.pairwise(edges)]
    assert min(sizes) >= 1
    assert max(sizes) <= packs.Limits.of(target).token_tiles


@pytest.mark.parametrize(("n_out", "n_groups"), [(34816, 2), (16384, 2), (8192, 3), (5120, 2)])
def test_seventy_tokens_are_cut_finer_where_that_saves_a_wave(n_out: int, n_groups: int) -> None:
    assert packs.n_groups(n_out // packs.BLOCK_ROWS, 70, H200) == n_groups


@pytest.mark.parametrize(("arch", "n_blocks"), [("sm_80", 2), ("sm_86", 2), ("sm_90", 3), ("sm_100", 3), ("sm_120", 2)])
def test_several_blocks_share_a_multiprocessor(arch: str, n_blocks: int) -> None:
    target = Target.of(arch, n_sm=1)
    assert packs.Limits.of(target).n_resident(target) == n_blocks


@pytest.mark.parametrize("number", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_limits_are_those_that_the_kernels_are_compiled_with(number: int) -> None:
    text = (KERNELS_DIR / "mma_rows.cuh").read_text()
    condition = re.search(r"#if defined\(__CUDA_ARCH__\) && \((.*)\)\n", text)
    assert condition is not None
    small = {int(n) for n in re.findall(r"__CUDA_ARCH__ == (\d+)", condition[1])}
    (first_small,) = re.findall(r"__CUDA_ARCH__ >= (\d+)", condition[1])
    constants = re.findall(r"MAX_TOKEN_TILES = (\d+), N_STAGES = (\d+)", text)
    of_small, *of_others = [packs.Limits(int(tiles), int(stages)) for tiles, stages in constants]
    assert len(of_others) == 2
    expected = [of_small] if 10 * number in small or 10 * number >= int(first_small) else of_others
    assert {packs.Limits.of(Target.of(f"sm_{number}", 1))} == set(expected)


def test_tiles_hold_whole_groups_of_32_for_whole_tiles_of_8_tokens() -> None:
    assert packs.tiles_n_bytes(9, 100) == 16 * (96 + 3 * 8)
