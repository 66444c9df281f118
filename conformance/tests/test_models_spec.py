from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from conformance.models import PRESETS, plan_tensors
from conformance.models.spec import PlannedTensor

PLAN_27B = plan_tensors(PRESETS["27b"])


def _stem(tensor: PlannedTensor) -> str:
    return tensor.name.split(".")[2] if tensor.name.startswith("blk.") else tensor.name


def _counts(plan: list[PlannedTensor], stems: set[str]) -> Counter[str]:
    return Counter(tensor.type for tensor in plan if _stem(tensor) in stems)


def test_27b_has_the_byte_sums_of_the_article() -> None:
    n_bytes = {tensor.name: tensor.n_bytes for tensor in PLAN_27B}
    assert n_bytes["token_embd.weight"] == 715_161_600
    assert n_bytes["output.weight"] == 1_042_944_000
    assert sum(size for name, size in n_bytes.items() if name.startswith("blk.")) == 14_344_308_736


def test_27b_resident_bytes_padded_to_256() -> None:
    resident = [tensor.n_bytes for tensor in PLAN_27B if tensor.name != "token_embd.weight"]
    assert sum(-(-size // 256) * 256 for size in resident) == 15_387_279_360


def test_27b_has_the_type_counts_of_the_article() -> None:
    out_projections = _counts(PLAN_27B, {"ssm_out", "attn_output"})
    assert out_projections["Q6_K"] == 9
    ffn_down = _counts(PLAN_27B, {"ffn_down"})
    assert (ffn_down["Q6_K"], ffn_down["IQ3_S"]) == (3, 10)
    assert _counts(PLAN_27B, {"attn_k", "attn_v"})["Q6_K"] == 12
    types = {tensor.name: tensor.type for tensor in PLAN_27B}
    pairs = Counter((types[f"blk.{i}.ffn_gate.weight"], types[f"blk.{i}.ffn_up.weight"]) for i in range(64))
    assert pairs == {("Q4_K", "Q4_K"): 49, ("IQ4_XS", "IQ4_XS"): 9, ("Q5_K", "Q6_K"): 6}


def test_27b_has_the_layers_of_the_article() -> None:
    names = [tensor.name for tensor in PLAN_27B]
    assert sum(name.endswith("ssm_out.weight") for name in names) == 48
    assert sum(name.endswith("attn_output.weight") for name in names) == 16
    shapes = {tensor.name: tensor.shape for tensor in PLAN_27B}
    assert shapes["blk.0.ssm_conv1d.weight"] == (4, 10240)
    assert shapes["blk.3.attn_q.weight"] == (5120, 12288)
    assert {t.type for t in PLAN_27B if _stem(t) in {"ssm_alpha", "ssm_beta"}} == {"F32"}


@pytest.mark.parametrize("kind", PRESETS)
def test_every_preset_has_all_formats(kind: str) -> None:
    types = {tensor.type for tensor in plan_tensors(PRESETS[kind])}
    assert types == {"Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "F32"}


@pytest.mark.parametrize(("head_dim", "sections"), [(64, (3, 3, 2, 0)), (128, (6, 6, 4, 0)), (256, (11, 11, 10, 0))])
def test_rope_sections_fill_the_rotated_pairs(head_dim: int, sections: tuple[int, ...]) -> None:
    spec = replace(PRESETS["tiny"], head_dim=head_dim)
    assert spec.rope_sections == sections
    assert sum(sections) == spec.n_rot // 2


def test_mtp_block_is_an_attention_layer_with_nextn_tensors() -> None:
    plan = plan_tensors(replace(PRESETS["tiny"], has_mtp_block=True))
    block = {tensor.name.removeprefix("blk.5."): tensor.shape for tensor in plan if tensor.name.startswith("blk.5.")}
    assert block["nextn.eh_proj.weight"] == (512, 256)
    assert {"nextn.enorm.weight", "nextn.hnorm.weight", "nextn.shared_head_norm.weight"} < block.keys()
    assert "attn_q.weight" in block
    assert not any(name.startswith("ssm") for name in block)


def test_tied_output_has_no_output_tensor() -> None:
    assert "output.weight" not in {t.name for t in plan_tensors(replace(PRESETS["tiny"], tied_output=True))}


def test_a_row_that_is_no_whole_block_is_refused() -> None:
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_down\.weight: row of 700 .* 256"):
        plan_tensors(replace(PRESETS["tiny"], n_ff=700))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head_kv": 3}, "n_head"),
        ({"n_k_heads": 5}, "n_v_heads"),
        ({"n_embd": 100}, "n_embd"),
        ({"n_vocab": 300}, "n_vocab"),
        ({"head_dim": 60}, "head_dim"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PRESETS["tiny"], **change)  # type: ignore[arg-type]
