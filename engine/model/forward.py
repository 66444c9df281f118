"""The forward pass of a Qwen3.5-class hybrid model: three Gated DeltaNet layers, then one of full attention.

Written once, against `engine.ops.Ops`; prefill and decode, NumPy and CUDA all run these lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.model.state import DecodeState, RecurrentState
from engine.model.weights import AttentionLayer, FeedForward, RecurrentLayer, Weights
from engine.ops import Activation, Array, KVCache, Ops


def forward(ops: Ops, weights: Weights, state: DecodeState, tokens: Sequence[int], pack: int = 1) -> Array:
    """Run `tokens` through the model and return the logits after the last one, (1, n_vocab) f32.

    Layer-major: each layer takes all tokens, in packs of at most `pack`, before the next layer begins, so its
    weights are read once per pack. The result has the same bits for every `pack`, and when the tokens come in
    several calls. `state` advances by len(tokens) positions.
    """
    table, first = weights.token_embd, state.n_past
    x = ops.embed(table.type_name, table.rows, tokens, first)
    packs = [range(i, min(i + pack, len(tokens))) for i in range(0, len(tokens), pack)]
    hidden = [x[p.start : p.stop] for p in packs]
    for il, layer in enumerate(weights.layers):
        ops.begin_layer(il)
        for i, p in enumerate(packs):
            positions = range(first + p.start, first + p.stop)
            hidden[i] = transformer_block(ops, layer, state.layers[il], hidden[i], positions)
    state.n_past += len(tokens)
    h = ops.rms_norm(hidden[-1][-1:], weights.output_norm)
    return ops.head(weights.output, h)


def transformer_block(
    ops: Ops,
    layer: RecurrentLayer | AttentionLayer,
    state: RecurrentState | KVCache,
    x: Array,
    positions: Sequence[int],
) -> Array:
    """Return x after one layer: x + mixer(norm(x)), then that + ffn(norm(that)); x is (n_tokens, n_embd) f32."""
    h = ops.rms_norm(x, layer.attn_norm)
    if isinstance(layer, RecurrentLayer) and isinstance(state, RecurrentState):
        x = ops.project_add(layer.ssm_out, gated_delta_net(ops, layer, state, h), x)
    elif isinstance(layer, AttentionLayer) and isinstance(state, KVCache):
        x = ops.project_add(layer.attn_output, gated_attention(ops, layer, state, h, positions), x)
    else:
        raise TypeError(f"{type(layer).__name__} cannot run on a {type(state).__name__}")
    return feed_forward(ops, layer.ffn, x)


def gated_delta_net(ops: Ops, layer: RecurrentLayer, state: RecurrentState, h: Activation) -> Activation:
    """Mix over time by the delta rule; returns the input of ssm_out, (n_tokens, value_dim)."""
    inputs = (layer.attn_qkv, layer.attn_gate, layer.ssm_alpha, layer.ssm_beta)
    qkv, z, alpha, beta = ops.project(inputs, h)
    qkv = ops.conv_silu(qkv, layer.ssm_conv1d, state.conv)
    o = ops.gated_delta(qkv, alpha, beta, layer.ssm_dt, layer.ssm_a, state.ssm)
    return ops.gated_norm(o, z, layer.ssm_norm)


def gated_attention(
    ops: Ops, layer: AttentionLayer, cache: KVCache, h: Activation, positions: Sequence[int]
) -> Activation:
    """Mix over time by full attention; returns the input of attn_output, (n_tokens, n_head * head_dim)."""
    qg, k, v = ops.project((layer.attn_q, layer.attn_k, layer.attn_v), h)
    q, gate = ops.qk_norm_rope(qg, k, v, layer.attn_q_norm, layer.attn_k_norm, positions, cache)
    o = ops.attention(q, cache, positions)
    return ops.sigmoid_gate(o, gate)


def feed_forward(ops: Ops, ffn: FeedForward, x: Array) -> Array:
    """Return x + down(silu(gate h) * (up h)) with h = norm(x)."""
    h = ops.rms_norm(x, ffn.post_attention_norm)
    return ops.project_add(ffn.ffn_down, ops.gate_up_silu(ffn.ffn_gate, ffn.ffn_up, h), x)
