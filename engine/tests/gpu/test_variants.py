"""Every variant of the kernels gives the bits of the engine, whichever kernels it runs; so do parts of a step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

from engine.cuda.checked import CheckedOps
from engine.cuda.variants import FULL, VARIANTS, Variant
from engine.generate import Engine, Generation, load_engine
from engine.ops import Ops
from engine.tests.gpu.arrays import assert_same_bits
from engine.tests.models import Shape, write_model

if TYPE_CHECKING:
    from engine.cuda.ops import CudaOps

pytestmark = pytest.mark.gpu

STREAMED = Shape(d_state=128, n_embd=1024, n_ff=1024, types=("Q5_K", "Q6_K", "IQ3_S"))
PROMPT = [11, 400, 7]
N_PREDICT = 3


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path: Path = write_model(tmp_path_factory.mktemp("model") / "model.gguf", STREAMED, seed=1)
    return load_engine(path, n_ctx=64, backend="cuda")


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Generation:
    return engine.run(PROMPT, N_PREDICT, keep_logits=True)


@pytest.mark.parametrize("variant", VARIANTS[1:], ids=lambda one: one.name)
def test_a_variant_has_the_same_bits(engine: Engine, expected: Generation, variant: Variant) -> None:
    ops = cast("CudaOps", engine.ops)
    full = ops.build(FULL)
    ops.use(ops.build(variant))
    try:
        varied = replace(engine, ops=cast(Ops, CheckedOps(cast(Ops, ops)))) if variant.checks else engine
        found = varied.run(PROMPT, N_PREDICT, keep_logits=True)
    finally:
        ops.use(full)
    assert found.generated_token_ids == expected.generated_token_ids
    assert found.logits is not None
    assert expected.logits is not None
    assert_same_bits(np.asarray(found.logits), np.asarray(expected.logits))
