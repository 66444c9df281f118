"""Rows of the embedding table against the NumPy backend, bit for bit, and the control words that come with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import quants
from engine.cuda import embed, gemv
from engine.tests.edge_blocks import EDGES, edge_rows
from engine.tests.gpu.arrays import assert_same_bits, poison, poisoned, upload
from engine.tests.gpu.conftest import Compile
from engine.tests.gpu.test_gemv import FORMATS, random_rows

pytestmark = pytest.mark.gpu

N_EMBD = (256, 1024, 5120)


@pytest.fixture(scope="module")
def kernels(compile_all: Compile) -> Any:
    expressions = [embed.expression(name, n) for name in FORMATS for n in N_EMBD]
    expressions += [embed.expression("F16", 90), embed.expression("Q8_0", 96), "&iq3s_grid"]
    compiled = compile_all(expressions)
    compiled.write_global("iq3s_grid", gemv.iq3s_grid_words())
    return compiled


def check(kernels: Any, type_name: str, raw: Any, n_embd: int) -> None:
    n_tokens = len(raw)
    rows, staged = upload.mapped(raw.shape, np.uint8), upload.mapped((n_tokens, 2), np.int32)
    rows.host[...] = raw
    staged.host[...] = np.arange(2 * n_tokens).reshape(n_tokens, 2) * 1_000_003
    x, control = poisoned((n_tokens, n_embd), np.float32), poisoned((n_tokens + 1, 2), np.int32)
    found = embed.embed(kernels, type_name, rows.device, staged.device, x, control[:n_tokens])
    with np.errstate(all="ignore"):
        assert_same_bits(found, quants.dequantize(type_name, raw))
    assert_same_bits(control, np.concatenate([staged.host, poison((1, 2), np.int32)]))


@pytest.mark.parametrize("n_tokens", [1, 3, 72])
@pytest.mark.parametrize("n_embd", N_EMBD)
@pytest.mark.parametrize("type_name", FORMATS)
def test_embed(kernels: Any, type_name: str, n_embd: int, n_tokens: int) -> None:
    check(kernels, type_name, random_rows(type_name, n_tokens, n_embd, seed=n_tokens), n_embd)


@pytest.mark.parametrize(("type_name", "n_embd"), [("F16", 90), ("Q8_0", 96)])
def test_rows_that_end_inside_a_block(kernels: Any, type_name: str, n_embd: int) -> None:
    check(kernels, type_name, random_rows(type_name, 2, n_embd, seed=1), n_embd)


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("type_name", FORMATS)
def test_edge_blocks(kernels: Any, type_name: str, edge: str) -> None:
    check(kernels, type_name, edge_rows(type_name, edge, 3), 1024)
