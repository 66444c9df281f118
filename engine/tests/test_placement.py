from __future__ import annotations

import pytest

from engine.cuda.buffers import MAX_PACK
from engine.errors import PlacementError
from engine.gguf.reader import TensorInfo
from engine.model.config import ModelConfig
from engine.placement import N_CHUNK, plan_memory
from engine.tests.models import CONFIG_27B

TOKEN_EMBD = TensorInfo("token_embd.weight", (5120, 248320), "Q4_K", 0, 715_161_600)
REST = TensorInfo("blk.0.ffn_up.weight", (256, 1), "Q4_K", 0, 15_387_279_360)  # the article's resident bytes
OUTPUT = TensorInfo("output.weight", (256, 1), "Q4_K", 0, 0)
FREE_N_BYTES = 15_802_040_320
"""Free memory of the article's 16 GB card."""


def test_sizes_of_the_article() -> None:
    plan = plan_memory(CONFIG_27B, [TOKEN_EMBD, REST, OUTPUT], n_ctx=512)
    widths = (12288, 6144, 1024, 48)  # q with its gate, z, k, beta
    inputs = (5120, 6144, 17408)  # of the matrices that are not projections: what is normalised, mixed, gated
    assert plan.device == {
        "weights": 15_387_279_360,
        "gdn_state": 48 * 48 * 128 * 128 * 4,
        "conv_state": 48 * 3 * 10240 * 4,
        "kv_cache": 32 << 20,
        "residual": N_CHUNK * 5120 * 4,
        "activations": MAX_PACK * 4 * (sum(widths) + sum(inputs)),
        "quantised": MAX_PACK * (sum(inputs) + 17408) // 32 * 40,  # the widest a second time, in tiles
        "attention": 0,  # with the logits in the memory of ffn.x
        "rope": 2 * 512 * 32 * 4,
        "logits": 0,
        "control": N_CHUNK * 8 + 512 * 4 + 17408 // 32 * 4 + 128 + 3 * 256,  # 128: padding to 256 bytes
    }
    assert plan.host_n_bytes == 715_161_600
    assert plan.total_n_bytes == sum(plan.device.values())
    assert (plan.headroom_n_bytes, plan.fits) == (None, None)


@pytest.mark.parametrize(("n_ctx", "arena_mib"), [(512, 201.9), (2048, 297.9)])
def test_the_arena_is_not_larger_than_the_articles(n_ctx: int, arena_mib: float) -> None:
    plan = plan_memory(CONFIG_27B, [TOKEN_EMBD, REST, OUTPUT], n_ctx)
    assert plan.total_n_bytes - plan.device["weights"] <= arena_mib * (1 << 20)


def test_what_grows_with_the_context() -> None:
    small, large = (plan_memory(CONFIG_27B, [TOKEN_EMBD, REST, OUTPUT], n_ctx) for n_ctx in (512, 2048))
    assert large.device["kv_cache"] == 4 * small.device["kv_cache"] == 128 << 20
    grown = {name for name, n_bytes in large.device.items() if n_bytes != small.device[name]}
    assert grown == {"kv_cache", "rope", "control"}


def test_a_long_context_has_scratch_for_attention_of_its_own() -> None:
    plan = plan_memory(CONFIG_27B, [TOKEN_EMBD, REST, OUTPUT], n_ctx=16384)
    assert plan.device["attention"] == 512 * 24 * (256 + 2) * 4


def test_a_context_shorter_than_a_chunk_needs_no_whole_chunk() -> None:
    plan = plan_memory(CONFIG_27B, [TOKEN_EMBD, REST, OUTPUT], n_ctx=8)
    assert plan.device["residual"] == 8 * 5120 * 4


@pytest.mark.parametrize("n_ctx", [512, 2048])
def test_the_article_fits_its_card(n_ctx: int) -> None:
    plan = plan_memory(CONFIG_27B, [TOKEN_EMBD, REST, OUTPUT], n_ctx, FREE_N_BYTES)
    assert plan.fits
    plan.require_fit()
    assert plan.headroom_n_bytes == FREE_N_BYTES - plan.total_n_bytes


def test_a_plan_that_does_not_fit_says_by_how_much() -> None:
    plan = plan_memory(CONFIG_27B, [TOKEN_EMBD, REST, OUTPUT], 512, 15_000_000_000)
    short = f"{plan.total_n_bytes - 15_000_000_000:,} bytes short"
    with pytest.raises(PlacementError, match=f"weights 15,387,279,360 .* at -c 512.*15,000,000,000: {short}"):
        plan.require_fit()
    assert plan.to_dict()["headroom_n_bytes"] == 15_000_000_000 - plan.total_n_bytes


def test_a_tied_table_lives_on_the_device() -> None:
    tied = ModelConfig(**{**vars(CONFIG_27B), "tied_output": True})
    plan = plan_memory(tied, [TOKEN_EMBD, REST], 512)
    assert plan.device["weights"] == 15_387_279_360 + 715_161_600
    assert plan.host_n_bytes == 0
    assert plan.to_dict()["token_embd_resident"] is True
