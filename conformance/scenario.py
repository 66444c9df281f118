"""Scenarios: what is asked, of which model, with which settings, and what makes the answer right. Data only.

A scenario is one YAML file. It has no expressions, no inheritance and no templates, and its version is the SHA256
of its content, so a record says exactly what it answered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from conformance.errors import ScenarioError
from conformance.http_json import is_loopback
from engine.errors import shown
from engine.generate import MAX_N_CTX, MAX_N_THREADS, PrefillMode

DEFAULT_FOLDER = Path(__file__).parent / "scenarios"
CONTROL_BACKEND = "numpy"
"""The backend whose ops the negative controls replace."""
_KINDS = ("tiny", "small", "27b", None)
_MAX_N_BYTES, _MAX_DEPTH = 1 << 16, 8  # PyYAML takes some 50 us a number
_TEXT, _SEQUENCE, _MAPPING = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map"))
_TAGS = {_TEXT, *(f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "bool", "null"))}
Size = Annotated[int, Field(ge=1, lt=1 << 31)]
"""A number that llama.cpp reads into an int."""
_NAME = "^[a-z0-9][a-z0-9._-]*$"
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Data(BaseModel):
    """Base of everything read from or written to disk: no unknown keys, no type conversion, never changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelRef(Data):
    """The GGUF file: a fixture made from `kind` and `seed`, or `file`, relative to the scenario's folder."""

    kind: Literal["tiny", "small", "27b"] | None = None
    seed: int | None = None
    file: str | None = None
    sha256: Sha256

    @model_validator(mode="after")
    def _one_origin(self) -> ModelRef:
        if (self.kind is None) == (self.file is None):
            raise ValueError("expected either kind and seed, or file")
        if (self.kind is None) != (self.seed is None):
            raise ValueError("seed belongs to kind: expected both or neither")
        return self


class BaselineFlags(Data):
    """llama.cpp's flags besides -c, -ctk and -ctv, under the names of its long options.

    override_tensor: "REGEX=BUFFER[,...]", null for none. split_mode: none keeps to the first GPU and needs one.
    """

    threads: Annotated[int, Field(ge=1, le=MAX_N_THREADS)]
    n_gpu_layers: Annotated[int, Field(ge=0, lt=1 << 31)]
    override_tensor: str | None
    split_mode: Literal["none", "layer"]
    flash_attn: Literal["on", "off"]
    batch_size: Size
    ubatch_size: Size
    repack: bool

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """What llama.cpp runs on."""
        return "cuda" if self.n_gpu_layers else "cpu"


class ExtraSubject(Data):
    """Another engine that is asked, too, if a run names it: a command, or a server.

    command: program and arguments, started in the scenario's folder. url: of a server on this machine; null, or for one
    elsewhere, the run gives the address.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    api: Literal["command", "llama-server", "openai"]
    command: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _one_address(self) -> ExtraSubject:
        if (self.api == "command") != (self.command is not None):
            raise ValueError("expected command with api: command, and only there")
        if self.command is not None and self.url is not None:
            raise ValueError("expected either command or url")
        if self.url is not None and not is_loopback(self.url):
            raise ValueError(f"url: {shown(self.url)} is not this machine, give it with --subject {self.name}=URL")
        return self


class _Check(Data):
    because: Annotated[str, Field(min_length=1)]

    @property
    def label(self) -> str:
        """Name the check apart from others of the same kind."""
        names = [getattr(self, key, None) for key in ("check", "against")]
        return " ".join(filter(None, names))


class FinalLogitsBitwiseEqual(_Check):
    """Logits after the prompt have the same bits as those of another run of the engine."""

    check: Literal["final_logits_bitwise_equal"]
    against: Literal["token_major", "layer_major", "second_run"]


class FinalLogitsHash(_Check):
    """Logits after the prompt hash to the golden value."""

    check: Literal["final_logits_le32_sha256"]
    expected: Sha256


class FinalGreedyTokenId(_Check):
    """The first generated id is the golden one."""

    check: Literal["final_greedy_token_id"]
    expected: Annotated[int, Field(ge=0)]


class GeneratedTokenIdsHash(_Check):
    """All generated ids hash to the golden value."""

    check: Literal["generated_token_ids_le64_sha256"]
    expected: Sha256


class GeneratedTokenIdsEqual(_Check):
    """All generated ids are llama.cpp's, one by one."""

    check: Literal["generated_token_ids_equal"]
    against: Literal["llama.cpp"]


class SameHashAtBothNCtx(_Check):
    """The generated ids do not depend on the context's capacity: `against` is the scenario with the other one."""

    check: Literal["same_hash_at_both_n_ctx"]
    against: str


class SmallestTop2Gap(_Check):
    """llama.cpp's own choice is never closer than `min`: the margin that makes equal ids a fair demand."""

    check: Literal["smallest_top2_gap"]
    min: Annotated[float, Field(gt=0)]


class OracleNmse(_Check):
    """Our NMSE to the float64 oracle is at most `max_ratio` times llama.cpp's."""

    check: Literal["oracle_nmse"]
    against: Literal["llama.cpp"]
    max_ratio: Annotated[float, Field(gt=0)]


class LowestIdOnTie(_Check):
    """Of two ids with the same largest logit the lower one is taken."""

    check: Literal["lowest_id_on_tie"]


CheckSpec: TypeAlias = Annotated[
    FinalLogitsBitwiseEqual
    | FinalLogitsHash
    | FinalGreedyTokenId
    | GeneratedTokenIdsHash
    | GeneratedTokenIdsEqual
    | SameHashAtBothNCtx
    | SmallestTop2Gap
    | OracleNmse
    | LowestIdOnTie,
    Field(discriminator="check"),
]


class Scenario(Data):
    """One question and all that its answer depends on.

    Lengths are in tokens, deadline_s in seconds per process. n_ctx is a multiple of 256, to which llama.cpp rounds it
    up. n_threads: those of our NumPy backend. vram_budget_n_bytes: hard limit on the device memory of our CUDA
    backend, null for none. prefill: the first mode is that of the generation, the others repeat the prompt only.
    controls: whether the negative controls run here. subjects: other engines to ask. default: whether a run that names
    no scenario has this one.
    """

    name: Annotated[str, Field(pattern=_NAME)]
    asks: Annotated[str, Field(min_length=1)]
    default: bool
    model: ModelRef
    prompt_token_ids: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...], Field(min_length=1)]
    n_predict: Size
    n_ctx: Annotated[int, Field(ge=256, le=MAX_N_CTX, multiple_of=256)]
    type_k: Literal["f16"]
    type_v: Literal["f16"]
    n_threads: Annotated[int, Field(ge=1, le=MAX_N_THREADS)]
    vram_budget_n_bytes: Annotated[int, Field(ge=1)] | None
    baseline: BaselineFlags
    backends: Annotated[tuple[Literal["numpy", "cuda"], ...], Field(min_length=1)]
    prefill: Annotated[tuple[PrefillMode, ...], Field(min_length=1)]
    controls: bool
    deadline_s: Annotated[float, Field(gt=0)]
    checks: Annotated[tuple[CheckSpec, ...], Field(min_length=1)]
    subjects: tuple[ExtraSubject, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        n_cells = len(self.prompt_token_ids) + self.n_predict - 1
        if n_cells > self.n_ctx:
            raise ValueError(f"prompt and generated tokens need n_ctx {n_cells}, found {self.n_ctx}")
        if self.controls and CONTROL_BACKEND not in self.backends:
            raise ValueError(f"the controls are wrong engines on {CONTROL_BACKEND}: expected it in backends")
        labels = [check.label for check in self.checks]
        twice = {label for label in labels if labels.count(label) > 1}
        if twice:
            raise ValueError(f"expected each check once, found twice: {', '.join(sorted(twice))}")
        names = [subject.name for subject in self.subjects]
        if len(set(names)) < len(names):
            raise ValueError("expected each subject under a name of its own")
        others = {*self.prefill[1:], "second_run"}
        for check in self.checks:
            if isinstance(check, FinalLogitsBitwiseEqual) and check.against not in others:
                raise ValueError(f"{check.label}: expected {check.against} in prefill, after the first mode")
        return self

    @property
    def version(self) -> str:
        """SHA256 of the content, independent of comments and layout, and of keys for which there is nothing to say."""
        values = self.model_dump(mode="json", exclude=None if self.subjects else {"subjects"})
        content = json.dumps(values, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()

    @property
    def margin(self) -> float | None:
        """The declared smallest top-2 gap of llama.cpp, in logits."""
        return next((check.min for check in self.checks if isinstance(check, SmallestTop2Gap)), None)

    @property
    def compared_scenarios(self) -> tuple[str, ...]:
        """Names of the scenarios that the checks compare with."""
        return tuple(check.against for check in self.checks if isinstance(check, SameHashAtBothNCtx))

    def backends_to_run(self, asked: Sequence[str], controls: Sequence[str]) -> list[str]:
        """Return those of `asked` that this scenario is for, and the one that `controls`, if any, are compared with.

        Empty when it is for none of them: then nothing of it runs, the controls neither.
        """
        wanted = {*asked} & {*self.backends}
        if wanted and self.controls and controls:
            wanted.add(CONTROL_BACKEND)
        return [backend for backend in self.backends if backend in wanted]


@dataclass(frozen=True)
class ScenarioFile:
    """A scenario and where it was read from."""

    path: Path
    scenario: Scenario

    @cached_property
    def version(self) -> str:
        """Version of the scenario."""
        return self.scenario.version


def load_scenario(path: Path) -> ScenarioFile:
    """Read and check one file; raise ScenarioError naming file, line, key, what was found and expected."""
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_N_BYTES + 1)
        if len(content) > _MAX_N_BYTES:
            raise ScenarioError(f"{path}: has more than {_MAX_N_BYTES} bytes, expected a scenario")
        text = content.decode()
        _check_events(path, text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise ScenarioError(f"{path}:1: the file is empty, expected a scenario")
        _check_node(path, root, yaml.SafeLoader(""))
        data = yaml.safe_load(text)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path that no system takes
        raise ScenarioError(f"{path}: cannot be read: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ScenarioError(f"{path}:{line}: not YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ScenarioError(f"{path}:1: not YAML: {' '.join(str(error).split())}") from None
    try:
        scenario = Scenario.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise ScenarioError(_first_error(path, root, data, error)) from None
    return ScenarioFile(path, scenario)


def all_scenarios() -> list[ScenarioFile]:
    """Return the scenarios that come with the suite, in the order in which they run."""
    files = [load_scenario(path) for path in DEFAULT_FOLDER.glob("*.yaml")]
    return sorted(files, key=_place)


def _place(file: ScenarioFile) -> tuple[int, str, int]:
    """Order by model, small ones first, then by question, then by capacity."""
    scenario = file.scenario
    return _KINDS.index(scenario.model.kind), scenario.name.removesuffix(f"-c{scenario.n_ctx}"), scenario.n_ctx


def default_scenarios() -> list[ScenarioFile]:
    """Return the scenarios of a run that names none: those that every machine can run."""
    return [file for file in all_scenarios() if file.scenario.default]


def select_scenarios(names: Sequence[str]) -> list[ScenarioFile]:
    """Return the scenarios called `names` (a name, or the path of a file), after those their answers need.

    Those are the scenarios their checks compare with, and one that runs the negative controls: no run goes without.
    No names: the default ones. Raises ScenarioError.
    """
    known = {file.scenario.name: file for file in all_scenarios()}
    if not names:
        return default_scenarios()
    chosen = {name: file for name, file in known.items() if file.scenario.controls}

    def add(file: ScenarioFile) -> None:
        scenario = file.scenario
        for other in scenario.compared_scenarios:
            if other not in chosen and other != scenario.name:
                add(_find(other, known, file.path.parent))
        if not chosen.setdefault(scenario.name, file).path.samefile(file.path):
            raise ScenarioError(f"{file.path}: another scenario of this run is named {scenario.name!r}, too")

    for name in names:
        add(_find(name, known, Path()))
    return list(chosen.values())


def find_scenario(name: str) -> ScenarioFile:
    """Return the one scenario called `name`, a name or the path of a file; raises ScenarioError."""
    return _find(name, {file.scenario.name: file for file in all_scenarios()}, Path())


def _find(name: str, known: dict[str, ScenarioFile], folder: Path) -> ScenarioFile:
    if name in known:
        return known[name]
    for path in (folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return load_scenario(path)
    raise ScenarioError(f"no scenario named {name!r}, expected a YAML file or one of: {', '.join(known)}")


def _check_events(path: Path, text: str) -> None:
    """Raise ScenarioError for references, which a few lines can multiply to any size, and for deep nesting."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        line = f"{path}:{event.start_mark.line + 1 if event.start_mark else 1}"
        if isinstance(event, yaml.AliasEvent):
            raise ScenarioError(f"{line}: *{event.anchor} is a reference, expected the value itself")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise ScenarioError(f"{line}: more than {_MAX_DEPTH} levels of nesting, expected fewer")


def _check_node(path: Path, node: yaml.Node, loader: yaml.SafeLoader) -> None:
    """Raise ScenarioError for what is no plain data, and for a key given twice, of which YAML lets the second win."""
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(path, node, loader)
        return
    if node.tag not in (_SEQUENCE, _MAPPING):
        raise ScenarioError(f"{path}:{node.start_mark.line + 1}: found {node.tag!r}, expected a list or a mapping")
    seen: set[str] = set()
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ((None, item) for item in node.value):
        if key is not None:
            if key.tag != _TEXT:
                raise ScenarioError(f"{path}:{key.start_mark.line + 1}: found a key {key.tag!r}, expected text")
            if key.value in seen:
                raise ScenarioError(f"{path}:{key.start_mark.line + 1}: key {key.value!r} is given twice")
            seen.add(key.value)
        _check_node(path, value, loader)


def _check_scalar(path: Path, node: yaml.ScalarNode, loader: yaml.SafeLoader) -> None:
    """Raise ScenarioError for a date or another value that is none of JSON's, and for a number that is none."""
    try:
        if node.tag in _TAGS:
            loader.construct_object(node)
            return
    except (ValueError, KeyError):  # a number of 5,000 digits; what an explicit tag calls a number
        pass
    found = f"{shown(node.value)} as {node.tag!r}"
    raise ScenarioError(
        f"{path}:{node.start_mark.line + 1}: found {found}, expected text (in quotes if need be), a number or a boolean"
    )


def _first_error(path: Path, root: yaml.Node, data: Any, error: ValidationError) -> str:
    """Describe the first error in one line; unknown keys come before the keys they were meant to be."""
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    detail = details[0]
    keys = [*_real_keys(detail["loc"], data)]
    line = node_at(root, keys)[0].start_mark.line + 1
    where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".") or "the scenario"
    if detail["type"] == "extra_forbidden":
        return f"{path}:{line}: {where} is an unknown key, expected one of: {', '.join(_known_keys(keys, data))}"
    if detail["type"] == "missing":
        return f"{path}:{line}: {where} is missing"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if detail["type"] == "value_error":
        return f"{path}:{line}: {where}: {message}"
    found = json.dumps(detail["input"], default=str)
    found = found if len(found) <= 60 else found[:57] + "..."
    return f"{path}:{line}: {where} is {found}, expected {message}"


def _real_keys(loc: Iterable[str | int], data: Any) -> Iterator[str | int]:
    """Drop from an error's location what is no key of the file: the tag that chose among the checks."""
    tag = None
    for key in loc:
        if key == tag:
            tag = None
            continue
        yield key
        if isinstance(data, dict):
            data = data.get(key)
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
            tag = data.get("check") if isinstance(data, dict) else None
        else:
            data = None


def node_at(root: yaml.Node, keys: Sequence[str | int]) -> tuple[yaml.Node, bool]:
    """Follow `keys` from `root`; return the node of the last one that exists, and whether all did.

    A mapping's value that spans lines is given by its key, so that the node's line is the one a reader looks for.
    """
    node, shown = root, root
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            pair = next(((k, v) for k, v in node.value if k.value == key), None)
            if pair is None:
                return shown, False
            node = pair[1]
            shown = node if isinstance(node, yaml.ScalarNode) else pair[0]
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
            node = shown = node.value[key]
        else:
            return shown, False
    return shown, True


def _known_keys(keys: Sequence[str | int], data: Any) -> list[str]:
    """List the keys allowed beside the unknown key at `keys`."""
    if keys[0] == "model" and len(keys) > 1:
        return list(ModelRef.model_fields)
    if keys[0] == "baseline" and len(keys) > 1:
        return list(BaselineFlags.model_fields)
    if keys[0] == "subjects" and len(keys) > 2:
        return list(ExtraSubject.model_fields)
    if keys[0] == "checks" and len(keys) > 2:
        kind = (data["checks"][keys[1]]["check"],)
        fields = [subclass.model_fields for subclass in _Check.__subclasses__()]
        return list(next(known for known in fields if get_args(known["check"].annotation) == kind))
    return list(Scenario.model_fields)
