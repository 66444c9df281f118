"""Launcher of gated_delta.cu: a Gated DeltaNet layer from the outputs of its projections to the input of ssm_out.

State. `ssm_state` and `conv_state` are what the NumPy backend keeps, in the same layout, both updated in place.
Several value heads, so several blocks, read the convolution inputs of one key head, and they must all have read
before anyone shifts them. Each block draws a ticket (one counter a key head) after reading; the one that draws the
last does the shift. So a single buffer of ssm_d_conv - 1 inputs is enough, whatever packs the tokens come in; no
step counter and no second buffer. The counters go back to zero by themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.cuda.buffers import DeviceActivation, activation_n_bytes
from engine.errors import RequestError

if TYPE_CHECKING:
    import cupy

    from engine.cuda.kernels import Kernels

GDN_THREADS = 512
HEAD_SIZES = (32, 64, 128)
"""Sizes of a head that the kernel is written for."""


class GatedDeltaSizes(Protocol):
    """What gated_delta must know of a model."""

    @property
    def ssm_d_state(self) -> int: ...  # noqa: D102
    @property
    def ssm_d_conv(self) -> int: ...  # noqa: D102
    @property
    def n_k_heads(self) -> int: ...  # noqa: D102
    @property
    def n_v_heads(self) -> int: ...  # noqa: D102
    @property
    def conv_channels(self) -> int: ...  # noqa: D102
    @property
    def value_dim(self) -> int: ...  # noqa: D102
    @property
    def rms_eps(self) -> float: ...  # noqa: D102


@dataclass(frozen=True)
class GatedDeltaWeights:
    """The small tensors of a layer, all f32."""

    conv: cupy.ndarray  # (conv_channels, ssm_d_conv)
    dt: cupy.ndarray  # (n_v_heads,)
    a: cupy.ndarray  # (n_v_heads,)
    norm: cupy.ndarray  # (ssm_d_state,)


@dataclass(frozen=True)
class GatedDeltaState:
    """What a layer keeps from token to token; zero before the first."""

    conv: cupy.ndarray  # conv_state_shape, f32, oldest input first
    ssm: cupy.ndarray  # ssm_state_shape, f32
    tickets: cupy.ndarray  # tickets_shape, u32; may be shared by layers that never run at the same time


def conv_state_shape(config: GatedDeltaSizes) -> tuple[int, int]:
    """Return the shape of a layer's convolution state, f32: 122,880 bytes for 4 taps over 10,240 channels."""
    return config.ssm_d_conv - 1, config.conv_channels


def ssm_state_shape(config: GatedDeltaSizes) -> tuple[int, int, int]:
    """Return the shape of a layer's recurrent state, f32: value heads, value rows, key columns."""
    return config.n_v_heads, config.ssm_d_state, config.ssm_d_state


def tickets_shape(config: GatedDeltaSizes) -> tuple[int]:
    """Return the shape of the counters, u32."""
    return (config.n_k_heads,)


def expressions(config: GatedDeltaSizes, pack: int) -> list[str]:
    """Return the kernels needed; one serves every pack width."""
    return [_expression(config)]


def gated_delta(
    kernels: Kernels,
    config: GatedDeltaSizes,
    weights: GatedDeltaWeights,
    state: GatedDeltaState,
    qkv: cupy.ndarray,
    z: cupy.ndarray,
    alpha: cupy.ndarray,
    beta: cupy.ndarray,
    out: DeviceActivation,
    *,
    fault: cupy.ndarray,
    op: np.uint32,
) -> DeviceActivation:
    """Advance `state` by n_tokens and write the gated, normalised outputs to `out`, (n_tokens, value_dim).

    qkv: (n_tokens, conv_channels) f32, before the convolution; z: (n_tokens, value_dim) f32; alpha, beta:
    (n_tokens, n_v_heads) f32. fault: (1,) u32, set if an output is not finite; op: its faults.kernel_argument.
    """
    kernels[_expression(config)](
        (config.n_v_heads,),
        (GDN_THREADS,),
        (
            qkv,
            z,
            alpha,
            beta,
            weights.conv,
            weights.dt,
            weights.a,
            weights.norm,
            np.int32(qkv.shape[0]),
            np.float32(config.rms_eps),
            np.float32(1.0 / math.sqrt(config.ssm_d_state)),
            state.conv,
            state.ssm,
            state.tickets,
            out.x,
            out.q,
            out.scales,
            op,
            fault,
        ),
    )
    return out


def bytes_moved(config: GatedDeltaSizes) -> int:
    """Return the bytes of one token that must be read and written: states both ways, weights, inputs, outputs."""
    d_conv, channels, value_dim = config.ssm_d_conv, config.conv_channels, config.value_dim
    state = 8 * (value_dim * config.ssm_d_state + (d_conv - 1) * channels)
    weights = 4 * (d_conv * channels + 2 * config.n_v_heads + config.ssm_d_state)
    inputs = 4 * (channels + value_dim + 2 * config.n_v_heads)
    return state + weights + inputs + activation_n_bytes(value_dim)


def _expression(config: GatedDeltaSizes) -> str:
    if config.ssm_d_state not in HEAD_SIZES:
        raise RequestError(f"gated_delta is written for ssm.state_size {HEAD_SIZES}, not {config.ssm_d_state}")
    return f"gated_delta<{config.ssm_d_state}, {config.ssm_d_conv}, {config.n_k_heads}, {config.n_v_heads}>"
