"""Fixture GGUF models: random weights with a planted margin, the same bytes from the same seed everywhere."""

from conformance.models.make import ModelSummary, make_model, write_model
from conformance.models.presets import PRESETS
from conformance.models.prompts import prompt_ids
from conformance.models.spec import ModelSpec, PlannedTensor, TypeRule, plan_tensors

__all__ = [
    "PRESETS",
    "ModelSpec",
    "ModelSummary",
    "PlannedTensor",
    "TypeRule",
    "make_model",
    "plan_tensors",
    "prompt_ids",
    "write_model",
]
