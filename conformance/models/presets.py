"""The three fixtures of the suite: `tiny`, `small` and `27b`.

The 27b type assignment reproduces the byte accounting of the article's file. The arithmetic, in units of
20,480 superblocks of 256 weights (one [5120 x 1024] matrix), so that every matrix is a whole number of units:

    attn_qkv 10, attn_gate 6, ssm_out 6, attn_q 12, attn_k 1, attn_v 1, attn_output 6, ffn_gate / up / down 17 each
    48 recurrent layers of 73 units + 16 attention layers of 71 units = 4,640 units
    bytes of one superblock: Q4_K 144, Q5_K 176, Q6_K 210, IQ4_XS 136, IQ3_S 110

    64 layers                                                   14,344,308,736
    F32: 48 x (4 x 10240 + 2 x 48 + 2 x 48 x 5120 + 128 + 2 x 5120) x 4 + 16 x (2 x 5120 + 2 x 256) x 4
                                                                  - 104,933,376
    quantised                                                   14,239,375,360 = 20,480 x 695,282
    all of it in Q4_K: 4,640 x 144                                     668,160, so 27,122 above Q4_K

    named by the article (difference to Q4_K per superblock x units):
      9 ssm_out / attn_output in Q6_K          66 x  54    +3,564
      3 ffn_down in Q6_K                       66 x  51    +3,366
     10 ffn_down in IQ3_S                     -34 x 170    -5,780
     12 attn_k / attn_v in Q6_K                66 x  12      +792
    chosen here (the article gives no counts):
      6 layers ffn_gate Q5_K + ffn_up Q6_K     98 x 102    +9,996
      9 layers ffn_gate + ffn_up in IQ4_XS     -8 x 306    -2,448
     25 ffn_down in Q5_K                       32 x 425   +13,600
     21 ssm_out / attn_output in Q5_K          32 x 126    +4,032
                                                          = 27,122

    token_embd Q4_K [5120 x 248320] 715,161,600; output Q6_K [5120 x 248320] 1,042,944,000
    resident: 14,344,308,736 + 96 vectors of 192 bytes padded to 256 (6,144) + output_norm 20,480 + output
              = 15,387,279,360
"""

from __future__ import annotations

from conformance.models.redraws import REDRAWS
from conformance.models.spec import ModelSpec, TypeRule


def _layers(*ranges: tuple[int, int]) -> tuple[int, ...]:
    """Expand inclusive ranges to one tuple of layer numbers."""
    return tuple(layer for first, last in ranges for layer in range(first, last + 1))


_OUT_PROJECTIONS = ("ssm_out", "attn_output")

_RULES_27B = (
    TypeRule(_OUT_PROJECTIONS, "Q5_K", _layers((34, 54))),
    TypeRule(_OUT_PROJECTIONS, "Q6_K", _layers((55, 63))),
    TypeRule(("attn_k", "attn_v"), "Q6_K", (43, 47, 51, 55, 59, 63)),
    TypeRule(("ffn_down",), "IQ3_S", _layers((6, 15))),
    TypeRule(("ffn_down",), "Q5_K", _layers((38, 62))),
    TypeRule(("ffn_down",), "Q6_K", (0, 1, 63)),
    TypeRule(("ffn_gate", "ffn_up"), "IQ4_XS", _layers((16, 24))),
    TypeRule(("ffn_gate",), "Q5_K", _layers((58, 63))),
    TypeRule(("ffn_up",), "Q6_K", _layers((58, 63))),
)

_RULES_SMALL = (
    TypeRule(("ssm_out",), "Q5_K", (2, 6)),
    TypeRule(_OUT_PROJECTIONS, "Q6_K", (5, 7)),
    TypeRule(("attn_k", "attn_v"), "Q6_K", (7,)),
    TypeRule(("ffn_down",), "IQ3_S", (1, 3)),
    TypeRule(("ffn_down",), "Q5_K", (4, 5)),
    TypeRule(("ffn_down",), "Q6_K", (0, 7)),
    TypeRule(("ffn_gate", "ffn_up"), "IQ4_XS", (2, 3)),
    TypeRule(("ffn_gate",), "Q5_K", (6, 7)),
    TypeRule(("ffn_up",), "Q6_K", (6, 7)),
)

_RULES_TINY = (
    TypeRule(_OUT_PROJECTIONS, "Q5_K", (1,)),
    TypeRule(_OUT_PROJECTIONS, "Q6_K", (2, 3)),
    TypeRule(("attn_k", "attn_v"), "Q6_K", (3,)),
    TypeRule(("ffn_down",), "IQ3_S", (1,)),
    TypeRule(("ffn_down",), "Q5_K", (2,)),
    TypeRule(("ffn_down",), "Q6_K", (0,)),
    TypeRule(("ffn_gate", "ffn_up"), "IQ4_XS", (2,)),
    TypeRule(("ffn_gate",), "Q5_K", (4,)),
    TypeRule(("ffn_up",), "Q6_K", (4,)),
)

PRESETS: dict[str, ModelSpec] = {
    "tiny": ModelSpec(
        name="tiny",
        n_layer=5,
        n_embd=256,
        n_ff=768,
        n_vocab=2048,
        n_head=4,
        n_head_kv=2,
        head_dim=64,
        n_k_heads=4,
        n_v_heads=12,
        ssm_d_state=64,
        seed=1,
        prompt_seed=5,
        rules=_RULES_TINY,
        redraws=REDRAWS["tiny"],
    ),
    "small": ModelSpec(
        name="small",
        n_layer=8,
        n_embd=1024,
        n_ff=3584,
        n_vocab=16384,
        n_head=4,
        n_head_kv=2,
        head_dim=256,
        n_k_heads=4,
        n_v_heads=12,
        ssm_d_state=128,
        seed=1,
        prompt_seed=2,
        rules=_RULES_SMALL,
        redraws=REDRAWS["small"],
    ),
    "27b": ModelSpec(
        name="27b",
        n_layer=64,
        n_embd=5120,
        n_ff=17408,
        n_vocab=248320,
        n_head=24,
        n_head_kv=4,
        head_dim=256,
        n_k_heads=16,
        n_v_heads=48,
        ssm_d_state=128,
        seed=1,
        rules=_RULES_27B,
        redraws=REDRAWS["27b"],
    ),
}
