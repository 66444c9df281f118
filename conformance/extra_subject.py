"""Put a scenario's question to an engine that is not ours: a command, or a server with llama-server's or OpenAI's API.

Token ids go in and come out; the client takes the time of each request, and keeps what the other side says of its own.
Every request is sent twice, under a deadline each: an engine that answers differently the second time is not gated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from baselines.errors import AnswerError, ProcessError
from baselines.llama_cpp.answers import ServerCompletion, parse_answer
from baselines.llama_cpp.process import LiveProcess
from baselines.llama_cpp.server import checked_completion, completion_body
from conformance.errors import SubjectError, SubjectTimeoutError, SubjectUnreachableError
from conformance.http_json import HttpJson
from conformance.records import RequestTimes
from conformance.scenario import ExtraSubject, Scenario, ScenarioFile
from conformance.subject import Status

N_REQUESTS = 2
_STATUS: tuple[tuple[type[SubjectError], Status], ...] = (
    (SubjectTimeoutError, "timeout"),
    (SubjectUnreachableError, "not_measured"),
    (SubjectError, "failed"),
)
_MAX_TOKEN_ID = 1 << 31


@dataclass(frozen=True)
class Answer:
    """The ids that came out of one request, and its times."""

    token_ids: list[int]
    times: RequestTimes


@dataclass(frozen=True)
class ExtraResult:
    """How it went; answers has N_REQUESTS entries if status is "ok", else none. effective: what it says of itself."""

    status: Status
    reason: str | None
    answers: list[Answer] = field(default_factory=list)
    effective: dict[str, Any] = field(default_factory=dict)
    log_tail: str = ""


def run_extra_subject(spec: ExtraSubject, url: str | None, file: ScenarioFile, model: Path) -> ExtraResult:
    """Ask `spec`, at `url` where one is given in place of the scenario's own; what goes wrong is a status."""
    try:
        if spec.api == "command":
            return _run_command(spec, file, model)
        base = url or spec.url
        if base is None:
            raise SubjectUnreachableError(f"no address: add --subject {spec.name}=URL")
        return _run_server(spec, HttpJson(base, file.scenario.deadline_s), file.scenario)
    except SubjectError as error:
        status = next(status for kind, status in _STATUS if isinstance(error, kind))
        return ExtraResult(status, str(error))


def command_request(scenario: Scenario, model: Path) -> str:
    """Return the line that a command reads: what is asked, as JSON."""
    values = {
        "model": str(model.absolute()),
        "prompt_token_ids": scenario.prompt_token_ids,
        "n_predict": scenario.n_predict,
        "n_ctx": scenario.n_ctx,
        "type_k": scenario.type_k,
        "type_v": scenario.type_v,
    }
    return json.dumps(values, separators=(",", ":"))


def _run_command(spec: ExtraSubject, file: ScenarioFile, model: Path) -> ExtraResult:
    """Start the program in the scenario's folder, write a request a line, read an answer a line."""
    assert spec.command is not None
    scenario, request = file.scenario, command_request(file.scenario, model)
    try:
        process = LiveProcess(spec.command, cwd=file.path.parent.absolute())
    except ProcessError as error:
        raise SubjectUnreachableError(str(error)) from None
    with process:
        answers = []
        for _ in range(N_REQUESTS):
            start_ns = time.perf_counter_ns()
            line = _ask(process, request, scenario.deadline_s)
            answers.append(_command_answer(line, scenario, time.perf_counter_ns() - start_ns))
        return ExtraResult("ok", None, answers, log_tail="\n".join(process.log.splitlines()[-20:]))


def _ask(process: LiveProcess, request: str, deadline_s: float) -> str:
    end = time.monotonic() + deadline_s
    try:
        return process.ask(request, deadline_s)
    except ProcessError as error:
        kind = SubjectTimeoutError if time.monotonic() >= end else SubjectError
        raise kind(str(error)) from None


def _command_answer(line: str, scenario: Scenario, wall_time_ns: int) -> Answer:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        raise SubjectError(f"answered {line[:60]!r}, expected one line of JSON") from None
    if not isinstance(values, dict):
        raise SubjectError(f"answered {line[:60]!r}, expected an object")
    times = RequestTimes(
        client_wall_time_ns=wall_time_ns,
        server_prompt_time_ns=_time(values, "prompt_time_ns"),
        server_generation_time_ns=_time(values, "generation_time_ns"),
    )
    return Answer(_checked_ids(values.get("token_ids"), scenario.n_predict), times)


def _time(values: dict[str, Any], key: str) -> int | None:
    """Return a time that the other side states, None if it does not."""
    value = values.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise SubjectError(f"{key} is {value!r}, expected nanoseconds as a whole number")
    return value


def _checked_ids(ids: Any, n_predict: int) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < _MAX_TOKEN_ID for token in ids):
        raise SubjectError(f"gave {str(ids)[:60]!r} as token_ids, expected a list of token ids")
    if len(ids) != n_predict:
        raise SubjectError(f"gave {len(ids)} token ids, expected {n_predict}: it must not stop at an end token")
    return ids


def _run_server(spec: ExtraSubject, http: HttpJson, scenario: Scenario) -> ExtraResult:
    api = _APIS[spec.api]
    model = api.served_model(http)
    answers = []
    for _ in range(N_REQUESTS):
        start_ns = time.perf_counter_ns()
        found = http.ask(api.path, api.body(model, scenario.prompt_token_ids, scenario.n_predict))
        answers.append(api.answer(found, scenario, time.perf_counter_ns() - start_ns))
    return ExtraResult("ok", None, answers, {"model": model})


class _LlamaServer:
    """llama-server's own /completion, which ik_llama.cpp has, too."""

    path = "/completion"

    def served_model(self, http: HttpJson) -> str | None:
        path = http.ask("/props").get("model_path")
        return Path(path).name if isinstance(path, str) else None

    def body(self, model: str | None, prompt_ids: Sequence[int], n_predict: int) -> dict[str, Any]:
        return completion_body(prompt_ids, n_predict)

    def answer(self, found: dict[str, Any], scenario: Scenario, wall_time_ns: int) -> Answer:
        try:
            answer = parse_answer(ServerCompletion, json.dumps({"model": "", **found}), "llama-server")
            n_prompt, n_predict = len(scenario.prompt_token_ids), scenario.n_predict
            completion = checked_completion(answer, n_prompt, n_predict, wall_time_ns)
        except AnswerError as error:
            raise SubjectError(str(error)) from None
        times = RequestTimes(
            client_wall_time_ns=wall_time_ns,
            server_prompt_time_ns=completion.prompt_time_ns,
            server_generation_time_ns=completion.generation_time_ns,
        )
        return Answer(_checked_ids(completion.token_ids, scenario.n_predict), times)


class _OpenAi:
    """OpenAI's /v1/completions with two additions that vLLM has: `ignore_eos` and `return_token_ids`."""

    path = "/v1/completions"

    def served_model(self, http: HttpJson) -> str | None:
        try:
            return str(http.ask("/v1/models")["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise SubjectError("/v1/models names no model") from None

    def body(self, model: str | None, prompt_ids: Sequence[int], n_predict: int) -> dict[str, Any]:
        values = {"model": model, "prompt": list(prompt_ids), "max_tokens": n_predict, "temperature": 0.0}
        return values | {"ignore_eos": True, "return_token_ids": True}

    def answer(self, found: dict[str, Any], scenario: Scenario, wall_time_ns: int) -> Answer:
        try:
            ids = found["choices"][0]["token_ids"]
            n_prompt = (found.get("usage") or {}).get("prompt_tokens")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise SubjectError("the answer has no choices[0].token_ids: can it return token ids?") from None
        if n_prompt not in (None, len(scenario.prompt_token_ids)):
            raise SubjectError(f"took {n_prompt} prompt tokens, expected {len(scenario.prompt_token_ids)}")
        times = RequestTimes(
            client_wall_time_ns=wall_time_ns, server_prompt_time_ns=None, server_generation_time_ns=None
        )
        return Answer(_checked_ids(ids, scenario.n_predict), times)


_Api: TypeAlias = _LlamaServer | _OpenAi
_APIS: dict[str, _Api] = {"llama-server": _LlamaServer(), "openai": _OpenAi()}
