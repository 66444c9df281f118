"""The launches of a decode step and the bytes that they must move, from a model's header alone."""

from __future__ import annotations

import pytest

from engine.cuda import argmax, attention, embed, gated_delta, rms_norm
from engine.cuda.dispatch import Dispatch
from engine.cuda.plan import Node, expressions, matrix_nodes, step
from engine.cuda.streams import Target
from engine.gguf.reader import ModelFile, open_model
from engine.model.config import ModelConfig
from engine.tests.models import SHAPES, write_model

DISPATCH = Dispatch(Target.of("sm_90", 132))
RECURRENT = ["rms_norm", "project", "gated_delta", "gemv", "rms_norm", "gate_up_silu", "gemv"]
ATTENTION = ["rms_norm", "project", "qk_norm_rope_append", "attention_split", "attention_combine", *RECURRENT[3:]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = write_model(tmp_path_factory.mktemp("model") / "model.gguf", next(iter(SHAPES.values())), seed=1)
    return open_model(path)


@pytest.fixture(scope="module")
def config(model: ModelFile) -> ModelConfig:
    return ModelConfig.from_model(model)


@pytest.fixture(scope="module")
def nodes(model: ModelFile, config: ModelConfig) -> list[Node]:
    return list(step(config, model.tensors, DISPATCH, position=40))


def test_a_step_has_these_launches_in_this_order(nodes: list[Node]) -> None:
    """Three layers of Gated DeltaNet, one of attention; 256 weights in a row are too few to be streamed."""
    assert [node.op for node in nodes] == ["embed", *RECURRENT * 3, *ATTENTION, "rms_norm", "gemv", "argmax"]
    assert [node.kind for node in nodes] == ["around", *["recurrent"] * 21, *["attention"] * 9, *["around"] * 3]
    assert [node.layer for node in nodes[-4:]] == [3, None, None, None]


def test_a_launch_names_its_matrices(nodes: list[Node]) -> None:
    first = nodes[2]
    assert first.stems == "attn_qkv+attn_gate+ssm_alpha+ssm_beta"
    assert first.shape == "1280+768+6+6 x 256"
    assert first.types == "Q4_K+Q8_0+F32+F32"
    assert first.weights_n_bytes == 1280 * 144 + 768 * 8 * 34 + 2 * 6 * 256 * 4
    assert first.n_bytes == first.weights_n_bytes + (256 + 64 + 4 * 256) + 4 * (1280 + 768 + 6 + 6)
    assert (nodes[1].stems, nodes[1].shape, nodes[1].types) == ("", "", "")


def test_every_matrix_is_read_once(nodes: list[Node], model: ModelFile) -> None:
    read = [tensor.name for node in nodes for tensor in node.tensors]
    matrices = {name for name, tensor in model.tensors.items() if len(tensor.shape) == 2 and tensor.shape[1] > 1}
    assert len(read) == len(set(read))
    assert set(read) == {name for name in matrices if "conv1d" not in name and not name.startswith("token_embd")}


def test_only_attention_grows_with_the_position(model: ModelFile, config: ModelConfig, nodes: list[Node]) -> None:
    later = list(step(config, model.tensors, DISPATCH, position=41))
    grown = {node.op: after.n_bytes - node.n_bytes for node, after in zip(nodes, later, strict=True)}
    kv = config.n_head_kv * config.head_dim
    assert {op: n for op, n in grown.items() if n} == {"attention_split": 4 * kv}


def test_the_bytes_of_the_27b_model(config: ModelConfig) -> None:
    """Worked out by hand: 24 heads of 256 on 4, 48 value heads of 128 on 16, 10,240 channels."""

    class Sizes:
        n_head, n_head_kv, head_dim, n_rot, rms_eps = 24, 4, 256, 64, 1e-6
        rope_freq_base, rope_sections = 1e7, (11, 11, 10, 0)
        ssm_d_state, ssm_d_conv, n_k_heads, n_v_heads, conv_channels, value_dim = 128, 4, 16, 48, 10240, 6144

    sizes = Sizes()
    splits = 4 * 3 * 24 * 258  # maxima, sums and values of three splits of 32 positions
    assert attention.append_bytes_moved(sizes) == 8 * 6144 + 12 * 1024 + 8 * 256 + 4 * 64
    assert attention.split_bytes_moved(sizes, 70) == 4 * 71 * 1024 + 4 * 6144 + splits
    assert attention.combine_bytes_moved(sizes, 70) == splits + 4 * 6144 + 5 * 6144 + 8 * 192
    state, conv = 2 * 4 * 48 * 128 * 128, 2 * 4 * 3 * 10240
    read = 4 * (4 * 10240 + 2 * 48 + 128) + 4 * (10240 + 6144 + 96)
    assert gated_delta.bytes_moved(sizes) == state + conv + read + 5 * 6144 + 8 * 192
    assert rms_norm.bytes_moved(5120) == 13 * 5120 + 8 * 160
    assert argmax.bytes_moved(248320) == 993_280
    assert embed.bytes_moved(20 * 144, 5120) == 2_880 + 20_480


def test_all_that_a_step_launches_is_compiled(model: ModelFile, config: ModelConfig, nodes: list[Node]) -> None:
    names = expressions(config, model.tensors, DISPATCH)
    assert {node.expression for node in nodes} < set(names)
    assert {"pack_rows", "&iq3s_grid", "repack<Q4_K>"} <= set(names)


def test_matrices_of_the_same_kernel_and_shape_count_once(nodes: list[Node]) -> None:
    found = matrix_nodes([*nodes, *nodes])
    assert len(found) == len({(node.op, node.shape, node.types) for node in nodes if node.tensors})
    assert not [node for node in found if not node.tensors]
