"""What llama.cpp's programs answer, checked before anything is computed from it: types, ranges, numbers of tokens."""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from baselines.errors import AnswerError

_MAX_INT32, _MAX_TIME_NS = 2**31 - 1, 10**15  # eleven days
_Time = Annotated[int, Field(gt=0, le=_MAX_TIME_NS)]
_Count = Annotated[int, Field(gt=0, le=_MAX_INT32)]
_Number = Annotated[int, Field(ge=0, le=_MAX_INT32)]
_Milliseconds = Annotated[float, Field(gt=0, le=_MAX_TIME_NS * 1e-6, allow_inf_nan=False)]


class _Answer(BaseModel):
    """A part of an answer; keys that are not read may be there."""

    model_config = ConfigDict(strict=True, frozen=True)


_A = TypeVar("_A")


class Loaded(_Answer):
    """What llama-worker says of itself once its model is loaded; libllama is the path of the library in use."""

    load_time_ns: _Time
    n_vocab: _Count
    n_threads: _Count
    system_info: str
    libllama: str
    compiler: str


class Generated(_Answer):
    """One generation of llama-worker; a gap is None where a logit is not finite."""

    token_ids: list[_Number]
    top2_gap: list[float | None]
    n_non_finite: _Number
    prefill_time_ns: _Time
    first_token_time_ns: _Time
    decode_time_ns: list[_Time]
    wall_time_ns: _Time


class WorkerRun(Loaded, Generated):
    """What llama-worker writes at the end of a run of its own."""


class Tokenized(_Answer):
    """What llama-worker writes about texts: the ids of each."""

    tokens: list[list[_Number]]


class Timings(_Answer):
    """llama-server's own clock."""

    prompt_n: int
    prompt_ms: _Milliseconds
    predicted_ms: Annotated[float, Field(ge=0, le=_MAX_TIME_NS * 1e-6, allow_inf_nan=False)]  # 0 for a single id


class ServerCompletion(_Answer):
    """llama-server's answer to /completion; model is the name that the server was given."""

    model: str
    tokens: list[_Number]
    timings: Timings


class ServerEvent(_Answer):
    """One event of a streamed answer of llama-server; the last one has no ids."""

    tokens: list[_Number]


class ServerProps(_Answer):
    """llama-server's answer to /props."""

    model_alias: str
    model_path: str
    build_info: str


class BenchTest(_Answer):
    """One test of llama-bench: a prompt of n_prompt, or n_gen generated tokens; what is not named is kept as it is."""

    model_config = ConfigDict(extra="allow")

    n_prompt: int
    n_gen: int
    build_number: int
    samples_ns: Annotated[list[_Time], Field(min_length=1, max_length=1)]  # two would be one with a decimal comma


BENCH_OUTPUT = TypeAdapter(list[BenchTest])


def parse_answer(kind: type[_A] | TypeAdapter[_A], text: str | bytes, program: str) -> _A:
    """Read JSON as `kind`; raises AnswerError naming the program, the key and what is wrong with it."""
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        where = f"{key}: " if key else ""
        raise AnswerError(f"{program} gave an answer that cannot be read: {where}{first['msg']}") from None


def require_n_tokens(ids: list[int], n_predict: int, program: str) -> None:
    """Raise AnswerError unless a program gave as many ids as it was asked for."""
    if len(ids) != n_predict:
        raise AnswerError(f"{program} gave {len(ids)} of {n_predict} tokens")
