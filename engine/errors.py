"""The error types a user of the engine can meet; each message is one line that names what to change."""

from __future__ import annotations

_MAX_MESSAGE, _MAX_VALUE = 600, 120


def one_line(text: str) -> str:
    """Return text as one printable line of at most 600 characters: names and values in it may come from any file."""
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    half = _MAX_MESSAGE // 2
    return line if len(line) <= _MAX_MESSAGE else f"{line[:half]} [...] {line[-half:]}"


def shown(value: object) -> str:
    """Return how a message shows a value found in a file: its repr, cut after 120 characters."""
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= _MAX_VALUE else f"{value[:_MAX_VALUE]!r}..."
    text = repr(value)
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def is_device_failure(error: Exception) -> bool:
    """Say whether an error comes from CuPy or the CUDA driver, which have no class in common: a device that is lost."""
    return type(error).__module__.split(".")[0] in ("cupy", "cupy_backends", "cuda")


class EngineError(Exception):
    """Base of every expected failure. The CLI prints it as `error: MESSAGE` and exits with 1."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ModelFileError(EngineError):
    """A GGUF file is damaged, incomplete or of a kind this engine does not run."""


class RequestError(EngineError):
    """A request cannot be served as asked (empty prompt, id out of range, context too small)."""


class PlacementError(EngineError):
    """The model and its buffers do not fit into the given memory budget."""


class NonFiniteError(EngineError):
    """An op produced NaN or infinity; the message names layer and op."""


class NoDeviceError(EngineError):
    """This machine cannot run the backend that was asked for."""
