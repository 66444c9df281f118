"""Checks that the engine does without: a launch behind each op that looks for NaN and infinity in its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cuda import faults
from engine.cuda.buffers import DeviceActivation
from engine.decoder import Run
from engine.wrap import WrappedOps

if TYPE_CHECKING:
    import cupy

    from engine.cuda.ops import CudaOps

THREADS, VALUES = 256, 4
OPS = ("project", "project_add", "gate_up_silu", "gated_norm", "qk_norm_rope", "sigmoid_gate", "head")
"""The ops that return what a kernel has written."""


def expressions() -> list[str]:
    """Return the kernels needed."""
    return ["finite_check"]


class CheckedOps(WrappedOps):
    """Passes every op on to the CUDA backend and checks its result; passes are captured as ever."""

    inner: CudaOps

    def append(self, run: Run, state: object, tokens: Sequence[int], pack: int) -> cupy.ndarray:
        """Append by captured passes."""
        return self.inner.append(run, state, tokens, pack)

    def decoder(self, run: Run, state: object) -> Any:
        """Decode by a captured pass."""
        return self.inner.decoder(run, state)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.inner, name)
        if name not in OPS:
            return function

        def checked(*arguments: Any) -> Any:
            result = function(*arguments)
            for one in result if isinstance(result, tuple) else (result,):
                self._check(one.x if isinstance(one, DeviceActivation) else one)
            return result

        return checked

    def _check(self, x: cupy.ndarray) -> None:
        op = faults.kernel_argument(faults.Op.HEAD)
        arguments = (x, np.int32(x.size), op, self.inner.fault)
        self.inner.kernels["finite_check"]((-(-x.size // (THREADS * VALUES)),), (THREADS,), arguments)
