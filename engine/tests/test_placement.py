from __future__ import annotations

import pytest

from engine.errors import PlacementError
from engine.gguf.reader import TensorInfo
from engine.model.config import ModelConfig
from engine.placement import plan_memory

ARTICLE = ModelConfig(
    n_layer=64,
    n_layer_nextn=0,
    n_embd=5120,
    n_ff=17408,
    n_vocab=248320,
    n_head=24,
    n_head_kv=4,
    head_dim=256,
    n_rot=64,
    rope_freq_base=1e7,
    rope_sections=(11, 11, 10, 0),
    rms_eps=1e-6,
    ssm_d_conv=4,
    ssm_d_inner=6144,
    ssm_d_state=128,
    n_v_heads=48,
    n_k_heads=16,
    full_attention_interval=4,
    n_ctx_train=262144,
    tied_output=False,
)
TOKEN_EMBD = TensorInfo("token_embd.weight", (5120, 248320), "Q4_K", 0, 715_161_600)
REST = TensorInfo("blk.0.ffn_up.weight", (256, 1), "Q4_K", 0, 15_387_279_360)  # the article's resident bytes
OUTPUT = TensorInfo("output.weight", (256, 1), "Q4_K", 0, 0)
FREE_N_BYTES = 15_802_040_320
"""Free memory of the article's 16 GB card."""


def test_sizes_of_the_article() -> None:
    plan = plan_memory(ARTICLE, [TOKEN_EMBD, REST, OUTPUT], n_ctx=512)
    assert plan.device == {
        "weights": 15_387_279_360,
        "gdn_state": 48 * 48 * 128 * 128 * 4,
        "conv_state": 48 * 3 * 10240 * 4,
        "kv_cache": 32 << 20,
        "residual": 512 * 5120 * 4,
        # 4 rows of the norm, the recurrent mixer's inputs, its output, gate and up; 16 splits of 24 heads
        "activations": 4 * (4 * (5120 + 2 * 10240 + 6144 + 96 + 6144 + 2 * 17408) + 24 * 16 * 258),
        "quantised": 4 * 17408 // 32 * 40,
        "logits": 248320 * 4,
    }
    assert plan.host_n_bytes == 715_161_600
    assert plan.total_n_bytes == sum(plan.device.values())
    assert (plan.headroom_n_bytes, plan.fits) == (None, None)


def test_the_kv_cache_grows_with_the_context_and_the_states_do_not() -> None:
    small, large = (plan_memory(ARTICLE, [TOKEN_EMBD, REST, OUTPUT], n_ctx) for n_ctx in (512, 2048))
    assert large.device["kv_cache"] == 4 * small.device["kv_cache"] == 128 << 20
    for name in ("weights", "gdn_state", "conv_state", "quantised", "logits"):
        assert large.device[name] == small.device[name]


@pytest.mark.parametrize("n_ctx", [512, 2048])
def test_the_article_fits_its_card(n_ctx: int) -> None:
    plan = plan_memory(ARTICLE, [TOKEN_EMBD, REST, OUTPUT], n_ctx, FREE_N_BYTES)
    assert plan.fits
    plan.require_fit()
    assert plan.headroom_n_bytes == FREE_N_BYTES - plan.total_n_bytes


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    plan = plan_memory(ARTICLE, [TOKEN_EMBD, REST, OUTPUT], 512, 15_000_000_000)
    short = f"{plan.total_n_bytes - 15_000_000_000:,} bytes short"
    with pytest.raises(PlacementError, match=f"weights 15,387,279,360 .* at -c 512.*15,000,000,000: {short}"):
        plan.require_fit()
    assert plan.to_dict()["headroom_n_bytes"] == 15_000_000_000 - plan.total_n_bytes


def test_a_tied_table_lives_on_the_device() -> None:
    tied = ModelConfig(**{**vars(ARTICLE), "tied_output": True})
    plan = plan_memory(tied, [TOKEN_EMBD, REST], 512)
    assert plan.device["weights"] == 15_387_279_360 + 715_161_600
    assert plan.host_n_bytes == 0
    assert plan.to_dict()["token_embd_resident"] is True
