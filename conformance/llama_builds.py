"""The builds of llama.cpp that a run needs: one for the CPU, one for CUDA, each made when first asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from baselines.errors import BuildError
from baselines.llama_cpp.build import BuildOptions, LlamaBuild, ensure_build
from baselines.llama_cpp.progress import Progress
from baselines.llama_cpp.toolchain import find_toolchain
from baselines.llama_cpp.worker import WorkerRequest, WorkerResult, run_worker
from conformance.errors import BaselineUnavailableError
from conformance.gpu import this_gpu


@dataclass(frozen=True)
class LlamaCpp:
    """A build of llama.cpp, as `conformance.runner.Baseline`."""

    build: LlamaBuild

    @property
    def build_number(self) -> int:
        """Build number of its libllama."""
        return self.build.build_number

    @property
    def compiler(self) -> str:
        """Compiler it was built with."""
        return self.build.compiler

    def run(self, request: WorkerRequest) -> WorkerResult:
        """Run the worker."""
        return run_worker(self.build, request)


@dataclass
class LlamaBuilds:
    """Opens llama.cpp on a device, "cpu" or "cuda".

    options: those of the build for the CPU, whose token ids are the same on every machine; the one for CUDA adds the
    native instructions and cuda_architectures (empty: the GPUs of this machine). A build of the user's own,
    options.llama_cpp, serves both.
    """

    options: BuildOptions
    cuda_architectures: tuple[str, ...]
    progress: Progress
    _open: dict[str, LlamaCpp] = field(default_factory=dict)

    def open(self, device: str) -> LlamaCpp:
        """Return llama.cpp on `device`, built now if need be.

        Raises BaselineUnavailableError where this machine cannot run it on CUDA, BaselineError if the build fails.
        """
        if device not in self._open:
            self._open[device] = LlamaCpp(self._build_cuda() if device == "cuda" else self._build(self.options))
        return self._open[device]

    def _build_cuda(self) -> LlamaBuild:
        if this_gpu() is None:
            raise BaselineUnavailableError("llama.cpp on CUDA needs an NVIDIA GPU: nvidia-smi finds none")
        if self.options.llama_cpp is not None:
            build = self._build(self.options)
            if not any(build.library_folder.glob("*ggml-cuda*")):
                raise BaselineUnavailableError("the llama.cpp given by --llama-cpp is built without CUDA")
            return build
        try:
            find_toolchain(cuda=True)
        except BuildError as error:
            raise BaselineUnavailableError(f"llama.cpp cannot be built for CUDA: {error}") from None
        options = replace(self.options, cuda=True, native=True, cuda_architectures=self.cuda_architectures)
        return self._build(options)

    def _build(self, options: BuildOptions) -> LlamaBuild:
        return ensure_build(options, self.progress)
