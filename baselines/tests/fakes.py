"""A build of llama.cpp whose programs are fake_llama.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from baselines.llama_cpp.build import LlamaBuild

_FAKE = Path(__file__).with_name("fake_llama.py")
PROGRAMS = ("llama-worker", "llama-server", "llama-bench")


def fake_build(folder: Path, fault: str, token_ids: Sequence[int] = range(1, 10), n_vocab: int = 16) -> LlamaBuild:
    """Write the programs into `folder` and return them as a build; token_ids: what a right run generates."""
    tools = folder / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    (folder / "canned.json").write_text(json.dumps({"n_vocab": n_vocab, "token_ids": list(token_ids)}))
    for name in PROGRAMS:
        start = f'exec "{sys.executable}" -S -E "{_FAKE}" {name} {fault} "{folder}" "$@"'
        (tools / name).write_text(f"#!/bin/sh\n{start}\n")
        (tools / name).chmod(0o755)
    for name in ("libllama.so", "libllama.so.0.0.8763", "libllama.so.0.0.0"):
        (tools / name).write_bytes(b"")
    return LlamaBuild(folder, tools, 8763, {}, PROGRAMS, "cc 1.0", folder / "log", tool_folders=(tools,))
