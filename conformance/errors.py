"""The error types a user of the suite can meet; each message is one line that names what to change."""

from __future__ import annotations

from engine.errors import one_line


class ConformanceError(Exception):
    """Base of every expected failure. The CLI prints it as `error: MESSAGE`."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class ScenarioError(ConformanceError):
    """A scenario file does not follow the schema; the message names file, line and key."""


class FixtureError(ConformanceError):
    """The model of a scenario is missing, cannot be made, or is not the file that the scenario pins."""


class RecordError(ConformanceError):
    """A record cannot be read, or is of another schema version."""


class SubjectError(ConformanceError):
    """Another engine answered something that is no answer, or stopped."""


class SubjectTimeoutError(SubjectError):
    """Another engine did not answer in time."""


class SubjectUnreachableError(SubjectError):
    """Another engine is not there; it is not measured."""


class BaselineUnavailableError(ConformanceError):
    """This machine cannot run llama.cpp on the device that a scenario asks for; the scenario is not measured."""
