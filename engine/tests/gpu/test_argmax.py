"""The greedy choice: the lowest id among the largest logits, wherever they lie, and the words around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine.cuda import argmax, faults
from engine.tests.gpu.arrays import control_words, cupy, no_fault, poison, poisoned, random_f32, upload
from engine.tests.gpu.conftest import Compile

pytestmark = pytest.mark.gpu

N_VOCAB = (1, 31, 1000, 2048, 2049, 4097, 248320)  # a block takes 2048 logits
OP = faults.kernel_argument(faults.Op.ARGMAX)
N_CTX, POSITION = 64, 17


@pytest.fixture(scope="module")
def kernels(compile_all: Compile) -> Any:
    return compile_all(argmax.expressions())


class Chooser:
    """argmax with all that it writes to."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.scratch = cupy.zeros(argmax.SCRATCH_N_WORDS, np.uint32)
        self.next_token, self.chosen, self.fault = poisoned((1,), np.int32), poisoned((N_CTX,), np.int32), no_fault()
        self.outcome = upload.mapped((2,), np.int32)

    def __call__(self, logits: NDArray[np.float32], n_tokens: int = 1) -> int:
        words, results = control_words(POSITION), (self.next_token, self.chosen, self.outcome.device)
        self.outcome.host[...] = -1
        args = (self._kernels, cupy.asarray(logits), words, n_tokens, self.scratch, *results)
        argmax.argmax(*args, fault=self.fault, op=OP)
        cupy.cuda.get_current_stream().synchronize()
        token = int(cupy.asnumpy(self.next_token)[0])
        assert self.outcome.host.tolist() == [token, self.fault_word]
        return token

    @property
    def fault_word(self) -> int:
        return int(cupy.asnumpy(self.fault)[0])


@pytest.fixture
def choose(kernels: Any) -> Chooser:
    return Chooser(kernels)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n_vocab", N_VOCAB)
def test_random_logits(choose: Chooser, n_vocab: int, seed: int) -> None:
    logits = random_f32(np.random.default_rng(seed), n_vocab, scale=5.0)
    assert choose(logits) == int(np.argmax(logits))
    assert choose.fault_word == 0


@pytest.mark.parametrize("n_vocab", N_VOCAB)
@pytest.mark.parametrize("value", [3.5, 0.0, -0.0, -2.0, 1e-42, 3.4e38, -3.4e38])
def test_all_equal_gives_the_first(choose: Chooser, n_vocab: int, value: float) -> None:
    assert choose(np.full(n_vocab, value, dtype=np.float32)) == 0


TIES = {
    "in one thread": (5, 5 + 256),
    "in one warp": (64, 65),
    "across warps": (31, 32),
    "across blocks": (2047, 2048),
    "first and last": (0, 248319),
    "far blocks": (100_000, 200_000),
    "many": (7, 8, 300, 2048, 9999, 150_000, 248319),
    "last alone": (248319,),
    "last of a block": (4095,),
}


@pytest.mark.parametrize("level", [8.0, -1.0, 0.0, -0.0, 1e-44])
@pytest.mark.parametrize("ids", TIES.values(), ids=TIES)
def test_a_tie_gives_the_lowest_id(choose: Chooser, ids: tuple[int, ...], level: float) -> None:
    logits = random_f32(np.random.default_rng(1), 248320)
    logits = np.where(logits >= np.float32(level), np.float32(level) - np.abs(logits) - np.float32(1.0), logits)
    logits[list(ids)] = level
    assert choose(logits) == ids[0]


@pytest.mark.parametrize(("first", "second"), [(0.0, -0.0), (-0.0, 0.0)])
@pytest.mark.parametrize("distance", [1, 32, 256, 2048, 200_000])
def test_zeros_of_either_sign_are_equal(choose: Chooser, first: float, second: float, distance: int) -> None:
    logits = np.full(248320, -1.0, dtype=np.float32)
    logits[1000], logits[1000 + distance] = first, second
    assert choose(logits) == 1000


@pytest.mark.parametrize(("low", "high"), [(-1e-45, 1e-45), (0.0, 1e-45), (-1.0, -0.99999994), (1e-45, 3e-45)])
def test_neighbouring_values_are_told_apart(choose: Chooser, low: float, high: float) -> None:
    logits = np.full(5000, low, dtype=np.float32)
    logits[4000] = high
    assert logits[4000] > logits[0]
    assert choose(logits) == 4000


@pytest.mark.parametrize("n_tokens", [1, 4, 16])
def test_only_the_entry_of_the_packs_last_position_is_written(choose: Chooser, n_tokens: int) -> None:
    logits = random_f32(np.random.default_rng(2), 3000)
    token = choose(logits, n_tokens)
    expected = poison((N_CTX,), np.int32)
    expected[POSITION + n_tokens - 1] = token
    np.testing.assert_array_equal(cupy.asnumpy(choose.chosen), expected)


def test_scratch_is_left_as_the_next_call_needs_it(choose: Chooser) -> None:
    rng = np.random.default_rng(3)
    for n_vocab in (248320, 100, 5000, 1, 248320):
        logits = random_f32(rng, n_vocab)
        assert choose(logits) == int(np.argmax(logits))
        assert not cupy.asnumpy(choose.scratch).any()


def test_the_outcome_has_the_fault_that_an_earlier_op_left(choose: Chooser) -> None:
    word = int(faults.kernel_argument(faults.Op.ATTENTION, 7)) | 1
    choose.fault.set(np.array([word], np.uint32))
    logits = random_f32(np.random.default_rng(5), 3000)
    logits[1000] = np.nan
    choose(logits)
    assert choose.outcome.host[1] == word


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "NaN"), (np.inf, "infinity"), (-np.inf, "infinity")])
@pytest.mark.parametrize("at", [0, 2047, 2048, 123_456, 248319])
def test_a_logit_that_is_not_finite_sets_the_fault_word(choose: Chooser, at: int, value: float, kind: str) -> None:
    logits = random_f32(np.random.default_rng(4), 248320)
    logits[at] = value
    choose(logits)
    message = f"output head: op argmax produced {kind}; the weights or the state are damaged"
    assert faults.describe(choose.fault_word) == message
