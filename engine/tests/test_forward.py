"""The forward pass: against a scalar twin of the whole model, and equal bits however the work is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from engine.errors import NonFiniteError
from engine.generate import Engine, load_engine
from engine.gguf.reader import open_model
from engine.model.config import ModelConfig
from engine.model.forward import forward, transformer_block
from engine.model.state import DecodeState, RecurrentState, new_state
from engine.model.weights import load_weights
from engine.ops import KVCache
from engine.reference.ops import NumpyOps
from engine.tests import scalar_twin as twin
from engine.tests.models import SHAPES, TINY, Shape, write_model
from engine.tests.scalar_twin import assert_same_bits

N_PROMPT = 13


@pytest.fixture(scope="module", params=SHAPES, ids=lambda name: name.replace(" ", "_"))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    path = write_model(tmp_path_factory.mktemp("model") / "model.gguf", SHAPES[request.param], seed=1)
    return load_engine(path, n_ctx=80, n_threads=1)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model whose head is split over threads."""
    return write_model(tmp_path_factory.mktemp("model") / "model.gguf", next(iter(SHAPES.values())), seed=2)


def prompt(n_vocab: int, n: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, n_vocab, n)]


def run(engine: Engine, calls: list[list[int]], pack: int) -> tuple[DecodeState, NDArray[np.float32]]:
    """Run several calls of forward from an empty state."""
    state = new_state(engine.config, engine.ops, engine.n_ctx)
    for tokens in calls:
        logits = forward(engine.ops, engine.weights, state, tokens, pack)
    return state, logits


def state_arrays(state: DecodeState) -> list[NDArray[Any]]:
    """Return everything a sequence leaves behind."""
    arrays = []
    for layer in state.layers:
        arrays += [layer.conv, layer.ssm] if isinstance(layer, RecurrentState) else [layer.k, layer.v]
    return arrays


def assert_same_state(got: DecodeState, expected: DecodeState) -> None:
    assert got.n_past == expected.n_past
    for a, b in zip(state_arrays(got), state_arrays(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


# The whole model, one scalar at a time


class TwinModel:
    """A model file read by the gguf package and run by the scalar twin."""

    def __init__(self, path: Path, shape: Shape) -> None:
        self.shape = shape
        reader = gguf.GGUFReader(path)
        self.types = {t.name: t.tensor_type.name for t in reader.tensors}
        self.rows = {t.name: [bytes(r) for r in self._rows(t)] for t in reader.tensors}
        self.eps = float(reader.fields["qwen35.attention.layer_norm_rms_epsilon"].contents())
        self.conv = [[[twin.ZERO] * shape.conv_channels] * 3 for _ in range(shape.n_layer)]
        d = shape.d_state
        self.ssm = [[[[twin.ZERO] * d for _ in range(d)] for _ in range(shape.n_v_heads)] for _ in range(shape.n_layer)]
        self.k: list[list[list[twin.Vector]]] = [[[] for _ in range(shape.n_head_kv)] for _ in range(shape.n_layer)]
        self.v: list[list[list[twin.Vector]]] = [[[] for _ in range(shape.n_head_kv)] for _ in range(shape.n_layer)]

    @staticmethod
    def _rows(tensor: Any) -> NDArray[np.uint8]:
        n_rows = int(np.prod(tensor.shape[1:]))
        return np.ascontiguousarray(tensor.data).view(np.uint8).reshape(n_rows, -1)

    def vector(self, name: str) -> twin.Vector:
        (row,) = self.rows[name]
        return twin.dequantize("F32", row)

    def matmul(self, name: str, x: twin.Vector) -> twin.Vector:
        return twin.matmul(self.types[name], self.rows[name], x)

    def norm(self, name: str, x: twin.Vector) -> twin.Vector:
        return twin.rms_norm(x, self.vector(name), self.eps, 256)

    def step(self, token: int, position: int) -> twin.Vector:
        """Return the logits after `token`."""
        x = twin.dequantize(self.types["token_embd.weight"], self.rows["token_embd.weight"][token])
        for il in range(self.shape.n_layer):
            blk = f"blk.{il}."
            h = self.norm(f"{blk}attn_norm.weight", x)
            mixed = self.delta_net(blk, il, h) if (il + 1) % 4 else self.attention(blk, il, h, position)
            x = [a + b for a, b in zip(x, mixed, strict=True)]
            h = self.norm(f"{blk}post_attention_norm.weight", x)
            gate, up = self.matmul(f"{blk}ffn_gate.weight", h), self.matmul(f"{blk}ffn_up.weight", h)
            inner = [twin.silu(g) * u for g, u in zip(gate, up, strict=True)]
            x = [a + b for a, b in zip(x, self.matmul(f"{blk}ffn_down.weight", inner), strict=True)]
        return self.matmul("output.weight", self.norm("output_norm.weight", x))

    def delta_net(self, blk: str, il: int, h: twin.Vector) -> twin.Vector:
        kernel = [twin.dequantize("F32", row) for row in self.rows[f"{blk}ssm_conv1d.weight"]]
        mixed, self.conv[il] = twin.conv_silu([self.matmul(f"{blk}attn_qkv.weight", h)], kernel, self.conv[il])
        z = self.matmul(f"{blk}attn_gate.weight", h)
        alpha, beta = self.matmul(f"{blk}ssm_alpha.weight", h), self.matmul(f"{blk}ssm_beta.weight", h)
        dt, a = self.vector(f"{blk}ssm_dt.bias"), self.vector(f"{blk}ssm_a")
        o = twin.gated_delta(mixed[0], alpha, beta, dt, a, self.ssm[il], self.eps)
        normed = twin.gated_norm(o, z, self.vector(f"{blk}ssm_norm.weight"), self.eps)
        return self.matmul(f"{blk}ssm_out.weight", normed)

    def attention(self, blk: str, il: int, h: twin.Vector, position: int) -> twin.Vector:
        shape, d = self.shape, self.shape.head_dim
        frequencies = [twin.rope_frequency(i, shape.n_rot, 1e7, shape.rope_sections) for i in range(shape.n_rot // 2)]
        qg, k, v = (self.matmul(f"{blk}attn_{part}.weight", h) for part in "qkv")

        def head(name: str, x: twin.Vector) -> twin.Vector:
            normed = twin.rms_norm(x, self.vector(f"{blk}{name}.weight"), self.eps, 32)
            return twin.rotate(normed, position, frequencies)

        for i in range(shape.n_head_kv):
            self.k[il][i].append([twin.to_f16(x) for x in head("attn_k_norm", k[i * d : (i + 1) * d])])
            self.v[il][i].append([twin.to_f16(x) for x in v[i * d : (i + 1) * d]])
        joined = []
        for i in range(shape.n_head):
            q, gate = qg[2 * i * d : (2 * i + 1) * d], qg[(2 * i + 1) * d : (2 * i + 2) * d]
            kv = i // (shape.n_head // shape.n_head_kv)
            o = twin.attend(head("attn_q_norm", q), self.k[il][kv], self.v[il][kv])
            joined += [value * twin.sigmoid(g) for value, g in zip(o, gate, strict=True)]
        return self.matmul(f"{blk}attn_output.weight", joined)


def test_forward_equals_the_scalar_twin_of_the_whole_model(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf", TINY, seed=3)
    engine, model = load_engine(path, n_ctx=4, n_threads=1), TwinModel(path, TINY)
    ids = prompt(TINY.n_vocab, 3)
    for position, token in enumerate(ids):
        expected = model.step(token, position)
    _, logits = run(engine, [ids], pack=2)
    assert_same_bits(logits[0], expected)


# However the work is cut


@pytest.mark.parametrize("pack", [2, 3, 4, 7, N_PROMPT])
def test_layer_major_packs_equal_token_major(engine: Engine, pack: int, token_major: Any) -> None:
    state, logits = run(engine, [prompt(engine.config.n_vocab, N_PROMPT)], pack)
    assert_same_bits(logits, token_major[1])
    assert_same_state(state, token_major[0])


@pytest.fixture(scope="module")
def token_major(engine: Engine) -> tuple[DecodeState, NDArray[np.float32]]:
    return run(engine, [[token] for token in prompt(engine.config.n_vocab, N_PROMPT)], pack=1)


def test_a_prompt_cut_into_calls_gives_the_same_bits(engine: Engine, token_major: Any) -> None:
    ids = prompt(engine.config.n_vocab, N_PROMPT)
    state, logits = run(engine, [ids[:1], ids[1:6], ids[6:8], ids[8:]], pack=3)
    assert_same_bits(logits, token_major[1])
    assert_same_state(state, token_major[0])


@pytest.fixture(scope="module")
def long_token_major(first: Path) -> NDArray[np.float32]:
    engine = load_engine(first, n_ctx=128, n_threads=1)
    return run(engine, [[token] for token in prompt(engine.config.n_vocab, 70)], pack=1)[1]


@pytest.mark.parametrize("pack", [1, 2, 3, 4, 7, 70])
def test_seventy_tokens_in_any_pack_over_three_kv_splits(first: Path, long_token_major: Any, pack: int) -> None:
    engine = load_engine(first, n_ctx=70, n_threads=2)
    assert_same_bits(run(engine, [prompt(engine.config.n_vocab, 70)], pack)[1], long_token_major)


@pytest.mark.parametrize(("n_threads", "n_ctx"), [(2, 70), (3, 128), (1, 2048)])
def test_threads_and_context_capacity_change_no_bit(
    first: Path, long_token_major: Any, n_threads: int, n_ctx: int
) -> None:
    engine = load_engine(first, n_ctx=n_ctx, n_threads=n_threads)
    assert engine.config.n_vocab * engine.config.n_embd >= 1 << 19  # so that the head is split over threads
    assert_same_bits(run(engine, [prompt(engine.config.n_vocab, 70)], 4)[1], long_token_major)


def test_an_earlier_token_changes_the_logits(engine: Engine, token_major: Any) -> None:
    ids = prompt(engine.config.n_vocab, N_PROMPT)
    ids[0] = (ids[0] + 1) % engine.config.n_vocab
    assert (run(engine, [ids], 4)[1] != token_major[1]).mean() > 0.9


def test_two_sequences_at_once_do_not_mix(engine: Engine) -> None:
    ids, other = (prompt(engine.config.n_vocab, 4, seed) for seed in (0, 1))
    state, other_state = (new_state(engine.config, engine.ops, engine.n_ctx) for _ in range(2))
    for token, other_token in zip(ids, other, strict=True):
        logits = forward(engine.ops, engine.weights, state, [token])
        other_logits = forward(engine.ops, engine.weights, other_state, [other_token])
    alone_state, alone = run(engine, [ids], pack=4)
    assert_same_bits(logits, alone)
    assert_same_state(state, alone_state)
    assert (other_logits != logits).any()


def test_state_has_an_entry_per_layer_and_counts_tokens(engine: Engine, token_major: Any) -> None:
    state, config = token_major[0], engine.config
    assert state.n_past == N_PROMPT
    for il, layer in enumerate(state.layers):
        if config.is_recurrent(il):
            assert layer.conv.shape == (3, config.conv_channels)
            assert layer.ssm.shape == (config.n_v_heads, config.ssm_d_state, config.ssm_d_state)
        else:
            assert layer.k.shape == layer.v.shape == (80, config.n_head_kv, config.head_dim)
            assert layer.k.dtype == layer.v.dtype == np.float16
            assert layer.k[:N_PROMPT].any(axis=(1, 2)).all()
            assert not layer.k[N_PROMPT:].any()


def test_layer_and_state_of_different_kinds_are_refused(tmp_path: Path) -> None:
    engine = load_engine(write_model(tmp_path / "tiny.gguf", TINY), n_ctx=4, n_threads=1)
    cache = new_state(engine.config, engine.ops, 4).layers[3]
    assert isinstance(cache, KVCache)
    x = np.zeros((1, TINY.n_embd), dtype=np.float32)
    with pytest.raises(TypeError, match="RecurrentLayer cannot run on a KVCache"):
        transformer_block(engine.ops, engine.weights.layers[0], cache, x, [0])


def test_load_reports_the_bytes_of_every_tensor_once(tmp_path: Path) -> None:
    model = open_model(write_model(tmp_path / "tiny.gguf", TINY))
    config = ModelConfig.from_model(model)
    sizes: list[int] = []
    load_weights(model, config, NumpyOps(config, 1), sizes.append)
    on_host = model.tensor("token_embd.weight").n_bytes
    assert sum(sizes) == sum(info.n_bytes for info in model.tensors.values()) - on_host
    assert len(sizes) == len(model.tensors) - 1


# Damage


def damage(path: Path, tensor: str, offset: int, value: bytes) -> None:
    """Overwrite bytes of one tensor, `offset` from its start."""
    with path.open("r+b") as file:
        file.seek(open_model(path).tensor(tensor).offset + offset)
        file.write(value)


F16_INF, F16_NAN = b"\x00\x7c", b"\x00\x7e"


@pytest.mark.parametrize(
    ("tensor", "where", "op", "of_infinity"),
    [
        ("blk.1.ffn_gate.weight", "layer 1", "gate_up_silu", "NaN"),
        ("blk.2.ffn_up.weight", "layer 2", "gate_up_silu", "infinity"),
        ("blk.0.attn_qkv.weight", "layer 0", "gated_delta", "NaN"),
        ("blk.3.attn_q.weight", "layer 3", "attention", "NaN"),
        ("blk.3.attn_v.weight", "layer 3", "attention", "infinity"),  # one position: its weight is 1
        ("blk.2.ssm_out.weight", "layer 2", "gate_up_silu", "NaN"),  # the next op that checks
        ("blk.2.ffn_down.weight", "layer 3", "attention", "NaN"),
        ("blk.3.ffn_down.weight", "output head", "head", "NaN"),
        ("output.weight", "output head", "head", "infinity"),
    ],
)
@pytest.mark.parametrize("value", [F16_INF, F16_NAN], ids=["inf", "nan"])
def test_a_damaged_scale_is_named_by_layer_and_op(
    tmp_path: Path, tensor: str, where: str, op: str, of_infinity: str, value: bytes
) -> None:
    path = write_model(tmp_path / "model.gguf", Shape(n_v_heads=4, types=("Q8_0",), output="Q8_0", n_vocab=256))
    damage(path, tensor, 0, value)
    engine = load_engine(path, n_ctx=8, n_threads=1)
    with pytest.raises(NonFiniteError) as caught:
        engine.prefill([1, 2, 3])
    kind = of_infinity if value == F16_INF else "NaN"
    assert str(caught.value) == f"{where}: op {op} produced {kind}; the weights or the state are damaged"


def test_infinite_logits_are_called_infinity_and_found_in_a_thread_too(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", Shape(n_v_heads=4, types=("Q8_0",), output="F32", n_vocab=2048))
    damage(path, "output.weight", 4 * 17, np.float32(np.inf).tobytes())
    for n_threads in (1, 2):
        with pytest.raises(NonFiniteError) as caught:
            load_engine(path, n_ctx=8, n_threads=n_threads).prefill([1])
        assert str(caught.value) == ("output head: op head produced infinity; the weights or the state are damaged")
