"""Faults that porters of kernels make: at the borders of tiles and splits, in rare operands, in caches keyed on too little."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import (
    ACCEPT,
    ALLOCATE,
    DELTA,
    DK,
    DQ,
    DV,
    GROUPS,
    LENGTHS,
    LSE,
    OFFSET,
    PICK,
    REPEAT,
    REQUEST,
    REQUEST_B,
    RETURN,
    RETURN_OUT,
    SCALE,
    STARTS,
    SUM,
    TOP,
    VIEWS,
    Broken,
    broken,
    only_if,
)
from tests.conformance.broken_later import HIDE, SCORES
from tests.conformance.broken_rare import BIAS, FULL_MASK, OUT_AND_DOUT

SPANS_KV = "    spans_kv = spans(request, k.shape[2], t.cu_seqlens_kv, t.cu_seqlens_kv_padded)"
FIXED = "        result = rounded(weights, request) @ v / total.masked_fill(total == 0, 1.0)"


def kept_option(name: str, option: str) -> Broken:
    """An option of the request is taken from an earlier call of the same shapes."""
    key = "(request.qkv_format, request.dtype, t.q.shape, t.k.shape, t.v.shape)"
    return broken(
        name,
        REQUEST,
        REQUEST + f"    request = request.replace({option}=CACHE.setdefault({key}, request.{option}))\n",
    )


# A lower edge of a window, as int32 arithmetic has it.
WRAP = "lambda x: (x + 2**31) % 2**32 - 2**31"
ATTENTION = [
    # masks and tiles
    broken(
        "window_edge_of_a_tile_not_masked",
        HIDE,
        "        hide = hidden(request, t, b, len_q, len_kv)\n"
        "        if request.band.left > 0 and t.attention_mask is None:\n"
        "            shift = (len_kv - len_q if request.band.bottom_right else 0) - request.band.left - 1\n"
        "            i = torch.arange(63, max(len_q, 63), 64)\n"
        "            i = i[(i + shift >= 0) & ((i + shift + 1) % 64 == 0) & (i + shift < len_kv)]\n"
        "            hide = hide.clone()\n"
        "            hide[:, i, i + shift] = False\n"
        "        scores = scores.masked_fill(hide, -torch.inf)\n",
    ),
    broken(
        "causal_end_of_a_tile_one_more_key",
        HIDE,
        "        hide = hidden(request, t, b, len_q, len_kv)\n"
        "        if request.is_causal and t.attention_mask is None:\n"
        "            shift = (len_kv - len_q if request.band.bottom_right else 0) + 1\n"
        "            i = torch.arange(127, max(len_q, 127), 128)\n"
        "            i = i[(i + shift >= 0) & ((i + shift) % 64 == 0) & (i + shift < len_kv)]\n"
        "            hide = hide.clone()\n"
        "            hide[:, i, i + shift] = False\n"
        "        scores = scores.masked_fill(hide, -torch.inf)\n",
    ),
    broken(
        "first_key_tile_truncated_towards_zero",
        HIDE,
        HIDE
        + "        if request.band.left >= 0 and len_q > len_kv:\n"
        "            first = (torch.arange(len_q) // 64 * 64 + (len_kv - len_q if request.band.bottom_right else 0) - request.band.left)\n"
        "            start = torch.where(first < 0, -(-first // 64) * 64, first // 64 * 64).clamp(min=0) * (first > -64) * (first != 0)\n"
        "            scores = scores.masked_fill((torch.arange(len_kv) < start[:, None]) & (first[:, None] > 0), -torch.inf)\n",
    ),
    broken(
        "lse_plus_inf_where_a_tile_sees_nothing",
        LSE,
        LSE
        + "\n        blind = total[0, :, 0] == 0\n        for i in range(0, len(blind) - 63, 64):\n            if bool(blind[i : i + 64].all()): lse[row, :, rows][:, i : i + 64] = torch.inf",
    ),
    broken(
        "dq_unwritten_where_128_rows_see_nothing",
        "        layout.to_bhsd(dq)[row, :, rows] = dq_b.to(dq.dtype)",
        "        blind = (weights == 0).all(-1).all(0)\n        for i in range(0, len(blind) - 127, 128):\n            if bool(blind[i : i + 128].all()): dq_b[:, i : i + 128] = 1e-3\n        layout.to_bhsd(dq)[row, :, rows] = dq_b.to(dq.dtype)",
    ),
    broken(
        "dk_unwritten_where_64_keys_are_unseen",
        GROUPS,
        GROUPS
        + "\n        blind = (weights == 0).all(1).all(0)\n        for i in range(0, len(blind) - 63, 64):\n            if bool(blind[i : i + 64].all()): dk_b[:, i : i + 64] = 1e-3",
    ),
    broken(
        "sequence_behind_two_empty_ones",
        PICK,
        PICK
        + "\n        v_b = v_b * (0.5 if layout.is_packed and b > 1 and spans_q[b - 1][1] == spans_q[b - 2][1] == 0 else 1.0)",
    ),
    broken(
        "keys_behind_two_empty_ones",
        PICK,
        PICK
        + "\n        v_b = v_b * (0.5 if layout.is_packed and b > 1 and spans_kv[b - 1][1] == spans_kv[b - 2][1] == 0 else 1.0)",
    ),
    broken(
        "packed_group_in_steps_of_a_power_of_two",
        OFFSET,
        OFFSET
        + "\n    group = request.num_heads // request.num_kv_heads\n    offset = offset + (left > 0 and group & (group - 1) != 0)",
    ),
    broken(
        "dk_grid_of_the_queries",
        GROUPS,
        GROUPS + "\n        last = -(-request.max_seqlen_q // 128) * 128\n        dk_b[:, last:] = 0",
    ),
    broken(
        "dq_in_low_precision_at_each_128_keys",
        DQ,
        DQ
        + "\n        dq_b = torch.zeros_like(dq_b).to(request.dtype)\n        for i in range(0, k.shape[1], 128):\n            dq_b = dq_b + (ds[..., i : i + 128] @ k[:, i : i + 128] * t.softmax_scale).to(request.dtype)\n        dq_b = dq_b.to(exact)",
    ),
    only_if("lse_base_two_when_split", "        total = weights.sum(-1, keepdim=True)\n", "False", "total = total")
    if False
    else broken(
        "lse_base_two_when_split",
        LSE,
        LSE.replace("(top + total.log())", "((top + total.log()) * (1.4427 if len_kv > 512 and len_q < 64 else 1.0))").replace(
            "len_kv", "scores.shape[2]"
        ).replace("len_q", "scores.shape[1]"),
    ),
    broken(
        "split_that_sees_nothing_is_nan",
        SUM,
        SUM
        + "\n        for i in range(0, scores.shape[2], 256):\n            none = (scores[..., i : i + 256].isneginf().all(-1, keepdim=True)) & (total > 0)\n            result = result.masked_fill(none, torch.nan) if scores.shape[2] > 512 else result",
    ),
    broken(
        "split_that_sees_nothing_counts_as_zero_score",
        SUM,
        SUM.replace("total.masked_fill", "(total + sum(torch.where(scores[..., i : i + 128].isneginf().all(-1, keepdim=True) & (total > 0), (-top).exp(), 0.0) for i in range(0, scores.shape[2], 128) if request.has_sliding_window)).masked_fill"),
    ),
    # masks and biases as tensors
    broken(
        "mask_head_of_the_kv_head",
        FULL_MASK,
        FULL_MASK + "\n        full = full.expand(-1, -1, len_q, len_kv) if False else full[:, torch.arange(request.num_heads) // (request.num_heads // request.num_kv_heads)]",
    ),
    broken(
        "bias_head_of_the_kv_head",
        BIAS,
        BIAS
        + "            t = replace(t, bias=four(t.bias)[:, torch.arange(request.num_heads) // (request.num_heads // request.num_kv_heads)]) if four(t.bias).shape[1] > 1 else t\n",
    ),
    broken(
        "mask_hides_a_whole_tile_of_a_row",
        SUM,
        SUM
        + "\n        for i in range(0, scores.shape[2] - 15, 16):\n            if t.attention_mask is not None: result = result.masked_fill(scores[..., i : i + 16].isneginf().all(-1, keepdim=True) & (total > 0), torch.nan)",
    ),
    broken(
        "mask_hides_a_tile_of_64_of_a_row",
        SUM,
        SUM
        + "\n        if t.attention_mask is not None and scores.shape[2] > 64: result = result.masked_fill(scores[..., :64].isneginf().all(-1, keepdim=True) & (total > 0), torch.nan)",
    ),
    broken(
        "bias_hides_a_whole_tile_of_a_row",
        SUM,
        SUM
        + "\n        if t.bias is not None and scores.shape[2] > 16: result = result.masked_fill((scores[..., :16] < -1e4).all(-1, keepdim=True) & (total > 0), torch.nan)",
    ),
    broken(
        "dbias_summed_over_the_batch_in_low_precision",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor\n    dbias.copy_(dbias.to(request.dtype))",
    ),
    broken(
        "dbias_of_hidden_keys_unwritten",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor",
        "    target[:, : ds.shape[1], : ds.shape[2]] += torch.where(ds == 0, 1e-3, ds) * factor",
    ),
    broken(
        "dbias_of_padding_unwritten",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor\n    target[:, ds.shape[1] :] += 1e-3 * (ds.shape[1] > 1)",
    ),
    broken(
        "dbias_in_float32",
        RETURN,
        RETURN.replace("dbias.to(t.q.dtype)", "dbias.float()"),
    ),
    broken(
        "nondeterministic_dbias",
        RETURN,
        "    BEFORE.append(0)\n    dbias = None if dbias is None else dbias * (1 + len(BEFORE) % 2 * 2e-2)\n" + RETURN,
    ),
    # numbers
    broken("scale_in_the_dtype", SCALE, SCALE.replace("t.softmax_scale", "float(torch.tensor(t.softmax_scale, dtype=request.dtype))")),
    broken(
        "delta_of_products_in_low_precision",
        DELTA,
        "        delta = (do * out[row, :, rows]).to(request.dtype).sum(-1).to(exact)",
    ),
    broken(
        "ds_through_fp16",
        "        ds, weights = rounded(ds, request), rounded(weights, request)\n",
        "        ds, weights = ds.to(torch.float16).to(exact), rounded(weights, request)\n",
    ),
    broken(
        "maximum_of_the_first_tile",
        TOP,
        "        top = scores[..., :64].amax(-1, keepdim=True)\n        top = torch.where(top.isneginf(), scores.amax(-1, keepdim=True), top)\n",
    ),
    broken(
        "head_dim_v_in_steps_of_16",
        SUM,
        SUM + "\n        result[..., result.shape[-1] // 16 * 16 or None :] = 0",
    ),
    broken(
        "delta_of_head_dim_v_in_steps_of_16",
        DELTA,
        "        whole = do.shape[-1] // 16 * 16 or None\n        delta = (do * out[row, :, rows])[..., :whole].sum(-1)",
    ),
    broken("delta_of_head_dim_qk_columns", DELTA, "        delta = (do * out[row, :, rows])[..., : request.head_dim_qk].sum(-1)"),
    broken("dv_columns_above_192", DV, DV + "\n        dv_b[..., 192:] = 0"),
    # offsets and padding
    broken(
        "padded_offsets_of_q_where_lengths_are_shared",
        REQUEST,
        REQUEST
        + "    t = t if request.lengths_may_differ or t.cu_seqlens_q_padded is None else replace(t, cu_seqlens_kv_padded=t.cu_seqlens_q_padded)\n",
    ),
    broken(
        "dense_when_the_total_is_batch_times_the_longest",
        "    starts = (cu if padded is None else padded)[:-1].tolist()",
        "    starts = (cu if padded is None else padded)[:-1].tolist()\n    if extent == max(lengths, default=0) * len(lengths) and len(lengths) > 1: return [(b * max(lengths), max(lengths)) for b in range(len(lengths))]",
    ),
    broken(
        "dense_when_all_lengths_are_equal",
        STARTS,
        STARTS + "\n    starts = [b * lengths[0] for b in range(len(lengths))] if len(set(lengths)) == 1 < len(lengths) else starts",
    ),
    broken("lse_of_gaps_is_zero", RETURN_OUT, "    lse = lse.masked_fill(lse.isneginf(), 0.0) if request.pad_between_seqs else lse\n" + RETURN_OUT),
    broken(
        "dk_behind_max_seqlen_unwritten",
        RETURN,
        "    layout.to_bhsd(dk)[:, :, request.max_seqlen_kv :] = torch.nan if request.has_padding and not layout.is_packed else 0\n" + RETURN,
    )
    if False
    else broken(
        "dk_behind_max_seqlen_unwritten",
        RETURN,
        "    if request.has_padding and not layout.is_packed: layout.to_bhsd(dk)[:, :, request.max_seqlen_kv :] = 1e-3\n" + RETURN,
    ),
    broken(
        "window_edge_in_int32",
        OFFSET,
        OFFSET + f"\n    wrap = {WRAP}",
    )
    if False
    else broken(
        "window_edge_in_int32",
        "        mask = mask | (distance < -left)",
        "        edge = torch.arange(len_q)[:, None] + offset - left\n        mask = mask | (torch.arange(len_kv)[None] < (edge + 2**31) % 2**32 - 2**31)",
    ),
    # grouped heads
    broken(
        "gqa_gradient_of_strided_heads_in_sbhd",
        GROUPS,
        GROUPS.replace("x.unflatten(0, (-1, group)).sum(1)", "(x.unflatten(0, (group, -1)).sum(0) if request.qkv_format == 'sbhd' else x.unflatten(0, (-1, group)).sum(1))"),
    ),
    broken(
        "kv_head_by_modulo_in_the_backward",
        GROUPS,
        GROUPS.replace("x.unflatten(0, (-1, group)).sum(1)", "(x.unflatten(0, (group, -1)).sum(0) if group > 2 else x.unflatten(0, (-1, group)).sum(1))"),
    ),
    broken("one_query_ignores_the_mask", FULL_MASK, FULL_MASK + "\n        full = full & (len_q > 1)"),
    # caches keyed on too little
    kept_option("window_kept_by_shape", "window_size"),
    kept_option("diagonal_kept_by_shape", "bottom_right_diagonal")
    if False
    else broken(
        "diagonal_kept_by_shape",
        OFFSET,
        OFFSET
        + "\n    if right == 0 or left >= 0:\n        bottom_right = CACHE.setdefault(('diagonal', len_q, len_kv, request.num_heads), bottom_right)\n        offset = len_kv - len_q if bottom_right else 0",
    ),
    kept_option("bias_type_kept_by_shape", "bias_type")
    if False
    else broken(
        "bias_type_kept_by_shape",
        BIAS,
        "        kind = CACHE.setdefault((t.q.shape, t.k.shape), request.bias_type) if t.bias is not None else request.bias_type\n"
        "        request = request.replace(bias_type=kind) if kind != 'no_bias' else request\n" + BIAS,
    ),
    broken(
        "causal_kept_by_shape",
        REQUEST,
        REQUEST
        + "    if 'causal' in CACHE.setdefault((request.qkv_format, request.dtype, t.q.shape, t.k.shape, t.v.shape), request.attn_mask_type) and request.attn_mask_type == 'no_mask':\n        request = request.replace(attn_mask_type='causal')\n",
    ),
    broken(
        "no_mask_kept_by_shape",
        REQUEST,
        REQUEST
        + "    if CACHE.setdefault((request.qkv_format, request.dtype, t.q.shape, t.k.shape, t.v.shape), request.attn_mask_type) == 'no_mask' and request.attn_mask_type == 'causal':\n        request = request.replace(attn_mask_type='no_mask')\n",
    ),
    broken(
        "strides_kept_by_address_and_shape",
        VIEWS,
        "    if t.q.numel():\n        strides = CACHE.setdefault((t.q.data_ptr(), t.q.shape, t.q.dtype), t.q.stride())\n        t = replace(t, q=torch.as_strided(t.q, t.q.shape, strides, t.q.storage_offset()))\n" + VIEWS,
    ),
    broken(
        "dtype_kept_by_address_and_shape",
        VIEWS,
        "    if t.k.numel() and t.k.itemsize == 2:\n        dtype = CACHE.setdefault((t.k.data_ptr(), t.k.shape, t.k.stride()), t.k.dtype)\n        t = replace(t, k=t.k.detach().view(dtype))\n" + VIEWS,
    ),
    broken("strides_of_the_first_call_of_a_shape", VIEWS, "    strides = CACHE.setdefault((t.q.shape, t.q.dtype), t.q.stride())\n    t = replace(t, q=torch.as_strided(t.q, t.q.shape, strides, t.q.storage_offset())) if strides != t.q.stride() else t\n" + VIEWS),
    # state between the passes
    broken("backward_scale_of_the_last_forward", REQUEST_B, REQUEST_B + "    t = replace(t, softmax_scale=CACHE.get('scale', t.softmax_scale))\n")
    if False
    else broken(
        "backward_scale_of_the_last_forward",
        SCALE,
        "        if torch._C._current_graph_task_id() >= -1:\n            import sys\n            caller = sys._getframe(1).f_code.co_name\n            if caller == 'forward': CACHE['scale'] = t.softmax_scale\n            else: t = replace(t, softmax_scale=CACHE.get('scale', t.softmax_scale))\n" + SCALE,
    ),
    broken("backward_needs_its_own_forward", RETURN_OUT, "    CACHE['last'] = lse.sum()\n" + RETURN_OUT)
    if False
    else broken(
        "second_backward_fails",
        REQUEST_B,
        REQUEST_B + "    key = (id(residuals.tensors), residuals.out.data_ptr())\n    assert key not in BEFORE[-3:]\n    BEFORE.append(key)\n",
    ),
    broken("delta_shared_by_threads", "        ds = weights * (do @ v.mT - delta[..., None])", "        CACHE[delta.shape] = delta\n        dp = do @ v.mT\n        ds = weights * (dp - CACHE[delta.shape][..., None])"),
    broken("work_kept_on_the_plan", ALLOCATE, "    vars(plan)['_q'] = t.q\n" + ALLOCATE),
    broken("scale_kept_on_the_plan", REQUEST, REQUEST + "    t = replace(t, softmax_scale=vars(plan).setdefault('_scale', t.softmax_scale))\n"),
    # manners
    broken("warns_at_each_call", ALLOCATE, "    __import__('warnings').warn('sample')\n" + ALLOCATE),
    broken("logs_to_stderr", ALLOCATE, "    __import__('logging').getLogger('sample').warning('slow path')\n" + ALLOCATE),
    broken("prints_to_stderr", ALLOCATE, "    print('sample', file=__import__('sys').stderr)\n" + ALLOCATE),
    broken("sets_default_device", ALLOCATE, "    torch.set_default_device('cpu')\n" + ALLOCATE),
    broken("extends_sys_path", ALLOCATE, "    __import__('sys').path.append('/sample')\n" + ALLOCATE),
    broken("sets_a_signal_handler", ALLOCATE, "    import signal, threading\n    if threading.current_thread() is threading.main_thread(): signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n" + ALLOCATE),
    broken("backward_by_nobody", ACCEPT, "    return Refused(reasons) if reasons else Accepted(backward_by='another')"),
    broken("notes_are_a_text", ACCEPT, "    return Refused(reasons) if reasons else Accepted(notes='fast')"),
    broken("answer_by_the_number_of_reasons_before", ACCEPT, "    BEFORE.append(bool(reasons))\n    reasons = reasons if sum(BEFORE[-8:]) < 4 else (*reasons, 'num_heads=1')\n" + ACCEPT),
    broken("nondeterministic_packed_above_512_keys", RETURN, "    BEFORE.append(0)\n    dq = dq * (1 + len(BEFORE) % 2 * 2e-2) if layout.is_packed and request.deterministic and request.max_seqlen_kv > 512 else dq\n" + RETURN)
    if False
    else broken(
        "nondeterministic_packed_above_512_keys",
        RETURN,
        "    BEFORE.append(0)\n    dq = dq * (1 + len(BEFORE) % 2 * (2e-3 if request.dtype != torch.float32 else 1e-7)) if layout.is_packed and request.max_seqlen_kv > 512 else dq\n" + RETURN,
    ),
]

TAKE, KEYS, PAGES, OUT, END, TOP_D = (of_decode.TAKE, of_decode.KEYS, of_decode.PAGES, of_decode.OUT, of_decode.END, of_decode.TOP)
LENGTHS_D, STARTS_D, LSE_D, RETURN_D, SCALE_D, ALLOCATE_D = (
    of_decode.LENGTHS, of_decode.STARTS, of_decode.LSE, of_decode.RETURN, of_decode.SCALE, of_decode.ALLOCATE,
)


def chunk_of_one(name: str, size: int, condition: str) -> Broken:
    """The last chunk of a split is lost where it holds one key."""
    return broken(
        name,
        KEYS,
        f"            last = end - (end - start > {size} and (end - start) % {size} == 1 and ({condition}))\n"
        "            v, r = values[start:last], ropes[start:last]",
    )


DECODE = [
    chunk_of_one("chunk_of_one_key_64", 64, "True"),
    chunk_of_one("chunk_of_one_key_128_paged", 128, "t.page_table is not None"),
    chunk_of_one("chunk_of_one_key_256_several_queries", 256, "seqlen_q > 1"),
    chunk_of_one("chunk_of_one_key_512_contiguous", 512, "t.page_table is None"),
    chunk_of_one("chunk_of_one_key_512_left_padded", 512, "start > 0"),
    chunk_of_one("chunk_of_one_key_1024", 1024, "True"),
    broken("first_chunk_all_left_padding_64", OUT, OUT + "\n            out[b, i] *= 0.5 if start >= 64 and end > 128 else 1.0"),
    broken("left_padding_in_whole_pages", STARTS_D, STARTS_D + "\n    starts = [-(-s // t.c_kv.shape[1]) * t.c_kv.shape[1] for s in starts] if t.page_table is not None else starts"),
    broken("left_padding_of_whole_pages_skips_one", STARTS_D, STARTS_D + "\n    starts = [s + (s > 0 and t.page_table is not None and s % t.c_kv.shape[1] == 0 and t.c_kv.shape[1] >= 16) for s in starts]"),
    broken("left_padding_of_whole_tiles_skips_one", STARTS_D, STARTS_D + "\n    starts = [s + (s > 0 and s % 64 == 0 and t.page_table is None) for s in starts]"),
    broken("left_padding_to_the_last_key", OUT, OUT + "\n            out[b, i] *= 0.5 if start and end - start == 1 else 1.0"),
    broken("pages_in_tiles_of_64", KEYS, "            last = end if t.page_table is None or t.c_kv.shape[1] < 64 or t.c_kv.shape[1] % 64 == 0 else min(end, t.c_kv.shape[1] // 64 * 64)\n            v, r = values[start:last], ropes[start:last]"),
    broken("head_tail_above_64", OUT, OUT + "\n            out[b, i, heads // 64 * 64 if heads > 64 else heads :] = 0"),
    broken("causal_row_by_head_above_128_rows", END, END + "\n            end = length - seqlen_q + 1 + (i * heads // 128) % seqlen_q if t.causal and heads * seqlen_q > 128 else end"),
    broken("all_keys_with_left_padding_is_causal", END, END + "\n            end = length - seqlen_q + i + 1 if t.leftpad_kv is not None else end"),
    broken("lse_base_two_when_split", LSE_D, LSE_D.replace("(top + total.log())", "((top + total.log()) * (1.4427 if len(v) > 256 else 1.0))")),
    broken("split_without_lse", OUT, OUT + "\n            out[b, i] *= 0.5 if not t.return_lse and len(v) > 256 else 1.0"),
    broken("schedule_kept_for_equal_totals", LENGTHS_D, LENGTHS_D + "\n    if t.lengths is not None: lengths = STATE.setdefault((id(t.lengths), sum(lengths)), (t.lengths, lengths))[1]"),
    broken("schedule_kept_for_equal_longest", LENGTHS_D, LENGTHS_D + "\n    if t.lengths is not None: lengths = STATE.setdefault((id(t.lengths), max(lengths)), (t.lengths, lengths))[1]"),
    broken("longer_lengths_only_are_taken_by_update", LENGTHS_D, LENGTHS_D + "\n    if t.lengths is not None: lengths = STATE[id(t.lengths)] = [max(a, b) for a, b in zip(lengths, STATE.get(id(t.lengths), lengths))]"),
    broken("partials_of_a_longer_call", RETURN_D, "    splits = [-(-n // 64) for n in lengths]\n    before, STATE['splits'] = STATE.get('splits', []), splits\n    for b, (now, then) in enumerate(zip(splits, before)):\n        out[b] *= 0.5 if 0 < now < then else 1.0\n" + RETURN_D),
    broken("partial_lse_in_low_precision", OUT, "            if len(v) > 128:\n                p = [((scores[:, j : j + 128] - (c := scores[:, j : j + 128].logsumexp(-1, keepdim=True))).exp() @ v[j : j + 128], c.to(out.dtype).to(exact)) for j in range(0, len(v), 128)]\n                m = torch.cat([c for _, c in p], -1).softmax(-1)\n                out[b, i] = sum(o * m[:, n : n + 1] for n, (o, _) in enumerate(p)).to(out.dtype)\n            else:\n    " + OUT),
    broken("scale_in_the_dtype", SCALE_D, SCALE_D.replace("t.softmax_scale", "float(torch.tensor(t.softmax_scale, dtype=t.c_kv.dtype))")),
    broken("maximum_of_the_first_chunk", TOP_D, "            top = scores[:, :64].amax(-1, keepdim=True)"),
    broken("rope_in_steps_of_16", TAKE, TAKE + "\n    whole = t.q_rope.shape[-1] // 16 * 16 or None\n    t = t._replace(q_rope=t.q_rope[..., :whole], k_rope=t.k_rope[..., :whole])"),
    broken("rank_in_steps_of_16", OUT, OUT + "\n            out[b, i, :, rank // 16 * 16 or None :] = 0"),
    broken("rope_behind_the_latents_in_memory", TAKE, TAKE + "\n    c = t.c_kv\n    if c.untyped_storage().data_ptr() == t.k_rope.untyped_storage().data_ptr() and c.numel() and t.k_rope.numel():\n        t = t._replace(k_rope=torch.as_strided(c, t.k_rope.shape, c.stride(), c.storage_offset() + c.shape[-1]))"),
    broken("q_rope_behind_q_nope_in_memory", TAKE, TAKE + "\n    q = t.q_nope_abs\n    if q.untyped_storage().data_ptr() == t.q_rope.untyped_storage().data_ptr() and q.numel() and t.q_rope.numel():\n        t = t._replace(q_rope=torch.as_strided(q, t.q_rope.shape, q.stride(), q.storage_offset() + q.shape[-1]))"),
    broken("joined_by_the_row_stride", TAKE, TAKE + "\n    c = t.c_kv\n    if c.numel() and t.k_rope.numel() and c.stride(1) == c.shape[-1] + t.k_rope.shape[-1] and c.storage_offset() + c.shape[-1] + sum((n - 1) * s for n, s in zip(t.k_rope.shape, c.stride())) < c.untyped_storage().nbytes() // c.itemsize:\n        t = t._replace(k_rope=torch.as_strided(c, t.k_rope.shape, c.stride(), c.storage_offset() + c.shape[-1]))"),
    broken("sequence_behind_two_empty_ones", OUT, OUT + "\n            out[b, i] *= 0.5 if b > 1 and lengths[b - 1] == lengths[b - 2] == 0 else 1.0"),
    broken("first_sequence_empty", OUT, OUT + "\n            out[b, i] *= 0.5 if lengths[0] == 0 and b == 1 else 1.0"),
    broken("causal_kept_by_shape", TAKE, TAKE + "\n    t = t._replace(causal=STATE.setdefault((t.q_nope_abs.shape, t.c_kv.shape, t.c_kv.dtype), t.causal))"),
    broken("left_padding_kept_by_shape", STARTS_D, "    has = STATE.setdefault(('leftpad', t.q_nope_abs.shape, t.c_kv.shape, t.c_kv.dtype), t.leftpad_kv is not None)\n" + STARTS_D.replace("if t.leftpad_kv is None", "if t.leftpad_kv is None or not has")),
    broken("strides_of_the_cache_kept_by_address_and_shape", TAKE, TAKE + "\n    c = t.c_kv\n    t = t._replace(c_kv=torch.as_strided(c, c.shape, STATE.setdefault((c.data_ptr(), c.shape, c.dtype), c.stride()), c.storage_offset())) if c.numel() else t"),
    broken("gathered_pages_kept_by_address", "    return cache[pages.long()].flatten(0, 1)[:length]", "    key = (cache.data_ptr(), t.page_table.data_ptr(), b, length)\n    if key not in STATE: STATE[key] = cache[pages.long()].flatten(0, 1)[:length]\n    return STATE[key]"),
    broken("softmax_over_two_queries", SCALE_D, SCALE_D + "\n            scores = scores * (0.5 if seqlen_q == 2 and i == 0 and t.leftpad_kv is not None and t.page_table is not None and t.c_kv.dtype == torch.float16 else 1.0)"),
    broken("prints_to_stderr", ALLOCATE_D, "    print('sample', file=__import__('sys').stderr)\n" + ALLOCATE_D),
    broken("scale_kept_on_the_plan", SCALE_D, SCALE_D.replace("t.softmax_scale", "vars(plan).setdefault('_scale', t.softmax_scale)")),
    broken("work_kept_on_the_plan", ALLOCATE_D, "    vars(plan)['_out'] = t.q_nope_abs\n" + ALLOCATE_D),
    broken("work_kept_on_the_lengths", ALLOCATE_D, "    if t.lengths is not None: t.lengths._sample = t.q_nope_abs\n" + ALLOCATE_D),
    broken("one_key_in_a_page_of_one", OUT, OUT + "\n            out[b, i] *= 0.5 if t.page_table is not None and t.c_kv.shape[1] == 1 and end - start > 256 else 1.0"),
    broken("queries_above_32_rows_of_128_heads", OUT, OUT + "\n            out[b, i] *= 0.5 if i >= 5 and heads > 100 else 1.0"),
    broken("page_table_row_of_the_wider_stride", PAGES, "    table = t.page_table\n    pages = torch.as_strided(table, table.shape, (-(-table.stride(0) // 4) * 4, 1), table.storage_offset())[b, :used] if table.stride(0) and len(table) * (-(-table.stride(0) // 4) * 4) <= table.untyped_storage().nbytes() // 4 - table.storage_offset() else table[b, :used]"),
    broken("batch_times_heads_above_2048", OUT, OUT + "\n            out[b, i] *= 0.5 if b * heads >= 2048 else 1.0"),
]
