"""The kernels of one variant, ready to run a model: compiled, loaded, and the passes captured with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from engine.cuda import checked, gemv, plan
from engine.cuda.compile import Cubin, compile_kernels
from engine.cuda.decoder import PassGraph
from engine.cuda.device import Device
from engine.cuda.dispatch import Dispatch
from engine.cuda.kernels import Kernels
from engine.cuda.streams import Streams, Target
from engine.cuda.variants import Variant
from engine.gguf.reader import TensorInfo
from engine.model.config import ModelConfig


@dataclass(frozen=True)
class Build:
    """Kernels, what chooses and launches them, and one captured pass per number of tokens."""

    variant: Variant
    kernels: Kernels
    dispatch: Dispatch
    streams: Streams
    graphs: dict[int, PassGraph] = field(default_factory=dict)


def chosen(
    variant: Variant, config: ModelConfig, tensors: Mapping[str, TensorInfo], target: Target
) -> tuple[Dispatch, list[str]]:
    """Return what chooses a variant's kernels, and the name expressions of all that the model needs, sorted."""
    dispatch = Dispatch(target, variant.policy)
    names = plan.expressions(config, tensors, dispatch)
    return dispatch, sorted([*names, *(checked.expressions() if variant.checks else [])])


def compile_for(
    variants: Sequence[Variant], config: ModelConfig, tensors: Mapping[str, TensorInfo], arch: str, n_sm: int
) -> Iterator[Cubin]:
    """Compile what `make_build` would on a device of n_sm multiprocessors, into the cache; needs no device."""
    for variant in variants:
        _, names = chosen(variant, config, tensors, Target.of(arch, n_sm))
        yield compile_kernels(names, arch, parts=variant.parts)


def make_build(variant: Variant, config: ModelConfig, tensors: Mapping[str, TensorInfo], device: Device) -> Build:
    """Compile what the model needs on the device, or find it in the cache, and load it."""
    dispatch, names = chosen(variant, config, tensors, Target.of(device.arch, device.n_sm))
    kernels = Kernels(names, device.arch, variant.parts, overlaps=variant.overlaps)
    kernels.write_global("iq3s_grid", gemv.iq3s_grid_words())
    return Build(variant, kernels, dispatch, Streams(kernels, dispatch.target))
