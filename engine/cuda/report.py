"""What every kernel of some models takes on every architecture; compiles without a GPU, one process an architecture."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

from engine.cuda import plan
from engine.cuda.compile import Resources, compile_kernels
from engine.cuda.dispatch import Dispatch, Policy
from engine.cuda.streams import Target
from engine.gguf.reader import ModelFile
from engine.model.config import ModelConfig, check_tensors

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures that the kernels are kept free of spills for: data centre and desktop, Ampere to Blackwell."""

_POLICIES: tuple[Policy, ...] = ("streams", "rows")


@dataclass(frozen=True)
class ArchReport:
    """The kernels of one architecture, by name expression in order."""

    arch: str
    resources: tuple[Resources, ...]
    code_n_bytes: int
    was_cached: bool

    @property
    def spilling(self) -> tuple[Resources, ...]:
        """The kernels that keep registers in memory."""
        return tuple(r for r in self.resources if r.spill_n_bytes or r.stack_n_bytes)


def model_expressions(models: Sequence[ModelFile], arch: str) -> list[str]:
    """Return the name expressions of all kernels of the models on `arch`; ModelFileError if one cannot be run."""
    names: set[str] = set()
    for model in models:
        config = ModelConfig.from_model(model)
        check_tensors(model, config)
        for policy in _POLICIES:  # what a device chooses depends on its number of multiprocessors
            names.update(plan.expressions(config, model.tensors, Dispatch(Target.of(arch, n_sm=1), policy)))
    return sorted(names)


def compile_reports(expressions: Mapping[str, Sequence[str]], n_jobs: int) -> Iterator[ArchReport]:
    """Compile the `expressions` of each architecture in `n_jobs` processes; yield reports as they are ready.

    Raises CompileError with the compiler's log.
    """
    spawn = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks of this process
    with ProcessPoolExecutor(min(n_jobs, len(expressions)), mp_context=spawn) as pool:
        jobs = [pool.submit(compile_report, list(names), arch) for arch, names in expressions.items()]
        try:
            for job in as_completed(jobs):
                yield job.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def compile_report(expressions: Sequence[str], arch: str) -> ArchReport:
    """Compile `expressions` for one architecture, or find them in the cache."""
    cubin = compile_kernels(expressions, arch)
    resources = tuple(sorted(cubin.resources(), key=lambda r: r.name))
    return ArchReport(arch, resources, len(cubin.code), cubin.was_cached)


def render(reports: Sequence[ArchReport]) -> str:
    """Return a table, one row a kernel, and a line for every kernel that spills.

    Registers are per thread; the other columns are the largest of the architectures, bytes of shared memory per
    block, of spilled registers and of stack per thread.
    """
    archs = [report.arch for report in reports]
    headers = ["kernel", *archs, "shared", "spilled", "stack"]
    align = ["left"] + ["right"] * (len(headers) - 1)
    table: str = tabulate(_rows(reports), headers, tablefmt="simple", colalign=align)
    spilling = [
        f"{report.arch}: {r.name} spills {r.spill_n_bytes} bytes, stack {r.stack_n_bytes} bytes"
        for report in reports
        for r in report.spilling
    ]
    return "\n".join((table, "", *(spilling or ["no kernel spills"])))


def to_dict(reports: Sequence[ArchReport]) -> dict[str, Any]:
    """Return the reports as plain data."""
    return {
        report.arch: {
            "code_n_bytes": report.code_n_bytes,
            "was_cached": report.was_cached,
            "kernels": [asdict(r) for r in report.resources],
        }
        for report in reports
    }


def _rows(reports: Sequence[ArchReport]) -> Iterator[list[Any]]:
    for of_kernel in zip(*(report.resources for report in reports), strict=True):
        yield [
            of_kernel[0].name,
            *(r.n_registers for r in of_kernel),
            max(r.shared_n_bytes for r in of_kernel),
            max(r.spill_n_bytes for r in of_kernel),
            max(r.stack_n_bytes for r in of_kernel),
        ]
