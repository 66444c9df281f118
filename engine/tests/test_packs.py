"""How packs of tokens are shared out to blocks; needs no device."""

from __future__ import annotations

import itertools

import pytest

from engine.cuda import packs
from engine.cuda.buffers import MAX_PACK

H200_N_SM = 132


@pytest.mark.parametrize("n_sm", [1, 36, H200_N_SM])
@pytest.mark.parametrize("n_row_tiles", [0, 1, 32, 160, 1088, 7760])
@pytest.mark.parametrize("n_tokens", [2, 8, 9, 40, 41, MAX_PACK])
def test_no_group_is_empty_or_too_large_for_a_block(n_tokens: int, n_row_tiles: int, n_sm: int) -> None:
    n_tiles, n_groups = packs.n_tiles(n_tokens), packs.n_groups(n_row_tiles, n_tokens, n_sm)
    edges = [group * n_tiles // n_groups for group in range(n_groups + 1)]  # as block_at shares them out
    sizes = [end - begin for begin, end in itertools.pairwise(edges)]
    assert min(sizes) >= 1
    assert max(sizes) <= packs.MAX_TOKEN_TILES


@pytest.mark.parametrize(("n_out", "n_groups"), [(34816, 2), (16384, 2), (5120, 3)])
def test_seventy_tokens_are_cut_finer_where_that_saves_a_wave(n_out: int, n_groups: int) -> None:
    assert packs.n_groups(n_out // packs.TILE_ROWS, 70, H200_N_SM) == n_groups


def test_tiles_hold_whole_groups_of_32_for_whole_tiles_of_8_tokens() -> None:
    assert packs.tiles_n_bytes(9, 100) == 16 * (96 + 3 * 8)
