"""Attention backends that each differ from ``plain_attention`` in one line."""

from __future__ import annotations

from tests.conformance.mutants import Broken

OUT = "        layout.to_bhsd(out)[row, :, rows] = result.to(out.dtype)"
LSE = "        lse[row, :, rows] = (top + total.log()).squeeze(-1).to(lse.dtype)"
RETURN_OUT = "    return AttentionOutput(out, lse.squeeze(0) if layout.is_packed else lse)"
RETURN = "    return Gradients(dq, dk, dv, None if dbias is None else dbias.to(t.q.dtype))"
ACCEPT = "    return Refused(reasons) if reasons else Accepted()"
ALLOCATE = "    out = t.q.new_zeros((*t.q.shape[:-1], t.v.shape[-1]))"
OFFSET = "    offset = len_kv - len_q if bottom_right else 0"
LEFT = "    if left >= 0:"
RIGHT = "    if right >= 0:"
SCALE = "        scores = scores * t.softmax_scale"
SUM = "        result = rounded(weights, request) @ v / total.masked_fill(total == 0, 1.0)"
DQ = "        dq_b = ds @ k * t.softmax_scale"
DK = "        dk_b = ds.mT @ q * t.softmax_scale"
DV = "        dv_b = weights.mT @ do"
GROUPS = "        dk_b, dv_b = (x.unflatten(0, (-1, group)).sum(1) for x in (dk_b, dv_b))"
DLSE = "            delta = delta - dlse[row, :, rows]"
DELTA = "        delta = (do * out[row, :, rows]).sum(-1)"
REPEAT = "        k_b, v_b = k_b.repeat_interleave(group, 0), v_b.repeat_interleave(group, 0)"
PICK = "        q_b, k_b, v_b = q[row, :, rows], k[row, :, columns], v[row, :, columns]"
STARTS = "    starts = (cu if padded is None else padded)[:-1].tolist()"
LENGTHS = "    lengths = cu.diff().tolist()"
VIEWS = "    q, k, v = (layout.to_bhsd(x) for x in (t.q, t.k, t.v))"
REQUEST = "    request, t = plan.request, tensors\n"
REQUEST_B = "    request, t = plan.request, residuals.tensors\n"
TOP = "        top = scores.amax(-1, keepdim=True)\n"
HAS = "request.has_sliding_window"
GQA = "request.num_heads != request.num_kv_heads"


def broken(name: str, old: str, new: str) -> Broken:
    return Broken(name, old, new)


def after(name: str, line: str, more: str) -> Broken:
    """The line, and another one behind it."""
    return Broken(name, line, line.rstrip("\n") + "\n" + more + ("\n" if line.endswith("\n") else ""))


def only_if(name: str, line: str, condition: str, otherwise: str) -> Broken:
    """The line replaced where the condition holds; both are assignments to the same name."""
    target, _, value = otherwise.strip().partition(" = ")
    indent = line[: len(line) - len(line.lstrip())]
    return after(name, line, f"{indent}{target} = {value} if {condition} else {target}")


COMBINATIONS = [
    only_if("window_ignored_with_gqa", REQUEST, GQA, "request = request.replace(window_size=(-1, -1))"),
    only_if("window_one_wider", OFFSET, "True", "left = left + (left > 0)"),
    only_if("window_one_wider_with_gaps", OFFSET, "request.pad_between_seqs", "left = left + (left > 0)"),
    only_if("window_one_narrower_right_sbhd", OFFSET, "request.qkv_format == 'sbhd'", "right = right - (right > 0)"),
    only_if("window_top_left_in_bhsd", OFFSET, f"request.qkv_format == 'bhsd' and {HAS}", "offset = 0"),
    only_if("window_bottom_right_always", OFFSET, HAS, "offset = len_kv - len_q"),
    only_if("window_wrong_in_fp16", OFFSET, "request.dtype == torch.float16", "left = left - (left > 0)"),
    only_if("window_ignored_with_bias", OFFSET, "t.bias is not None", "left = -1"),
    only_if("window_right_ignored_in_thd", OFFSET, "request.qkv_format == 'thd' and right > 0", "right = -1"),
    only_if("window_left_zero_is_none", OFFSET, "left == 0", "left = -1"),
    only_if(
        "diagonal_of_extents",
        OFFSET,
        "bottom_right and request.has_padding",
        "offset = request.max_seqlen_kv - request.max_seqlen_q",
    ),
    only_if("dlse_ignored_with_window", DELTA, f"dlse is not None and {HAS}", "delta = delta + dlse[row, :, rows]"),
    only_if(
        "dlse_ignored_with_gaps",
        DELTA,
        "dlse is not None and request.pad_between_seqs",
        "delta = delta + dlse[row, :, rows]",
    ),
    only_if("dlse_twice_in_gqa", DELTA, f"dlse is not None and {GQA}", "delta = delta - dlse[row, :, rows]"),
    broken("dlse_added", DLSE, DLSE.replace("delta - dlse", "delta + dlse")),
    broken("dlse_ignored", DLSE, DLSE.replace("- dlse[row, :, rows]", "- 0.0")),
    only_if(
        "gqa_group_order_with_padding",
        REPEAT,
        f"request.has_padding and {GQA}",
        "k_b = k[row, :, columns].to(exact).repeat(group, 1, 1)",
    ),
    only_if(
        "gqa_group_order_with_gaps",
        REPEAT,
        f"request.pad_between_seqs and {GQA}",
        "v_b = v[row, :, columns].to(exact).repeat(group, 1, 1)",
    ),
    broken("gqa_tiled_heads", REPEAT, REPEAT.replace("k_b.repeat_interleave(group, 0)", "k_b.repeat(group, 1, 1)")),
    broken("gqa_gradient_of_one_head", GROUPS, GROUPS.replace(".sum(1)", "[:, 0]")),
    only_if("gqa_mean_for_large_groups", GROUPS, "group > 5", "dk_b = dk_b / group"),
    only_if("causal_ignored_with_bias", OFFSET, "t.bias is not None and right == 0", "right = -1"),
    only_if(
        "fp16_bias_halved",
        "            bias = bias.expand(-1, q.shape[2], k.shape[2])[:, :len_q, :len_kv]",
        "request.dtype == torch.float16",
        "bias = bias / 2",
    ),
    only_if(
        "fp16_gaps_first_row",
        STARTS,
        "request.dtype == torch.float16 and padded is not None",
        "starts = [start + 1 for start in starts]",
    ),
    only_if(
        "pre_scale_is_post_scale",
        REQUEST,
        "request.bias_type == 'pre_scale_bias'",
        "request = request.replace(bias_type='post_scale_bias')",
    ),
    broken(
        "bias_gradient_not_scaled",
        '    factor = t.softmax_scale if request.bias_type == "pre_scale_bias" else 1.0',
        "    factor = 1.0",
    ),
    broken(
        "bias_gradient_of_first_sequence", "    target = dbias[b if dbias.shape[0] > 1 else 0]", "    target = dbias[0]"
    ),
    broken(
        "mask_inverted_for_last_head",
        "        mask = mask | full[b][:, :len_q, :len_kv].expand(mask.shape)",
        "        mask = mask | (full[b][:, :len_q, :len_kv].expand(mask.shape) ^ (torch.arange(request.num_heads) == 3)[:, None, None])",
    ),
]
NUMBERS = [
    broken("scale_of_head_dim_v", SCALE, SCALE.replace("t.softmax_scale", "request.head_dim_v**-0.5")),
    broken(
        "scale_ignored_when_causal",
        SCALE,
        SCALE.replace("t.softmax_scale", "(request.head_dim_qk**-0.5 if request.is_causal else t.softmax_scale)"),
    ),
    broken(
        "scale_ignored_in_thd",
        SCALE,
        SCALE.replace(
            "t.softmax_scale", "(request.head_dim_qk**-0.5 if request.qkv_format == 'thd' else t.softmax_scale)"
        ),
    ),
    broken("scale_default_in_dq", DQ, DQ.replace("t.softmax_scale", "request.head_dim_qk**-0.5")),
    broken("dq_half_a_percent", DQ, DQ + " * 1.005"),
    broken("dk_half_a_percent", DK, DK + " * 0.995"),
    broken("dv_half_a_percent", DV, "        dv_b = weights.mT @ do * 1.005"),
    broken("out_half_a_percent", SUM, SUM + " * 1.005"),
    only_if("out_half_a_percent_in_bf16", SUM, "request.dtype == torch.bfloat16", "result = result * 0.995"),
    only_if("dq_half_a_percent_in_fp16", DQ, "request.dtype == torch.float16", "dq_b = dq_b * 1.005"),
    only_if(
        "fp16_scores_overflow",
        "        scores = q_b @ k_b.mT\n",
        "request.dtype == torch.float16",
        "scores = scores.to(request.dtype).to(exact)",
    ),
    broken("nan_above_80", TOP, "        top = scores.amax(-1, keepdim=True) * 0.0\n"),
    broken(
        "clamped_scores", SCALE, SCALE.replace("scores * t.softmax_scale", "(scores * t.softmax_scale).clamp(-50, 50)")
    ),
    broken(
        "out_summed_in_low_precision",
        SUM,
        SUM.replace(
            "rounded(weights, request) @ v",
            "(sum(w.to(request.dtype)[..., None] * x[:, None].to(request.dtype) for w, x in zip(weights.unbind(-1), v.unbind(1))) + torch.zeros((), dtype=request.dtype)).to(exact)",
        ),
    ),
    broken(
        "dv_summed_in_low_precision",
        DV,
        "        dv_b = (sum(w[..., None].to(request.dtype) * x[:, None].to(request.dtype) for w, x in zip(weights.unbind(1), do.unbind(1))) + torch.zeros((), dtype=request.dtype)).to(exact)",
    ),
    broken("lse_rounded", LSE, LSE.replace(".to(lse.dtype)", ".to(request.dtype).to(lse.dtype)")),
    broken("lse_base_two", LSE, LSE.replace("(top + total.log())", "((top + total.log()) * 1.4427)")),
    broken("lse_without_maximum", LSE, LSE.replace("top + total.log()", "total.log()")),
    broken("lse_of_unscaled_scores", LSE, LSE.replace("top + total.log()", "top / t.softmax_scale + total.log()")),
    broken(
        "weights_in_float8_steps",
        "    return x.to(WEIGHTS or request.dtype).to(x.dtype)",
        "    return x.to(torch.bfloat16 if request.dtype == torch.float16 else request.dtype).to(x.dtype)",
    ),
    broken(
        "fp32_through_tf32",
        "        q_b, k_b, v_b = q_b.to(exact), k_b.to(exact), v_b.to(exact)",
        "        q_b, k_b, v_b = (x.to(torch.float16).to(exact) if x.dtype == torch.float32 else x.to(exact) for x in (q_b, k_b, v_b))",
    ),
    broken(
        "exp_of_few_terms",
        "        weights = (scores - top).exp()\n",
        "        weights = torch.exp2(((scores - top) * 1.4375))\n",
    ),
    broken(
        "fp64_in_fp32",
        "    return EXACT or (torch.float64 if dtype == torch.float64 else torch.float32)",
        "    return EXACT or torch.float32",
    ),
    broken(
        "small_weights_dropped",
        "        total = weights.sum(-1, keepdim=True)\n",
        "        weights = weights * (weights > 0.02)\n        total = weights.sum(-1, keepdim=True)\n",
    ),
    broken(
        "epsilon_in_the_sum",
        "        total = weights.sum(-1, keepdim=True)\n",
        "        total = weights.sum(-1, keepdim=True) + 0.01\n",
    ),
]
PADDING = [
    after(
        "tail_of_out_written",
        "    lse = t.q.new_full(layout.to_bhsd(t.q).shape[:-1], -torch.inf, dtype=torch.promote_types(t.q.dtype, torch.float32))",
        "    out[-1:] = 1.0 if layout.is_packed else out[-1:]",
    ),
    broken(
        "tail_of_dk_written",
        RETURN,
        "    dk[-1:] = 1e-3 if layout.is_packed and dk.shape[0] > t.cu_seqlens_kv[-1] else dk[-1:]\n" + RETURN,
    ),
    broken(
        "gap_of_dv_written",
        RETURN,
        "    dv[0] = dv[0] + (1e-3 if request.pad_between_seqs and t.cu_seqlens_kv_padded[0] > 0 else 0)\n" + RETURN,
    ),
    broken(
        "padded_rows_of_dq_copied",
        RETURN,
        "    dq = torch.where(dq == 0, 1e-30, dq) if request.has_padding and not layout.is_packed else dq\n" + RETURN,
    ),
    broken("first_offset_taken_as_zero", STARTS, STARTS + "\n    starts = [start - starts[0] for start in starts]"),
    broken("padded_offsets_ignored", STARTS, "    starts = cu[:-1].tolist()"),
    only_if(
        "padded_offsets_of_q_for_k",
        REQUEST,
        "tensors.cu_seqlens_q_padded is not None",
        "t = replace(t, cu_seqlens_kv_padded=t.cu_seqlens_q_padded)",
    ),
    only_if(
        "max_seqlen_is_a_length",
        LENGTHS,
        "request.qkv_format == 'thd' and len(cu) == 3",
        "lengths = [min(x, request.max_seqlen_q) if i else min(x + 1, request.max_seqlen_q, int(cu[1])) if cu[1] == request.max_seqlen_q else x for i, x in enumerate(lengths)]",
    ),
    broken(
        "longest_taken_for_every_sequence",
        LENGTHS,
        "    lengths = [min(request.max_seqlen_kv, extent - int(c)) if len(cu) == 2 else int(d) for c, d in zip(cu[:-1], cu.diff())]",
    ),
    broken(
        "lengths_cached_per_request",
        LENGTHS,
        "    lengths = CACHE.setdefault((request, cu is None or cu.data_ptr() % 2, extent, len(BEFORE)), cu.diff().tolist())",
    ),
    broken(
        "padding_ignored_on_keys",
        "        return [(0, length) for length in lengths]",
        "        return [(0, length if length else 0) if extent != request.max_seqlen_kv else (0, min(extent, length + 1)) for length in lengths]",
    ),
    broken("rows_without_keys_lse_finite", LSE, LSE.replace(".to(lse.dtype)", ".to(lse.dtype).clamp(min=-1e30)")),
    broken(
        "rows_without_keys_out_mean",
        SUM,
        SUM + "\n        result = torch.where(total == 0, v.mean(1, keepdim=True), result)",
    ),
    broken("rows_without_keys_nan", SUM, SUM.replace(".masked_fill(total == 0, 1.0)", "")),
]
STRIDES = [
    broken(
        "v_as_strided_as_k",
        VIEWS,
        VIEWS
        + "\n    v = v if v.shape != k.shape or v.stride() == k.stride() else torch.as_strided(v, v.shape, k.stride(), v.storage_offset())",
    ),
    broken(
        "v_rows_of_its_own_width",
        VIEWS,
        VIEWS
        + "\n    v = layout.to_bhsd(torch.as_strided(t.v, t.v.shape, torch.empty(t.v.shape).stride(), t.v.storage_offset())) if t.v.untyped_storage().nbytes() > t.v.numel() * t.v.element_size() and t.k.is_contiguous() and t.v.stride(0) > 0 else v",
    ),
    broken(
        "k_taken_as_contiguous",
        VIEWS,
        VIEWS
        + "\n    k = layout.to_bhsd(torch.as_strided(t.k, t.k.shape, torch.empty(t.k.shape).stride(), t.k.storage_offset())) if t.k.stride(0) >= torch.empty(t.k.shape).stride(0) else k",
    ),
    broken(
        "q_offset_ignored",
        VIEWS,
        VIEWS
        + "\n    q = layout.to_bhsd(torch.as_strided(t.q, t.q.shape, t.q.stride(), t.q.storage_offset() // 8 * 8))",
    ),
    broken(
        "v_offset_rounded_to_16_bytes",
        VIEWS,
        VIEWS
        + "\n    v = layout.to_bhsd(torch.as_strided(t.v, t.v.shape, t.v.stride(), t.v.storage_offset() // 8 * 8))",
    ),
    broken(
        "dout_last_stride_ignored",
        "    out, dout = (layout.to_bhsd(x).to(exact) for x in (residuals.out, dout))",
        "    dout = torch.as_strided(dout, dout.shape, (*dout.stride()[:-1], 1), dout.storage_offset()) if dout.stride(-1) == 2 else dout\n    out, dout = (layout.to_bhsd(x).to(exact) for x in (residuals.out, dout))",
    ),
    broken(
        "dout_taken_as_contiguous",
        "    out, dout = (layout.to_bhsd(x).to(exact) for x in (residuals.out, dout))",
        "    dout = torch.as_strided(dout, dout.shape, torch.empty(dout.shape).stride(), dout.storage_offset()) if dout.stride(0) > dout.stride(1) > dout.shape[-1] else dout\n    out, dout = (layout.to_bhsd(x).to(exact) for x in (residuals.out, dout))",
    ),
    broken(
        "dlse_taken_as_contiguous",
        "        dlse = (dlse[None] if layout.is_packed else dlse).to(exact)",
        "        dlse = torch.as_strided(dlse, dlse.shape, torch.empty(dlse.shape).stride(), dlse.storage_offset()) if dlse.stride(-1) == 2 else dlse\n        dlse = (dlse[None] if layout.is_packed else dlse).to(exact)",
    ),
    broken(
        "dlse_expanded_is_zero",
        "        dlse = (dlse[None] if layout.is_packed else dlse).to(exact)",
        "        dlse = dlse * float(any(dlse.stride()))\n        dlse = (dlse[None] if layout.is_packed else dlse).to(exact)",
    ),
    broken(
        "bias_taken_as_contiguous",
        "        if t.bias is not None:\n",
        "        if t.bias is not None and not t.bias.is_contiguous() and t.bias.shape[0] == 1:\n            t = replace(t, bias=torch.as_strided(t.bias, t.bias.shape, torch.empty(t.bias.shape).stride(), t.bias.storage_offset()))\n        if t.bias is not None:\n",
    ),
    broken(
        "mask_taken_as_contiguous",
        "        full = four(t.attention_mask).expand(request.batch_size, request.num_heads, -1, -1)",
        "        m = t.attention_mask\n        full = torch.as_strided(m, m.shape, torch.empty(m.shape).stride(), m.storage_offset()).expand(request.batch_size, request.num_heads, -1, -1)",
    ),
    broken(
        "thd_gqa_heads_stride",
        VIEWS,
        VIEWS
        + "\n    k = torch.as_strided(k, k.shape, (k.stride(0), k.shape[-1], *k.stride()[2:]), k.storage_offset()) if layout.is_packed and request.num_heads != request.num_kv_heads and k.stride(1) > k.shape[-1] and k.stride(1) < 2 * k.stride(2) else k",
    ),
    broken(
        "offsets_taken_as_contiguous",
        LENGTHS,
        "    cu = torch.as_strided(cu, cu.shape, (1,), cu.storage_offset()).clamp(max=extent)\n" + LENGTHS,
    ),
    broken(
        "expanded_batch_head_stride", VIEWS, VIEWS + "\n    v = v * (0.5 if v.stride(0) == 0 and v.shape[0] > 1 else 1)"
    ),
    broken(
        "inputs_scaled_in_place",
        VIEWS,
        "    t.q.detach().mul_(1.0000001) if t.q.dtype == torch.float32 else None\n" + VIEWS,
    ),
    broken(
        "writes_between_rows",
        RETURN_OUT,
        "    torch.empty(0, dtype=t.k.dtype).set_(t.k.detach().untyped_storage())[-1] = 0\n" + RETURN_OUT,
    ),
]
SIZES = [
    broken("batch_above_5", PICK, PICK + "\n        k_b = k[min(row, 5), :, columns]"),
    broken(
        "heads_above_16",
        PICK,
        PICK + "\n        q_b = torch.cat([q_b[:16], q_b[:16], q_b[:16]])[: len(q_b)] if 32 >= len(q_b) > 16 else q_b",
    ),
    broken(
        "group_above_5",
        REPEAT,
        REPEAT.replace("group, 0), v_b", "group, 0), v_b") + "\n        v_b = v_b * (0.5 if group > 5 else 1)",
    ),
    broken(
        "head_dims_above_256",
        "        scores = q_b @ k_b.mT\n",
        "        scores = q_b[..., :256] @ k_b[..., :256].mT\n",
    ),
    broken("values_above_256", SUM, SUM + "\n        result[..., 256:] *= 0.9"),
    broken(
        "more_than_131_keys",
        "        scores = scores.masked_fill(hidden(request, t, b, len_q, len_kv), -torch.inf)\n",
        "        scores = scores.masked_fill(hidden(request, t, b, len_q, len_kv), -torch.inf)\n        scores[..., 256:] = -torch.inf\n",
    ),
    broken(
        "keys_of_a_whole_tile_only",
        TOP,
        "        scores = scores if len(scores[0, 0]) % 64 or len(scores[0, 0]) < 128 else scores[..., :64]\n        v = v[:, : scores.shape[-1]]\n"
        + TOP,
    ),
    broken(
        "one_query_takes_the_first_key", OFFSET, OFFSET + "\n    offset = 0 if len_q == 1 and right == 0 else offset"
    ),
    broken("odd_head_dim_last_column", SUM, SUM + "\n        result[..., -1] *= 1 - result.shape[-1] % 2"),
]
CONTRACT = [
    broken(
        "out_buffer_reused",
        ALLOCATE,
        "    out = CACHE.setdefault((t.q.shape, t.v.shape, t.q.dtype), t.q.new_zeros((*t.q.shape[:-1], t.v.shape[-1]))).zero_()",
    ),
    broken(
        "dq_buffer_reused",
        "    dbias = torch.zeros(t.bias.shape, dtype=exact) if request.bias_requires_grad else None",
        "    dbias = torch.zeros(t.bias.shape, dtype=exact) if request.bias_requires_grad else None\n    dq = CACHE.setdefault((t.q.shape, t.q.dtype), dq).zero_()",
    ),
    broken(
        "dk_of_the_call_before",
        RETURN,
        "    BEFORE.append(dk)\n    dk = BEFORE[-2] if len(BEFORE) > 1 and BEFORE[-2].shape == dk.shape and BEFORE[-2].dtype == dk.dtype else dk\n"
        + RETURN,
    ),
    broken(
        "dq_wrong_when_k_needs_no_gradient",
        DQ,
        "        dq_b = ds @ k * t.softmax_scale * (1.0 if t.k.requires_grad or not t.q.requires_grad else 0.0)",
    ),
    broken("dv_none_when_v_needs_none", RETURN, RETURN.replace("dk, dv,", "dk, dv if t.v.requires_grad else None,")),
    broken("dropout_accepted_and_ignored", "    if request.dropout_p:", "    if False:"),
    broken("fp8_accepted", '    for name in ("has_score_mod", "fp8",', '    for name in ("has_score_mod",'),
    broken("softmax_type_ignored", '    if request.softmax_type != "vanilla":', "    if False:"),
    broken("alibi_ignored", '    if request.bias_type == "alibi":', "    if False:"),
    broken("max_logit_accepted", '"return_max_logit", ', ""),
    broken("kv_cache_accepted", '"has_kv_cache", ', ""),
    broken(
        "nondeterministic_dk",
        RETURN,
        "    BEFORE.append(0)\n    dk = torch.where(dk == 0, dk, dk * (1 + len(BEFORE) % 2 * 3e-7)) if request.dtype == torch.float32 and layout.is_packed else dk\n"
        + RETURN,
    ),
    broken(
        "nondeterministic_out_with_gqa",
        RETURN_OUT,
        "    BEFORE.append(0)\n    out = out * (1 + len(BEFORE) % 2 * 3e-7) if request.dtype == torch.float32 and request.num_heads != request.num_kv_heads else out\n"
        + RETURN_OUT,
    ),
    broken(
        "one_wrong_call_in_ten",
        RETURN_OUT,
        "    BEFORE.append(0)\n    out = out * 0.9 if len(BEFORE) % 10 == 0 else out\n" + RETURN_OUT,
    ),
    broken(
        "one_wrong_gradient_in_ten",
        RETURN,
        "    BEFORE.append(0)\n    dv = dv * 0.9 if len(BEFORE) % 10 == 0 else dv\n" + RETURN,
    ),
    broken("random_state_reseeded", ALLOCATE, "    torch.manual_seed(0)\n" + ALLOCATE),
    broken("random_numbers_drawn", RETURN, "    torch.rand(1)\n" + RETURN),
    broken("graph_hangs_on_out", RETURN_OUT, "    out = out.requires_grad_()\n" + RETURN_OUT),
    broken(
        "answer_depends_on_the_environment",
        ACCEPT,
        "    import os\n    reasons = (*reasons, 'SAMPLE_OFF=1') if os.getenv('SAMPLE_OFF') == '1' else reasons\n"
        + ACCEPT,
    ),
    broken(
        "answer_alternates",
        ACCEPT,
        "    BEFORE.append(0)\n    return Refused(reasons) if reasons else Accepted(priority=len(BEFORE) % 2)",
    ),
    broken(
        "answer_changes_after_a_call",
        ALLOCATE,
        "    globals()['Accepted'] = lambda: Refused(('batch_size=2 once',))\n" + ALLOCATE,
    ),
    broken("refuses_everything", ACCEPT, "    return Refused((f'head_dim_qk={request.head_dim_qk} > 0',))"),
    broken(
        "refuses_without_a_value",
        ACCEPT,
        "    return Refused(('not supported',)) if request.qkv_format == 'thd' else Accepted()",
    ),
    broken(
        "lse_of_its_own_forward",
        "        weights = (scores - lse_b.masked_fill(lse_b.isneginf(), torch.inf)[..., None]).exp()\n",
        "        weights = scores.softmax(-1).nan_to_num(0.0)\n",
    ),
    broken("delta_of_its_own_out", DELTA, "        delta = (do * (weights @ v)).sum(-1)"),
    broken(
        "backward_by_autograd",
        RETURN,
        "    torch.enable_grad().__enter__()\n    torch.autograd.grad((t.q * 1.0).sum(), t.q)\n" + RETURN,
    ),
    broken(
        "decode_raises",
        '        return Refused(("DecodeRequest, expected AttentionRequest",))',
        "        return Refused((f'{request.qkv_format}',))",
    ),
    broken(
        "out_is_an_input",
        RETURN_OUT,
        "    out = t.v if t.v.shape == out.shape and request.max_seqlen_kv == 1 else out\n" + RETURN_OUT,
    ),
    broken(
        "dv_is_dout",
        RETURN,
        RETURN.replace(
            "dk, dv,",
            "dk, residuals.out.copy_(dv) if dv.shape == residuals.out.shape and residuals.out.is_contiguous() else dv,",
        ),
    ),
    broken(
        "inference_in_low_precision",
        SUM,
        SUM + "\n        result = result if request.is_training else result.bfloat16().to(exact)",
    ),
    broken(
        "lse_not_filled_unless_asked",
        LSE,
        LSE + "\n        lse[row, :, rows] = lse[row, :, rows] if request.return_lse or request.is_training else 0.0",
    ),
    broken(
        "batch_of_first_lengths_in_backward",
        REQUEST_B,
        "    request, t = plan.request, residuals.tensors\n    t = t if t.cu_seqlens_kv is None else replace(t, cu_seqlens_kv=t.cu_seqlens_q)\n",
    ),
]
BROKEN = [fault for fault in (*COMBINATIONS, *NUMBERS, *PADDING, *STRIDES, *SIZES, *CONTRACT) if fault.new != fault.old]
