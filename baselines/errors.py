"""The error types a user of the baselines can meet; each message says what was found and what to do."""

from __future__ import annotations


class BaselineError(Exception):
    """Base of every expected failure. The CLI prints it as `error: MESSAGE` and exits with 1."""


class SourceError(BaselineError):
    """The pinned source could not be fetched, or is not what the pin says."""


class BuildError(BaselineError):
    """The build tools are missing or the build failed."""


class WrongBuildError(BaselineError):
    """A libllama that was found is of another build number than the pinned one."""


class BaselineRequestError(BaselineError):
    """A run cannot be started as asked (missing model, empty prompt, context too small)."""


class ProcessError(BaselineError):
    """A program that was to stay up ended, or gave no answer in time."""


class AnswerError(ProcessError):
    """A program ended well or answered, but what it gave cannot be used."""
