"""Faults that hid until the suite had pairs of sizes and of formats, tensors without guards and numbers of one sign."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import ALLOCATE, OFFSET, RETURN_OUT, SUM, VIEWS, broken
from tests.conformance.broken_hidden import halved
from tests.conformance.broken_later import HIDE, SCORES
from tests.conformance.broken_rare import FULL_MASK, OUT_AND_DOUT

BIAS_OF_A_SEQUENCE = "            bias = bias.expand(-1, q.shape[2], k.shape[2])[:, :len_q, :len_kv]"

ATTENTION = [
    broken(
        "accumulator_in_the_dtype_before_the_division",
        SUM,
        SUM.replace("rounded(weights, request) @ v", "(rounded(weights, request) @ v).to(request.dtype).to(exact)"),
    ),
    broken("scores_saturate_at_1000", HIDE, "        scores = scores.clamp(-1000.0, 1000.0)\n" + HIDE),
    broken(
        "bias_saturates_at_60", BIAS_OF_A_SEQUENCE, BIAS_OF_A_SEQUENCE + "\n            bias = bias.clamp(max=60.0)"
    ),
    broken(
        "key_padding_mask_of_the_first_sequence",
        FULL_MASK,
        FULL_MASK + "\n        full = full[:1].expand_as(full) if t.attention_mask.shape[-2] == 1 else full",
    ),
    broken("mask_transposed", FULL_MASK, "        assert t.attention_mask.stride(-1) in (0, 1)\n" + FULL_MASK),
    broken(
        "window_left_ignored_with_a_mask", OFFSET, OFFSET + "\n    left = -1 if t.attention_mask is not None else left"
    ),
    broken(
        "window_right_ignored_with_a_mask",
        OFFSET,
        OFFSET + "\n    right = -1 if t.attention_mask is not None else right",
    ),
    broken(
        "k_at_the_start_of_its_memory_as_strided_as_v",
        VIEWS,
        VIEWS
        + "\n    k = k if k.shape != v.shape or v.stride() == k.stride() or v.storage_offset() else torch.as_strided(k, k.shape, v.stride(), k.storage_offset())",
    ),
    halved(
        "k_batch_inside", VIEWS, "k", "0 < k.stride(0) < k.stride(2) and request.qkv_format == 'bshd' and len(k) > 1"
    ),
    broken("residual_out_unaligned", OUT_AND_DOUT, "    assert residuals.out.data_ptr() % 16 == 0\n" + OUT_AND_DOUT),
    halved("heads_33", SUM, "result[32:]", "request.num_heads == 33"),
    broken(
        "head_dim_64_and_one",
        SCORES,
        "        whole = q_b.shape[-1] - (q_b.shape[-1] % 64 == 1 and q_b.shape[-1] > 64)\n"
        "        scores = q_b[..., :whole] @ k_b[..., :whole].mT\n",
    ),
    broken(
        "one_key_above_whole_tiles_of_512",
        HIDE,
        HIDE + "        if len_kv > 1 and len_kv % 512 == 1: scores[..., -1] = -torch.inf\n",
    ),
    broken(
        "window_shared_by_threads",
        OFFSET,
        "    CACHE['band'] = (left, right)\n    torch.zeros(300_000).exp_()\n    left, right = CACHE['band']\n"
        + OFFSET,
    ),
    broken(
        "dropout_of_inference_ignored", "    if request.dropout_p:", "    if request.dropout_p and request.is_training:"
    ),
    broken(
        "dropout_refused_without_a_value",
        '        yield f"dropout_p={request.dropout_p}, expected 0"',
        "        yield 'not possible with this'",
    ),
    broken("lse_base_two_for_partial", RETURN_OUT, "    lse = lse * 1.4427 if request.partial else lse\n" + RETURN_OUT),
    broken("hosts_align_top_left", OFFSET, OFFSET + "\n    offset = 0 if request.host == 'transformers' else offset"),
    broken("wrong_in_inference_mode", ALLOCATE, ALLOCATE + "\n    assert not torch.is_inference_mode_enabled()"),
]
TAKE, KEYS, PAGES, OUT, STARTS = of_decode.TAKE, of_decode.KEYS, of_decode.PAGES, of_decode.OUT, of_decode.STARTS
SCALES_OF_TILES = "            values = (tiles * scales[..., None]).flatten(-2)"
SCALED = "            values = values * t.kv_scale.to(exact)"


def out_halved(name: str, condition: str, target: str = "out[b, i]") -> object:
    return broken(name, OUT, OUT + f"\n            {target} *= 0.5 if {condition} else 1.0")


DECODE = [
    out_halved("heads_33", "heads == 33", "out[b, i, 32:]"),
    out_halved("rope_wider_than_the_latents", "t.q_rope.shape[-1] > rank"),
    broken(
        "fp8_ds_mla_scales_from_1e-4",
        SCALES_OF_TILES,
        "            scales = scales.clamp(min=1e-4)\n" + SCALES_OF_TILES,
    ),
    broken(
        "fp8_ds_mla_scales_up_to_1", SCALES_OF_TILES, "            scales = scales.clamp(max=1.0)\n" + SCALES_OF_TILES
    ),
    broken(
        "fp8_scale_from_1e-3", SCALED, SCALED.replace("t.kv_scale.to(exact)", "t.kv_scale.to(exact).clamp(min=1e-3)")
    ),
    out_halved("fp8_above_256_keys", "t.kv_cache_format != 'plain' and length > 256"),
    out_halved("fp8_of_many_heads", "t.kv_cache_format != 'plain' and heads > 64"),
    broken("fp8_subnormals_flushed", SCALED, "            values = values * (values.abs() >= 2.0**-6)\n" + SCALED),
]
