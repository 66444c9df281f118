"""Fixtures of the baseline tests: the built llama.cpp and the tiny model it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from baselines.llama_cpp.build import BuildOptions, LlamaBuild, ensure_build
from baselines.llama_cpp.progress import PlainProgress
from baselines.tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def llama_build() -> LlamaBuild:
    return ensure_build(BuildOptions(), PlainProgress(print))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-text.gguf", with_tokenizer=True)
