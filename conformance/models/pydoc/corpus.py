"""The text the model reads: the topics of Python's own help, `pydoc_data.topics`, split into training and held out."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import dataclass
from pydoc_data.topics import topics

__all__ = ["HELD_OUT", "Corpus", "load_corpus"]

HELD_OUT = ("booleans", "calls", "del", "lambda", "objects", "power", "raise", "subscriptions")
"""Topics kept from training. Other topics repeat nothing of theirs, as they do of half of all topics."""


@dataclass(frozen=True)
class Corpus:
    """Topic name -> text, in the order of the names; sha256 is over all topics, of the Python named."""

    training: dict[str, str]
    held_out: dict[str, str]
    sha256: str
    python_version: str


def load_corpus() -> Corpus:
    """Return the topics of the running Python. Their text differs between Python versions: compare `sha256`.

    Raises KeyError if a held-out topic is not among them.
    """
    whole = dict(sorted(topics.items()))
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode("ascii")).hexdigest()
    held_out = {name: whole.pop(name) for name in HELD_OUT}
    return Corpus(whole, held_out, digest, platform.python_version())
