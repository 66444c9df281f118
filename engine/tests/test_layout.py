"""The buffers of the CUDA backend: the state is what the forward pass asks for, and projections fit their places."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.cuda.layout import Buffer, buffers, projected_widths
from engine.model.config import expected_tensors
from engine.model.state import new_state
from engine.tests.models import CONFIG_27B


class AskedFor:
    """Remembers which buffers the state is made of."""

    def __init__(self) -> None:
        self.asked: dict[str, tuple[tuple[int, ...], Any]] = {}

    def state_buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.asked[name] = (shape, dtype)


def test_the_state_is_planned_under_the_names_that_it_is_asked_for() -> None:
    ops: Any = AskedFor()
    new_state(CONFIG_27B, ops, 512)
    state = {"conv_state", "gdn_state", "kv_cache"}
    planned = {name: b for name, b in buffers(CONFIG_27B, 512, 128).items() if b.region in state}
    assert {name: (b.shape, b.dtype) for name, b in planned.items()} == ops.asked


@pytest.mark.parametrize(("dtype", "n_bytes"), [(np.float32, 512), (np.float16, 256), (np.int8, 256)])
def test_a_buffer_is_padded_to_256_bytes(dtype: Any, n_bytes: int) -> None:
    assert Buffer("x", (3, 30), dtype).n_bytes == n_bytes


def test_projections_have_room_for_every_matrix_that_is_written_there() -> None:
    shapes, widths = expected_tensors(CONFIG_27B), projected_widths(CONFIG_27B)
    for il, names in ((0, ("attn_qkv", "attn_gate", "ssm_alpha", "ssm_beta")), (3, ("attn_q", "attn_k", "attn_v"))):
        for name, width in zip(names, widths, strict=False):
            assert shapes[f"blk.{il}.{name}.weight"][1] <= width


@pytest.mark.parametrize("n_ctx", [8, 512, 2048, 16384])
def test_what_shares_memory_lies_inside_it_and_apart_where_it_must(n_ctx: int) -> None:
    planned = buffers(CONFIG_27B, n_ctx, 128)
    for buffer in planned.values():
        if buffer.inside is not None:
            assert buffer.n_bytes == 0
            assert buffer.offset_n_bytes + buffer.size_n_bytes <= planned[buffer.inside].n_bytes
    logits, given = planned["logits"], planned["given_logits"]
    assert (logits.inside, given.inside, planned["q"].inside) == ("ffn.x", "ffn.x", "mixed.x")
    assert given.offset_n_bytes == logits.size_n_bytes


def test_logits_that_do_not_fit_beside_have_their_own_memory() -> None:
    wide = replace(CONFIG_27B, n_ff=1024)
    planned = buffers(wide, 512, 128)
    assert planned["logits"].n_bytes == planned["given_logits"].n_bytes == 248320 * 4
