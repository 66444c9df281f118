"""Launcher of embed.cu: rows of the embedding table, as they lie in the file, to f32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels

EMBED_THREADS = 256


def expression(type_name: str, n_embd: int) -> str:
    """Return the name expression of the kernel for a table of that type."""
    return f"embed<{type_name}, {n_embd}>"


def bytes_moved(row_n_bytes: int, n_embd: int) -> int:
    """Return the bytes that one token's row, read as it lies in the file and written as f32, comes to."""
    return row_n_bytes + 4 * n_embd


def embed(
    kernels: Kernels,
    type_name: str,
    rows: cupy.ndarray,
    staged: cupy.ndarray,
    x: cupy.ndarray,
    control: cupy.ndarray,
) -> cupy.ndarray:
    """Write the weights of rows (n_tokens, row_n_bytes) u8 to x (n_tokens, n_embd) f32 and return it.

    staged: (n_tokens, 2) i32, written to `control`, of the same shape. rows and staged are the device's side of
    upload.mapped(): they are read where they are, once, in 16-byte words that begin at multiples of 16 from there.
    """
    n_tokens, n_embd = x.shape
    grid = (-(-n_embd // EMBED_THREADS), n_tokens)
    kernels[expression(type_name, n_embd)](grid, (EMBED_THREADS,), (rows, np.int64(rows.shape[1]), staged, x, control))
    return x
