"""The error types a user of the engine can meet; each message is one line that names what to change."""

from __future__ import annotations


class EngineError(Exception):
    """Base of every expected failure. The CLI prints it as `error: MESSAGE` and exits with 1."""


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
