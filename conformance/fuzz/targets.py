"""What is fuzzed: each target takes any bytes and returns; an exception that leaves it is a fault of the project."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from conformance.errors import ConformanceError
from conformance.hostile import gguf_bytes as g
from conformance.hostile.cases import CASES
from conformance.records import read_record
from conformance.scenario import DEFAULT_FOLDER, load_scenario
from engine.cli import parse_ids
from engine.errors import EngineError
from engine.gguf.reader import open_model
from engine.gguf.tokenizer import Tokenizer
from engine.inspect import inspect_report

__all__ = ["KEPT_FOLDER", "SEED_PREFIX", "TARGETS", "keep", "seeds", "written_seeds"]

KEPT_FOLDER = Path(__file__).parent / "seeds"
"""TARGET.tar.xz: inputs that earlier runs found to reach code that no other did."""
SEED_PREFIX = "seed-"
"""How the files are named that a run starts from."""
_DATA_N_BYTES = len(g.sound().build()) - g.sound().boundaries()["padding"]
_RECORDS = Path(__file__).parents[2] / "results/v1"


def model_file(data: bytes) -> None:
    """Open, inspect and tokenize with a file that begins with `data` and has room for the sound model's tensors."""
    with _file(data) as path, _expected_errors(EngineError):
        os.truncate(path, len(data) + _DATA_N_BYTES)
        model = open_model(path)
        for name in model.tensors:
            model.raw(name)
        dict(model.metadata)
        inspect_report(path, 16).render()
        Tokenizer.from_model(model).encode("abc <|im_end|> ab")


def vocabulary(data: bytes) -> None:
    """Build a tokenizer from lines of tokens, a blank line, lines of merges, a blank line, and encode the rest."""
    tokens, _, rest = data.partition(b"\n\n")
    merges, _, text = rest.partition(b"\n\n")
    model = g.sound()
    model.array("tokenizer.ggml.tokens", g.STRING, tokens.split(b"\n"))
    model.array("tokenizer.ggml.merges", g.STRING, merges.split(b"\n"))
    model.without("tokenizer.ggml.token_type")
    with _file(model.build()) as path, _expected_errors(EngineError):
        tokenizer = Tokenizer.from_model(open_model(path))
        ids = tokenizer.encode(text.decode("utf-8", "surrogateescape"))
        assert all(0 <= token < len(tokenizer.vocabulary) for token in ids), "an id outside the vocabulary"
        tokenizer.decode_bytes(ids, special=True)


def scenario(data: bytes) -> None:
    """Load a scenario and compute what a run takes from it."""
    with _file(data) as path, _expected_errors(ConformanceError):
        file = load_scenario(path)
        assert len(file.version) == 64
        json.dumps(file.scenario.model_dump(mode="json"), allow_nan=False)


def record(data: bytes) -> None:
    """Read a record."""
    with _file(data) as path, _expected_errors(ConformanceError):
        read_record(path).model_dump_json()


def token_ids(data: bytes) -> None:
    """Parse the prompt ids of a command line."""
    with _expected_errors(EngineError):
        parse_ids(data.decode("utf-8", "surrogateescape"))


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (model_file, vocabulary, scenario, record, token_ids)
}


def seeds(target: str) -> Iterator[bytes]:
    """Yield the inputs that fuzzing of `target` starts from."""
    yield from _kept(target)
    yield from written_seeds(target)


def written_seeds(target: str) -> Iterator[bytes]:
    """Yield the inputs of `target` that somebody wrote: malformed model files, and sound examples of the others."""
    if target == "model_file":
        yield from _headers()
    elif target == "vocabulary":
        yield "\n".join([*g.TOKENS, "", "a b", "ab c", "", "abc ab<|im_end|>\u00e9 1's"]).encode()
    elif target == "scenario":
        yield from (path.read_bytes() for path in sorted(DEFAULT_FOLDER.glob("*.yaml")))
    elif target == "record":
        yield from (path.read_bytes() for path in sorted(_RECORDS.glob("*/*/*.json"))[:4])
    else:
        yield b"1,2 3"


def keep(target: str, folder: Path) -> None:
    """Keep the inputs in `folder` as seeds of `target`, in place of those kept before; the file names no machine."""
    with tarfile.open(KEPT_FOLDER / f"{target}.tar.xz", "w:xz") as archive:
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(SEED_PREFIX):
                data = path.read_bytes()
                member = tarfile.TarInfo(path.name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def _kept(target: str) -> Iterator[bytes]:
    with tarfile.open(KEPT_FOLDER / f"{target}.tar.xz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                yield file.read()


def _headers() -> Iterator[bytes]:
    """Yield the beginning of each malformed file, as long as the sound model's header at most."""
    longest = g.sound().boundaries()["padding"] + 128
    with tempfile.TemporaryDirectory() as name:
        for number, case in enumerate(CASES):
            folder = Path(name, str(number))
            folder.mkdir()
            path = case.make(folder)
            if path.is_file():
                yield path.read_bytes()[:longest]


@contextmanager
def _file(data: bytes) -> Iterator[Path]:
    """Yield a file with this content, in memory where the system has such a folder."""
    memory = Path("/dev/shm")
    with tempfile.NamedTemporaryFile(dir=memory if memory.is_dir() else None, suffix=".input") as file:
        file.write(data)
        file.flush()
        yield Path(file.name)


@contextmanager
def _expected_errors(kind: type[Exception]) -> Iterator[None]:
    """Take errors of the project's own for an answer, if they are one line."""
    try:
        yield
    except kind as error:
        if not str(error).isprintable():
            raise AssertionError(f"not one printable line: {error!r}") from error
