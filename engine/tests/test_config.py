from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.gguf.reader import ModelFile, open_model
from engine.model.config import ModelConfig, check_tensors, expected_tensors
from engine.tests.tiny_gguf import keys, shapes, vocabulary_keys, write_gguf


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def make(shapes_: dict[str, Any] | None = None, **changes: Any) -> ModelFile:
        return open_model(write_gguf(tmp_path / "m.gguf", keys(**changes), shapes_ or shapes()))

    return make


def refusal(model: ModelFile) -> str:
    with pytest.raises(ModelFileError) as caught:
        check_tensors(model, ModelConfig.from_model(model))
    message = str(caught.value)
    assert message.startswith("m.gguf: ")
    assert "\n" not in message
    return message.removeprefix("m.gguf: ")


def test_values_of_the_file(make: Any) -> None:
    config = ModelConfig.from_model(make())
    assert config == ModelConfig(
        n_layer=4,
        n_layer_nextn=0,
        n_embd=256,
        n_ff=512,
        n_vocab=300,
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        n_rot=32,
        rope_freq_base=1e7,
        rope_sections=(5, 5, 6, 0),
        rms_eps=float(np.float32(1e-6)),
        ssm_d_conv=4,
        ssm_d_inner=256,
        ssm_d_state=64,
        n_v_heads=4,
        n_k_heads=2,
        full_attention_interval=4,
        n_ctx_train=4096,
        tied_output=False,
    )
    assert [config.is_recurrent(il) for il in range(4)] == [True, True, True, False]
    assert (config.n_layer_recurrent, config.n_layer_attn, config.n_gqa) == (3, 1, 2)
    assert (config.n_embd_q, config.n_embd_kv) == (256, 128)
    assert (config.key_dim, config.value_dim, config.conv_channels) == (128, 256, 512)


def test_defaults_of_absent_keys_are_those_of_llama_cpp(make: Any) -> None:
    config = ModelConfig.from_model(
        make(
            attention__head_count_kv=None,
            attention__key_length=None,
            attention__value_length=None,
            rope__dimension_count=None,
            rope__freq_base=None,
            full_attention_interval=None,
        )
    )
    assert (config.n_head_kv, config.head_dim, config.n_rot) == (4, 64, 64)
    assert (config.rope_freq_base, config.full_attention_interval) == (10000.0, 4)


def test_mtp_blocks_are_not_part_of_the_trunk(make: Any) -> None:
    model = make(shapes(n_layer=4, n_nextn=1), block_count=5, nextn_predict_layers=1)
    config = ModelConfig.from_model(model)
    assert (config.n_layer, config.n_layer_nextn, config.n_layer_attn) == (4, 1, 1)
    check_tensors(model, config)


def test_arrays_over_the_blocks_count_where_the_layer_uses_them(make: Any) -> None:
    config = ModelConfig.from_model(
        make(
            block_count=5,
            nextn_predict_layers=1,
            attention__head_count=[9, 9, 9, 4, 7],
            attention__head_count_kv=[0, 0, 0, 2, 1],
            feed_forward_length=[512, 512, 512, 512, 8],
        )
    )
    assert (config.n_head, config.n_head_kv, config.n_ff) == (4, 2, 512)


def test_one_number_stands_for_four_rope_sections(make: Any) -> None:
    assert ModelConfig.from_model(make(rope__dimension_sections=4)).rope_sections == (4, 4, 4, 4)


def test_expected_tensors_of_a_complete_model(make: Any) -> None:
    model = make()
    config = ModelConfig.from_model(model)
    assert expected_tensors(config) == {name: shape for name, (shape, _) in shapes().items()}
    check_tensors(model, config)


def test_a_tied_output_needs_no_output_tensor(make: Any) -> None:
    model = make(shapes(tied=True))
    config = ModelConfig.from_model(model)
    assert config.tied_output
    check_tensors(model, config)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys() | {"general.architecture": "llama"}, shapes())
    assert refusal(open_model(path)) == "key general.architecture is 'llama', expected 'qwen35'"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"block_count": None}, "key qwen35.block_count is missing, expected an integer"),
        ({"block_count": "four"}, "key qwen35.block_count is 'four', expected an integer"),
        ({"block_count": 0}, "key qwen35.block_count is 0, expected at least 1"),
        ({"nextn_predict_layers": 4}, "key qwen35.nextn_predict_layers is 4, expected less than block_count (4)"),
        ({"full_attention_interval": 0}, "key qwen35.full_attention_interval is 0, expected at least 1"),
        ({"context_length": None}, "key qwen35.context_length is missing"),
        ({"rope__dimension_sections": None}, "key qwen35.rope.dimension_sections is missing"),
        ({"rope__dimension_sections": [11, 11, 10]}, "key qwen35.rope.dimension_sections is [11, 11, 10]"),
        ({"rope__dimension_sections": [0, 0, 0, 32]}, "at least one of the first three positive"),
        ({"rope__dimension_count": 66}, "expected an even number up to the head size (64)"),
        ({"rope__dimension_count": 31}, "expected an even number up to the head size (64)"),
        ({"rope__freq_base": 0.0}, "key qwen35.rope.freq_base is 0.0, expected a positive number"),
        ({"rope__scaling__type": "yarn"}, "key qwen35.rope.scaling.type is yarn, expected none or linear"),
        ({"rope__scaling__factor": 4.0}, "key qwen35.rope.scaling.factor is 4.0, expected 0.0 or 1.0"),
        ({"attention__causal": False}, "key qwen35.attention.causal is False, expected True"),
        ({"attention__value_length": 32}, "key qwen35.attention.value_length is 32, expected 64"),
        (
            {"attention__head_count": 3},
            "key qwen35.attention.head_count is 3, expected a multiple of head_count_kv (2)",
        ),
        ({"attention__head_count": [4, 4, 4]}, "is an array of 3, expected 4 entries, one a block"),
        ({"feed_forward_length": [512, 512, 256, 512]}, "is [256, 512] over its layers, expected one value"),
        ({"attention__head_count_kv": [1, 1, 1, 0]}, "is [0] over its layers, expected one value of at least 1"),
        ({"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing, expected a float"),
        ({"attention__layer_norm_rms_epsilon": 1}, "layer_norm_rms_epsilon is 1, expected a float"),
        ({"ssm__group_count": 3}, "key qwen35.ssm.time_step_rank is 4, expected a multiple of the 3 key heads"),
        ({"ssm__inner_size": 512}, "key qwen35.ssm.inner_size is 512, expected 256 = ssm.time_step_rank"),
        ({"embedding_length": 512}, "tensor token_embd.weight has shape [256, 300], expected [512, 300]"),
        ({"block_count": 3}, "tensor blk.3.attn_norm.weight is unknown in a qwen35 model of 3 layers"),
        ({"block_count": 5}, "tensor blk.4.attn_norm.weight is missing"),
    ],
)
def test_keys_that_do_not_fit(make: Any, changes: dict[str, Any], expected: str) -> None:
    assert expected in refusal(make(**changes))


@pytest.mark.parametrize(
    ("name", "entry", "expected"),
    [
        ("blk.0.ssm_a", None, "tensor blk.0.ssm_a is missing"),
        ("blk.3.attn_q.weight", ((256, 256), "Q4_K"), "has shape [256, 256], expected [256, 512]"),
        ("blk.0.attn_norm.weight", ((256,), "F16"), "tensor blk.0.attn_norm.weight has type F16, expected F32"),
        ("blk.0.ssm_conv1d.weight", ((4, 512), "F16"), "ssm_conv1d.weight has type F16, expected F32"),
        ("blk.0.attn_q.weight", ((256, 512), "Q4_K"), "tensor blk.0.attn_q.weight is unknown in a qwen35 model"),
        ("blk.4.attn_norm.weight", ((256,), "F32"), "tensor blk.4.attn_norm.weight is unknown"),
        ("blk.0.ffn_up.scale", ((1,), "F32"), "tensor blk.0.ffn_up.scale is unknown"),
    ],
)
def test_tensors_that_do_not_fit(make: Any, name: str, entry: Any, expected: str) -> None:
    changed = {**shapes(), name: entry}
    assert expected in refusal(make({name: entry for name, entry in changed.items() if entry is not None}))


def test_the_vocabulary_and_the_embedding_have_the_same_size(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys() | vocabulary_keys(tokens=["a", "b"]), shapes())
    expected = "tensor token_embd.weight has 300 rows, expected 2, one for each entry of tokenizer.ggml.tokens"
    assert refusal(open_model(path)) == expected


def test_trailing_dimensions_of_one_do_not_matter(make: Any) -> None:
    changed = {**shapes(), "blk.0.attn_norm.weight": ((256, 1), "F32")}
    model = make(changed)
    check_tensors(model, ModelConfig.from_model(model))
