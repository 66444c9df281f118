from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from conformance.errors import ScenarioError
from conformance.models import PRESETS, prompt_ids
from conformance.scenario import (
    DEFAULT_FOLDER,
    Scenario,
    ScenarioFile,
    all_scenarios,
    default_scenarios,
    find_scenario,
    load_scenario,
    select_scenarios,
)
from conformance.tests.fakes import content, write_scenario
from engine.cli import TRAINED_MODEL
from engine.gguf.reader import open_model
from engine.gguf.tokenizer import Tokenizer

SHA256 = "ab" * 32
TOPICS = ("import", "objects", "strings", "try", "with")
PYDOC = [f"pydoc-{topic}-c{n_ctx}" for topic in TOPICS for n_ctx in (512, 2048)]


def _error(tmp_path: Path, values: dict[str, Any] | str) -> str:
    path = tmp_path / "s.yaml"
    if isinstance(values, str):
        path.write_text(values)
    else:
        write_scenario(path, values)
    with pytest.raises(ScenarioError) as caught:
        load_scenario(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def _changed(*keys: str | int, value: Any) -> dict[str, Any]:
    values = content("m.gguf", SHA256)
    place: Any = values
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    return values


def _line_of(values: dict[str, Any], tmp_path: Path, text: str, nth: int = 1) -> int:
    lines = write_scenario(tmp_path / "lines.yaml", values).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if text in line][nth - 1]


@pytest.mark.parametrize(
    ("keys", "value", "text", "says"),
    [
        (("colour",), "red", "colour", "colour is an unknown key, expected one of: name, asks, default"),
        (("n_ctx",), "512", '"n_ctx"', 'n_ctx is "512", expected a valid integer'),
        (("n_ctx",), 300, '"n_ctx"', "n_ctx is 300, expected a multiple of 256"),
        (("n_predict",), 0, '"n_predict"', "n_predict is 0, expected greater than or equal to 1"),
        (("model", "sha256"), "x", '"sha256"', 'model.sha256 is "x", expected'),
        (("model", "url"), "x", '"url"', "model.url is an unknown key, expected one of: kind, seed, file, sha256"),
        (("baseline", "flash_attn"), True, '"flash_attn"', "baseline.flash_attn is true, expected 'on' or 'off'"),
        (("prompt_token_ids", 2), -1, "-1", "prompt_token_ids[2] is -1, expected greater than or equal to 0"),
        (("checks", 7, "min"), "wide", '"wide"', 'checks[7].min is "wide", expected a valid number'),
        (("checks", 8, "ratio"), 1, '"ratio"', "checks[8].ratio is an unknown key, expected one of: because"),
        (("checks", 0, "check"), "speed", '"checks"', "checks[0]"),
        (
            ("prefill",),
            ["layer_major"],
            None,
            "final_logits_bitwise_equal token_major: expected token_major in prefill",
        ),
        (("n_predict",), 300, None, "prompt and generated tokens need n_ctx 337, found 256"),
        (("model", "kind"), "tiny", '"model"', "expected either kind and seed, or file"),
        (
            ("baseline", "split_mode"),
            "row",
            '"split_mode"',
            "baseline.split_mode is \"row\", expected 'none' or 'layer'",
        ),
        (("vram_budget_n_bytes",), 0, '"vram_budget_n_bytes"', "vram_budget_n_bytes is 0, expected greater than"),
        (("backends",), ["cuda"], None, "the controls are wrong engines on numpy: expected it in backends"),
    ],
)
def test_an_error_names_line_key_and_what_was_expected(
    tmp_path: Path, keys: tuple[str | int, ...], value: Any, text: str | None, says: str
) -> None:
    values = _changed(*keys, value=value)
    message = _error(tmp_path, values)
    assert says in message
    line = int(message.split(":")[1])
    if text == '"checks"':  # the whole entry is at fault: its first line
        assert line == _line_of(values, tmp_path, text) + 1
    elif text is not None:
        assert line == _line_of(values, tmp_path, text)


def test_a_missing_key_is_named_at_its_mapping(tmp_path: Path) -> None:
    values = content("m.gguf", SHA256)
    del values["checks"][2]["because"]
    line = _line_of(values, tmp_path, "final_logits_le32_sha256") - 1
    assert _error(tmp_path, values) == f":{line}: checks[2].because is missing"


def test_an_unknown_key_is_reported_before_the_key_it_was_meant_to_be(tmp_path: Path) -> None:
    values = content("m.gguf", SHA256)
    values["n_context"] = values.pop("n_ctx")
    assert "n_context is an unknown key" in _error(tmp_path, values)


def test_a_check_given_twice_is_refused(tmp_path: Path) -> None:
    values = content("m.gguf", SHA256)
    values["checks"].append(values["checks"][0])
    assert "found twice: final_logits_bitwise_equal token_major" in _error(tmp_path, values)


def test_yaml_errors_have_a_line(tmp_path: Path) -> None:
    assert _error(tmp_path, "name: a\nasks: [1, 2\n").startswith(":3: not YAML")
    assert _error(tmp_path, "name: a\nname: b\n") == ":2: key 'name' is given twice"
    assert "empty" in _error(tmp_path, "")
    assert "the scenario is" in _error(tmp_path, "- 1\n")


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"no\.yaml: cannot be read"):
        load_scenario(tmp_path / "no.yaml")


def test_version_depends_on_content_and_not_on_layout(tmp_path: Path) -> None:
    values = content("m.gguf", SHA256)
    first = load_scenario(write_scenario(tmp_path / "a.yaml", values))
    second = tmp_path / "b.yaml"
    second.write_text("# a comment\n" + (tmp_path / "a.yaml").read_text().replace("\n", "\n\n"))
    assert load_scenario(second).version == first.version
    assert load_scenario(write_scenario(tmp_path / "c.yaml", values | {"n_ctx": 512})).version != first.version


def test_the_27b_scenarios_are_asked_for_by_name() -> None:
    small = ["tiny-c512", "tiny-c2048", "small-c512", "small-c2048"]
    assert _names(default_scenarios()) == [*small, *PYDOC]
    assert _names(all_scenarios()) == [*small, "27b-c512", "27b-c2048", *PYDOC]
    assert find_scenario("27b-c512").scenario.default is False


def test_scenarios_have_the_shape_of_the_article() -> None:
    files = all_scenarios()
    for file in files:
        scenario = file.scenario
        assert file.path.stem == scenario.name
        assert scenario.n_predict == 129
        assert len(scenario.prompt_token_ids) == 70
        assert all(len(check.because) > 20 for check in scenario.checks)
        if scenario.model.kind is not None:
            assert list(scenario.prompt_token_ids) == prompt_ids(PRESETS[scenario.model.kind])
            assert scenario.model.seed == PRESETS[scenario.model.kind].seed
    assert [file.scenario.n_ctx for file in files] == [512, 2048] * 8


def test_the_trained_model_is_pinned_and_continues_five_texts() -> None:
    tokenizer = Tokenizer.from_model(open_model(TRAINED_MODEL))
    digest = hashlib.sha256(TRAINED_MODEL.read_bytes()).hexdigest()
    texts = []
    for name in PYDOC[::2]:
        file = find_scenario(name)
        assert file.scenario.model.sha256 == digest
        assert (file.path.parent / str(file.scenario.model.file)).samefile(TRAINED_MODEL)
        texts.append(tokenizer.decode_bytes(file.scenario.prompt_token_ids).decode())
    heads = ['The "import" st', "Objects, values", "String Methods\n", 'The "try" state', 'The "with" stat']
    assert [text[:15] for text in texts] == heads


def _without(scenario: Scenario, *names: str) -> dict[str, Any]:
    values = scenario.model_dump(mode="json")
    values["checks"] = [check for check in values["checks"] if check["check"] not in names]
    return {key: value for key, value in values.items() if key not in ("name", "asks", "n_ctx", "controls")}


def test_only_the_27b_scenarios_need_a_gpu_and_have_a_budget() -> None:
    for file in all_scenarios():
        scenario, flags = file.scenario, file.scenario.baseline
        is_27b = scenario.model.kind == "27b"
        assert flags.device == ("cuda" if is_27b else "cpu")
        assert (flags.override_tensor, flags.split_mode) == (
            ("token_embd.weight=CPU", "none") if is_27b else (None, "layer")
        )
        assert scenario.vram_budget_n_bytes == (15_802_040_320 if is_27b else None)
        assert scenario.backends == (("cuda",) if is_27b else ("numpy", "cuda"))


@pytest.mark.parametrize(
    ("asked", "controls", "wanted"),
    [
        (["numpy"], ["a"], ["numpy"]),
        (["cuda"], ["a"], ["numpy", "cuda"]),
        (["cuda"], [], ["cuda"]),
        (["cuda", "numpy"], [], ["numpy", "cuda"]),
        ([], ["a"], []),
    ],
)
def test_the_backends_to_run_are_those_asked_for_and_the_controls_own(
    asked: list[str], controls: list[str], wanted: list[str]
) -> None:
    assert find_scenario("tiny-c512").scenario.backends_to_run(asked, controls) == wanted


def test_a_scenario_runs_on_its_own_backends_only() -> None:
    scenario = find_scenario("27b-c512").scenario
    assert scenario.backends_to_run(["numpy", "cuda"], ["a"]) == ["cuda"]
    assert scenario.backends_to_run(["numpy"], ["a"]) == []


def test_both_capacities_ask_the_same_question() -> None:
    by_name = {file.scenario.name: file.scenario for file in all_scenarios()}
    for kind in ("tiny", "small", "27b", *(f"pydoc-{topic}" for topic in TOPICS)):
        small, large = (_without(by_name[f"{kind}-c{c}"], "same_hash_at_both_n_ctx") for c in (512, 2048))
        assert small == large
        assert by_name[f"{kind}-c2048"].compared_scenarios == (f"{kind}-c512",)


def _names(files: list[ScenarioFile]) -> list[str]:
    return [file.scenario.name for file in files]


def test_a_selection_brings_the_controls_and_what_it_compares_with() -> None:
    assert _names(select_scenarios(["small-c2048"])) == ["tiny-c512", "small-c512", "small-c2048"]
    assert _names(select_scenarios(["tiny-c512"])) == ["tiny-c512"]
    assert _names(select_scenarios(["27b-c2048"])) == ["tiny-c512", "27b-c512", "27b-c2048"]
    assert _names(select_scenarios([])) == _names(default_scenarios())


def test_a_scenario_of_one_s_own_is_given_by_its_path(tmp_path: Path) -> None:
    path = write_scenario(tmp_path / "mine.yaml", content("m.gguf", SHA256))
    assert _names(select_scenarios([str(path)])) == ["tiny-c512", "short"]
    assert find_scenario(str(path)).scenario.name == "short"
    with pytest.raises(ScenarioError, match=r"no scenario named 'nothing', expected a YAML file or one of: tiny-c512"):
        select_scenarios(["nothing"])


def test_two_scenarios_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_scenario(tmp_path / "mine.yaml", content("m.gguf", SHA256) | {"name": "tiny-c512"})
    with pytest.raises(ScenarioError, match=r"another scenario of this run is named 'tiny-c512'"):
        select_scenarios([str(path)])


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("deadline_s", ".inf", "deadline_s is Infinity, expected a finite number"),
        ("deadline_s", ".nan", "deadline_s is NaN, expected a finite number"),
        ("n_threads", "1025", "n_threads is 1025, expected less than or equal to 1024"),
        ("n_ctx", "1600256", "n_ctx is 1600256, expected less than or equal to 1600000"),
    ],
)
def test_numbers_that_no_run_could_use(tmp_path: Path, key: str, value: str, says: str) -> None:
    text = (DEFAULT_FOLDER / "tiny-c512.yaml").read_text()
    changed = re.sub(rf"^{key}: .*$", f"{key}: {value}", text, flags=re.MULTILINE)
    assert changed != text
    assert _error(tmp_path, changed).endswith(says)
