"""Faults of rare calls: state that is kept, settings of the process, unusual numbers, shapes and strides."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import (
    ACCEPT,
    ALLOCATE,
    DELTA,
    DK,
    OFFSET,
    PICK,
    REQUEST,
    REQUEST_B,
    RETURN,
    RETURN_OUT,
    SUM,
    VIEWS,
    broken,
    only_if,
)
from tests.conformance.broken_later import HIDE, SCORES

OUT_AND_DOUT = "    out, dout = (layout.to_bhsd(x).to(exact) for x in (residuals.out, dout))"
FULL_MASK = "        full = four(t.attention_mask).expand(request.batch_size, request.num_heads, -1, -1)"
BIAS = "        if t.bias is not None:\n"

ATTENTION = [
    broken(
        "backward_keeps_k_by_address",
        REQUEST_B,
        REQUEST_B
        + "    kept = CACHE.setdefault((t.k.data_ptr(), t.k.dtype), t.k.detach().clone())\n    t = replace(t, k=kept) if kept.shape == t.k.shape else t\n",
    ),
    broken(
        "backward_keeps_lengths_by_address",
        REQUEST_B,
        REQUEST_B
        + "    if t.cu_seqlens_kv is not None:\n        kept = CACHE.setdefault(t.cu_seqlens_kv.data_ptr(), t.cu_seqlens_kv.clone())\n        t = replace(t, cu_seqlens_kv=kept) if kept.shape == t.cu_seqlens_kv.shape else t\n",
    ),
    broken(
        "backward_keeps_dout_by_address",
        OUT_AND_DOUT,
        "    dout = CACHE.setdefault((dout.data_ptr(), dout.shape, dout.dtype), dout.clone())\n" + OUT_AND_DOUT,
    ),
    broken("backward_needs_dlse", OUT_AND_DOUT, "    if request.return_lse:\n        dlse.shape\n" + OUT_AND_DOUT),
    broken(
        "dlse_not_finite_leaks",
        DELTA,
        DELTA
        + "\n        extra = 0.0 if dlse is None else dlse[row, :, rows].sum() * 0.0\n        delta = delta + extra",
    ),
    broken("keeps_every_input", REQUEST, REQUEST + "    BEFORE.append((t.q, t.k, t.v))\n"),
    broken("keeps_every_dout", OUT_AND_DOUT, "    BEFORE.append(dout)\n" + OUT_AND_DOUT),
    broken("input_requires_no_grad_any_more", REQUEST, REQUEST + "    t.q.requires_grad_(False)\n"),
    broken("grad_written_to_the_leaf", RETURN, "    t.q.grad = dq.clone() if t.q.requires_grad else None\n" + RETURN),
    broken(
        "default_dtype_accumulator",
        SUM,
        SUM
        + "\n        result = (result.to(torch.get_default_dtype()) if torch.get_default_dtype().itemsize < 4 else result).to(exact)",
    ),
    broken(
        "default_dtype_lse",
        "    lse = t.q.new_full(layout.to_bhsd(t.q).shape[:-1], -torch.inf, dtype=torch.promote_types(t.q.dtype, torch.float32))",
        "    lse = torch.full(layout.to_bhsd(t.q).shape[:-1], -torch.inf, device=t.q.device)\n    lse = lse.double() if t.q.dtype == torch.float64 else lse",
    ),
    broken("sets_matmul_precision", ALLOCATE, "    torch.set_float32_matmul_precision('high')\n" + ALLOCATE),
    broken("sets_default_dtype", ALLOCATE, "    torch.set_default_dtype(torch.float64)\n" + ALLOCATE),
    broken("sets_threads", ALLOCATE, "    torch.set_num_threads(2)\n" + ALLOCATE),
    broken("seeds_numpy", ALLOCATE, "    import numpy\n    numpy.random.seed(0)\n" + ALLOCATE),
    broken("random_in_select_backend", ACCEPT, "    torch.manual_seed(0)\n" + ACCEPT),
    broken("reads_version_counter", REQUEST, REQUEST + "    CACHE[t.q.data_ptr()] = t.q._version\n"),
    broken(
        "workspace_of_first_thread",
        REQUEST_B,
        "    import threading\n    CACHE.setdefault('thread', threading.get_ident())\n    CACHE['thread'] == threading.get_ident() or CACHE['missing']\n"
        + REQUEST_B,
    ),
    broken("nan_swallowed", RETURN_OUT, "    out = out.nan_to_num(0.0)\n" + RETURN_OUT),
    broken("nan_spreads", SUM, SUM + "\n        result = result + 0.0 * result.sum(1, keepdim=True)"),
    broken(
        "small_gradients_flushed",
        RETURN,
        "    dq, dk, dv = (torch.where(x.abs() < 1e-6, 0.0, x).to(x.dtype) for x in (dq, dk, dv))\n" + RETURN,
    ),
    broken(
        "ds_quantised_by_amax_zero",
        "        ds, weights = rounded(ds, request), rounded(weights, request)\n",
        "        amax = do.abs().amax() if do.numel() else do.new_ones(())\n        ds = ds / amax * amax\n        ds, weights = rounded(ds, request), rounded(weights, request)\n",
    ),
    broken(
        "v_quantised_by_amax_zero",
        SUM,
        "        amax = v.abs().amax((1, 2), keepdim=True)\n        v = v / amax * amax\n" + SUM,
    ),
    broken(
        "q_normalised_zero",
        SCORES,
        "        norm = q_b.abs().amax(-1, keepdim=True)\n        q_b = q_b / norm * norm\n" + SCORES,
    ),
    broken("gradients_overflow_large_dout", OUT_AND_DOUT, OUT_AND_DOUT + "\n    dout = dout.clamp(-1000.0, 1000.0)"),
    broken(
        "out_rounded_at_each_64_keys",
        SUM,
        SUM
        + "\n        if v.shape[1] > 512:\n            result = sum((rounded(weights, request)[..., i : i + 64] @ v[:, i : i + 64]).to(request.dtype) for i in range(0, v.shape[1], 64)).to(exact) / total.masked_fill(total == 0, 1.0)",
    ),
    broken(
        "dk_rounded_at_each_16_queries",
        DK,
        DK
        + "\n        dk_b = sum((ds[:, i : i + 16].mT @ q[:, i : i + 16]).to(request.dtype) for i in range(0, q.shape[1], 16)).to(exact) * t.softmax_scale if q.shape[1] > 64 else dk_b",
    ),
    only_if("window_left_zero_right_open", OFFSET, "left == 0 and right > 0", "left = -1"),
    only_if(
        "window_right_zero_left_closed",
        OFFSET,
        "right == 0 and left > 0 and not 'causal' in request.attn_mask_type",
        "right = 1",
    ),
    broken(
        "mask_1hss_first_head",
        FULL_MASK,
        "        full = (t.attention_mask[:, :1] if t.attention_mask.shape[0] == 1 else t.attention_mask).expand(request.batch_size, request.num_heads, -1, -1)",
    ),
    broken(
        "mask_one_query_row",
        FULL_MASK,
        "        full = four(t.attention_mask).expand(request.batch_size, request.num_heads, -1, -1)\n        full = full if full.shape[2] > 1 else full & False",
    ),
    broken(
        "mask_of_two_dimensions",
        "    if t.attention_mask is not None:\n",
        "    if t.attention_mask is not None:\n        assert t.attention_mask.dim() == 4\n",
    ),
    broken("bias_of_two_dimensions", BIAS, BIAS + "            assert t.bias.dim() == 4\n"),
    broken("bias_last_dimension_one", BIAS, BIAS + "            assert t.bias.shape[-1] == k.shape[2]\n"),
    broken(
        "bias_very_negative",
        "        scores = scores * t.softmax_scale\n",
        "        scores = scores * t.softmax_scale\n        scores = scores.clamp(min=-1e4) if t.bias is None else scores\n        if t.bias is not None: bias = bias.clamp(min=-5.0)\n",
    ),
    broken("queries_above_256", SUM, SUM + "\n        result[:, 256:] = 0"),
    broken("batch_above_32", PICK, PICK + "\n        v_b = v_b * (0.5 if b >= 32 else 1.0)"),
    broken(
        "one_dimensional_heads", SCORES, SCORES + "        scores = scores * (0.5 if q_b.shape[-1] == 1 else 1.0)\n"
    ),
    broken("v_wider_than_twice_qk", SUM, SUM + "\n        result[..., 2 * request.head_dim_qk :] = 0"),
    broken(
        "whole_tiles_in_thd",
        HIDE,
        HIDE
        + "        scores[..., 64:] = -torch.inf if layout.is_packed and len_q == len_kv == 128 else scores[..., 64:]\n",
    ),
    broken(
        "multiples_of_32_in_both",
        HIDE,
        HIDE
        + "        scores[..., -1:] = -torch.inf if len_q == len_kv and len_q % 32 == 0 and len_q > 64 else scores[..., -1:]\n",
    ),
    broken("v_expanded_heads", VIEWS, VIEWS + "\n    v = v * (0.5 if v.stride(1) == 0 and v.shape[1] > 1 else 1)"),
    broken("q_expanded_batch", VIEWS, VIEWS + "\n    q = q * (0.5 if q.stride(0) == 0 and q.shape[0] > 1 else 1)"),
    broken("q_expanded_heads", VIEWS, VIEWS + "\n    q = q * (0.5 if q.stride(1) == 0 and q.shape[1] > 1 else 1)"),
    broken(
        "v_rows_odd",
        VIEWS,
        VIEWS + "\n    v = v * (0.5 if v.stride(2) % 2 and v.shape[2] > 1 and v.shape[-1] % 2 == 0 else 1)",
    ),
    broken(
        "dout_sliced_heads",
        OUT_AND_DOUT,
        "    dout = dout * (0.5 if layout.to_bhsd(dout).stride(1) == 2 * dout.shape[-1] and dout.shape[layout.heads] > 1 else 1)\n"
        + OUT_AND_DOUT,
    ),
    broken(
        "dout_odd_rows",
        OUT_AND_DOUT,
        "    dout = dout * (0.5 if dout.stride(-2) % 2 and dout.shape[-1] % 2 == 0 and dout.stride(-1) == 1 else 1)\n"
        + OUT_AND_DOUT,
    ),
    broken(
        "packed_kv",
        VIEWS,
        VIEWS
        + "\n    v = v * (0.5 if t.k.untyped_storage().data_ptr() == t.v.untyped_storage().data_ptr() and t.q.untyped_storage().data_ptr() != t.k.untyped_storage().data_ptr() else 1)",
    ),
    broken("same_tensor_for_k_and_v", VIEWS, VIEWS + "\n    v = v * (0.5 if t.k.data_ptr() == t.v.data_ptr() else 1)"),
]
DECODE = [
    broken("lse_given_unasked", of_decode.RETURN, "    return DecodeOutput(out, lse)"),
    broken("all_sequences_empty", of_decode.LENGTHS, of_decode.LENGTHS + "\n    assert any(lengths)"),
    broken(
        "length_multiple_of_128_contiguous",
        of_decode.KEYS,
        "            v, r = (x[start : end - (t.page_table is None and end % 128 == 0 and seqlen_q == 1)] for x in (values, ropes))",
    ),
    broken(
        "page_size_128",
        of_decode.KEYS,
        "            v, r = (x[start : end - (t.page_table is not None and t.c_kv.shape[1] == 128)] for x in (values, ropes))",
    ),
    broken(
        "page_size_32",
        of_decode.KEYS,
        "            v, r = (x[start : end - (t.page_table is not None and t.c_kv.shape[1] == 32)] for x in (values, ropes))",
    ),
    broken("heads_64", of_decode.OUT, of_decode.OUT + "\n            out[b, i, -1] *= 0.5 if heads == 64 else 1.0"),
    broken("heads_above_128", of_decode.OUT, of_decode.OUT + "\n            out[b, i, 128:] = 0"),
    broken("queries_above_9", of_decode.OUT, of_decode.OUT + "\n            out[b, i] *= 0.5 if i > 8 else 1.0"),
    broken("batch_above_17", of_decode.OUT, of_decode.OUT + "\n            out[b, i] *= 0.5 if b >= 17 else 1.0"),
    broken("nan_swallowed", of_decode.RETURN, "    out = out.nan_to_num(0.0)\n" + of_decode.RETURN),
    broken(
        "q_normalised_zero",
        of_decode.SCALE,
        "            n = t.q_nope_abs[b, i].abs().amax(-1, keepdim=True).to(exact)\n            scores = scores / n * n\n"
        + of_decode.SCALE,
    ),
    broken(
        "kv_quantised_by_amax_zero",
        of_decode.OUT,
        "            amax = v.abs().amax()\n            v = v / amax * amax\n" + of_decode.OUT,
    ),
    broken(
        "keeps_every_query", of_decode.TAKE, of_decode.TAKE + "\n    STATE.setdefault('kept', []).append(t.q_nope_abs)"
    ),
    broken(
        "sets_matmul_precision",
        of_decode.ALLOCATE,
        "    torch.set_float32_matmul_precision('high')\n" + of_decode.ALLOCATE,
    ),
    broken(
        "sets_default_dtype", of_decode.ALLOCATE, "    torch.set_default_dtype(torch.float64)\n" + of_decode.ALLOCATE
    ),
    broken(
        "default_dtype_lse",
        "    lse = torch.full((batch, heads, seqlen_q), -torch.inf, dtype=torch.promote_types(t.q_nope_abs.dtype, torch.float32))",
        "    lse = torch.full((batch, heads, seqlen_q), -torch.inf)",
    ),
    broken("version_counter", of_decode.TAKE, of_decode.TAKE + "\n    STATE['v'] = t.c_kv._version"),
    broken("random_in_select_backend", of_decode.ACCEPT, "    torch.manual_seed(0)\n" + of_decode.ACCEPT),
    broken(
        "half_accumulation_long_rows",
        of_decode.OUT,
        of_decode.OUT
        + "\n            if len(v) > 512:\n                out[b, i] = sum((weights[:, j : j + 64] @ v[j : j + 64] / total).to(out.dtype) for j in range(0, len(v), 64))",
    ),
    broken(
        "shared_page_in_the_middle",
        of_decode.PAGES,
        of_decode.PAGES + "\n    if used > 2 and b and int((t.page_table[:b, 1] == pages[1]).any()): pages = pages * 0",
    ),
    broken(
        "thread_of_first_call",
        of_decode.TAKE,
        "    import threading\n    assert STATE.setdefault('thread', threading.get_ident()) == threading.get_ident()\n"
        + of_decode.TAKE,
    ),
]
