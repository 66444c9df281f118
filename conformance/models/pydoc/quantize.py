"""Quantise the F16 file with llama.cpp's own quantiser: `python -m conformance.models.pydoc.quantize F16 OUT`.

Builds llama-quantize of the pinned llama.cpp if it is not in the cache. The mix has every type of the article's
model; there is no importance matrix.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from baselines.errors import BaselineError
from baselines.llama_cpp.build import BuildOptions, LlamaBuild, ensure_build
from baselines.llama_cpp.process import run_process
from baselines.llama_cpp.progress import show_progress

__all__ = ["TENSOR_TYPES", "quantize"]

BASE_TYPE = "Q4_K_S"
TENSOR_TYPES = (
    (r"token_embd", "q6_k"),  # the output head as well
    (r"ssm_(alpha|beta)", "f32"),
    (r"attn_(output|v)", "q6_k"),
    (r"attn_k\.", "q5_k"),
    (r"ssm_out", "q5_k"),
    (r"blk\.(0|7)\.ffn_down", "q6_k"),
    (r"blk\.(2|4)\.ffn_down", "iq3_s"),
    (r"ffn_down", "q5_k"),
    (r"blk\.(1|5)\.ffn_(gate|up)", "iq4_xs"),
)
"""Patterns of tensor names and their types; the first that fits counts. What none fits gets the type that BASE_TYPE's
own mix has for it (Q4_K, and Q5_K for most of attn_qkv); vectors and convolutions stay F32."""

_DEADLINE_S = 600


def quantize(build: LlamaBuild, model: Path, out: Path) -> None:
    """Write `model` (F16) as the mix of TENSOR_TYPES to `out`; raises BaselineError if llama-quantize fails."""
    types = [part for pattern, kind in TENSOR_TYPES for part in ("--tensor-type", f"{pattern}={kind}")]
    argv: list[str | Path] = [build.tool("llama-quantize"), *types, model, out, BASE_TYPE, "1"]
    result = run_process(argv, deadline_s=_DEADLINE_S)
    if result.status != "ok":
        raise BaselineError(f"llama-quantize could not write {out} ({result.status}): {result.log_tail(1)}")


def main() -> int:
    """Quantise what the command line names; exit code 1 with one line if that fails."""
    parser = argparse.ArgumentParser(prog="python -m conformance.models.pydoc.quantize", description=__doc__)
    parser.add_argument("model", metavar="F16", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path)
    given = parser.parse_args()
    try:
        with show_progress() as progress:
            build = ensure_build(BuildOptions(native=True, full=True), progress)
            quantize(build, given.model, given.out)
    except BaselineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
