"""Faults that porters of kernels make: at the borders of tiles and splits, in rare operands, in caches keyed on too little."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import (
    ACCEPT,
    ALLOCATE,
    DELTA,
    GROUPS,
    LSE,
    OFFSET,
    PICK,
    REQUEST,
    REQUEST_B,
    RETURN,
    SUM,
    TOP,
    VIEWS,
    Broken,
    broken,
)
from tests.conformance.broken_later import HIDE
from tests.conformance.broken_rare import BIAS, FULL_MASK

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


ATTENTION = [
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
        "packed_group_in_steps_of_a_power_of_two",
        OFFSET,
        OFFSET
        + "\n    group = request.num_heads // request.num_kv_heads\n    offset = offset + (left > 0 and group & (group - 1) != 0)",
    ),
    broken(
        "split_that_sees_nothing_is_nan",
        SUM,
        SUM
        + "\n        for i in range(0, scores.shape[2], 256):\n            none = (scores[..., i : i + 256].isneginf().all(-1, keepdim=True)) & (total > 0)\n            result = result.masked_fill(none, torch.nan) if scores.shape[2] > 512 else result",
    ),
    broken(
        "mask_head_of_the_kv_head",
        FULL_MASK,
        FULL_MASK
        + "\n        full = full[:, torch.arange(request.num_heads) // (request.num_heads // request.num_kv_heads)]",
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
        "dbias_of_padding_unwritten",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor\n    target[:, ds.shape[1] :] += 1e-3 * (ds.shape[1] > 1)",
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
        SUM + "\n        wide = result.shape[-1]\n        result[..., wide // 16 * 16 if wide > 16 else wide :] = 0",
    ),
    broken(
        "delta_of_head_dim_v_in_steps_of_16",
        DELTA,
        "        whole = do.shape[-1] // 16 * 16 or None\n        delta = (do * out[row, :, rows])[..., :whole].sum(-1)",
    ),
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
        "window_edge_in_int32",
        "        mask = mask | (distance < -left)",
        "        edge = torch.arange(len_q)[:, None] + offset - left\n        mask = mask | (torch.arange(len_kv)[None] < (edge + 2**31) % 2**32 - 2**31)",
    ),
    broken(
        "kv_head_by_modulo_in_the_backward",
        GROUPS,
        GROUPS.replace(
            "x.unflatten(0, (-1, group)).sum(1)",
            "(x.unflatten(0, (group, -1)).sum(0) if group > 2 else x.unflatten(0, (-1, group)).sum(1))",
        ),
    ),
    kept_option("window_kept_by_shape", "window_size"),
    broken(
        "diagonal_kept_by_shape",
        OFFSET,
        OFFSET
        + "\n    if right == 0 or left >= 0:\n        bottom_right = CACHE.setdefault(('diagonal', len_q, len_kv, request.num_heads), bottom_right)\n        offset = len_kv - len_q if bottom_right else 0",
    ),
    broken(
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
        "    if t.q.numel():\n        strides = CACHE.setdefault((t.q.data_ptr(), t.q.shape, t.q.dtype), t.q.stride())\n        t = replace(t, q=torch.as_strided(t.q, t.q.shape, strides, t.q.storage_offset()))\n"
        + VIEWS,
    ),
    broken(
        "dtype_kept_by_address_and_shape",
        VIEWS,
        "    if t.k.numel() and t.k.itemsize == 2:\n        dtype = CACHE.setdefault((t.k.data_ptr(), t.k.shape, t.k.stride()), t.k.dtype)\n        t = replace(t, k=t.k.detach().view(dtype))\n"
        + VIEWS,
    ),
    broken(
        "second_backward_fails",
        REQUEST_B,
        REQUEST_B
        + "    key = (id(residuals.tensors), residuals.out.data_ptr())\n    assert key not in BEFORE[-3:]\n    BEFORE.append(key)\n",
    ),
    broken(
        "delta_shared_by_threads",
        "        ds = weights * (do @ v.mT - delta[..., None])",
        "        CACHE[delta.shape] = delta\n        dp = do @ v.mT\n        ds = weights * (dp - CACHE[delta.shape][..., None])",
    ),
    broken("work_kept_on_the_plan", ALLOCATE, "    vars(plan)['_q'] = t.q\n" + ALLOCATE),
    broken(
        "scale_kept_on_the_plan",
        REQUEST,
        REQUEST + "    t = replace(t, softmax_scale=vars(plan).setdefault('_scale', t.softmax_scale))\n",
    ),
    broken("prints_to_stderr", ALLOCATE, "    print('sample', file=__import__('sys').stderr)\n" + ALLOCATE),
    broken(
        "answer_by_the_number_of_reasons_before",
        ACCEPT,
        "    BEFORE.append(bool(reasons))\n    reasons = reasons if sum(BEFORE[-8:]) < 4 else (*reasons, 'num_heads=1')\n"
        + ACCEPT,
    ),
    broken(
        "nondeterministic_packed_above_512_keys",
        RETURN,
        "    BEFORE.append(0)\n    dq = dq * (1 + len(BEFORE) % 2 * (2e-3 if request.dtype != torch.float32 else 1e-7)) if layout.is_packed and request.max_seqlen_kv > 512 else dq\n"
        + RETURN,
    ),
]
TAKE, KEYS, PAGES, OUT, END, TOP_D = (
    of_decode.TAKE,
    of_decode.KEYS,
    of_decode.PAGES,
    of_decode.OUT,
    of_decode.END,
    of_decode.TOP,
)
LENGTHS_D, STARTS_D, LSE_D, RETURN_D, SCALE_D, ALLOCATE_D = (
    of_decode.LENGTHS,
    of_decode.STARTS,
    of_decode.LSE,
    of_decode.RETURN,
    of_decode.SCALE,
    of_decode.ALLOCATE,
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
    chunk_of_one("chunk_of_one_key_128_paged", 128, "t.page_table is not None"),
    chunk_of_one("chunk_of_one_key_256_several_queries", 256, "seqlen_q > 1"),
    chunk_of_one("chunk_of_one_key_512_contiguous", 512, "t.page_table is None"),
    chunk_of_one("chunk_of_one_key_512_left_padded", 512, "start > 0"),
    chunk_of_one("chunk_of_one_key_1024", 1024, "True"),
    broken(
        "left_padding_of_whole_pages_skips_one",
        STARTS_D,
        STARTS_D
        + "\n    starts = [s + (s > 0 and t.page_table is not None and s % t.c_kv.shape[1] == 0 and t.c_kv.shape[1] >= 16) for s in starts]",
    ),
    broken(
        "left_padding_of_whole_tiles_skips_one",
        STARTS_D,
        STARTS_D + "\n    starts = [s + (s > 0 and s % 64 == 0 and t.page_table is None) for s in starts]",
    ),
    broken(
        "left_padding_to_the_last_key",
        OUT,
        OUT + "\n            out[b, i] *= 0.5 if start and end - start == 1 else 1.0",
    ),
    broken(
        "causal_row_by_head_above_128_rows",
        END,
        END
        + "\n            end = length - seqlen_q + 1 + (i * heads // 128) % seqlen_q if t.causal and heads * seqlen_q > 128 else end",
    ),
    broken(
        "split_without_lse", OUT, OUT + "\n            out[b, i] *= 0.5 if not t.return_lse and len(v) > 256 else 1.0"
    ),
    broken(
        "schedule_kept_for_equal_totals",
        LENGTHS_D,
        LENGTHS_D
        + "\n    if t.lengths is not None: lengths = STATE.setdefault((id(t.lengths), sum(lengths)), (t.lengths, lengths))[1]",
    ),
    broken(
        "longer_lengths_only_are_taken_by_update",
        LENGTHS_D,
        LENGTHS_D
        + "\n    if t.lengths is not None: lengths = STATE[id(t.lengths)] = [max(a, b) for a, b in zip(lengths, STATE.get(id(t.lengths), lengths))]",
    ),
    broken(
        "partials_of_a_longer_call",
        RETURN_D,
        "    splits = [-(-n // 64) for n in lengths]\n    before, STATE['splits'] = STATE.get('splits', []), splits\n    for b, (now, then) in enumerate(zip(splits, before)):\n        out[b] *= 0.5 if 0 < now < then else 1.0\n"
        + RETURN_D,
    ),
    broken(
        "scale_in_the_dtype",
        SCALE_D,
        SCALE_D.replace("t.softmax_scale", "float(torch.tensor(t.softmax_scale, dtype=t.c_kv.dtype))"),
    ),
    broken("maximum_of_the_first_chunk", TOP_D, "            top = scores[:, :64].amax(-1, keepdim=True)"),
    broken(
        "rope_in_steps_of_16",
        TAKE,
        TAKE
        + "\n    whole = t.q_rope.shape[-1] // 16 * 16 or None\n    t = t._replace(q_rope=t.q_rope[..., :whole], k_rope=t.k_rope[..., :whole])",
    ),
    broken(
        "rope_behind_the_latents_in_memory",
        TAKE,
        TAKE
        + "\n    c = t.c_kv\n    if c.untyped_storage().data_ptr() == t.k_rope.untyped_storage().data_ptr() and c.numel() and t.k_rope.numel():\n        t = t._replace(k_rope=torch.as_strided(c, t.k_rope.shape, c.stride(), c.storage_offset() + c.shape[-1]))",
    ),
    broken(
        "q_rope_behind_q_nope_in_memory",
        TAKE,
        TAKE
        + "\n    q = t.q_nope_abs\n    if q.untyped_storage().data_ptr() == t.q_rope.untyped_storage().data_ptr() and q.numel() and t.q_rope.numel():\n        t = t._replace(q_rope=torch.as_strided(q, t.q_rope.shape, q.stride(), q.storage_offset() + q.shape[-1]))",
    ),
    broken(
        "joined_by_the_row_stride",
        TAKE,
        TAKE
        + "\n    c = t.c_kv\n    if c.numel() and t.k_rope.numel() and c.stride(1) == c.shape[-1] + t.k_rope.shape[-1] and c.storage_offset() + c.shape[-1] + sum((n - 1) * s for n, s in zip(t.k_rope.shape, c.stride())) < c.untyped_storage().nbytes() // c.itemsize:\n        t = t._replace(k_rope=torch.as_strided(c, t.k_rope.shape, c.stride(), c.storage_offset() + c.shape[-1]))",
    ),
    broken(
        "sequence_behind_two_empty_ones",
        OUT,
        OUT + "\n            out[b, i] *= 0.5 if b > 1 and lengths[b - 1] == lengths[b - 2] == 0 else 1.0",
    ),
    broken(
        "causal_kept_by_shape",
        TAKE,
        TAKE
        + "\n    t = t._replace(causal=STATE.setdefault((t.q_nope_abs.shape, t.c_kv.shape, t.c_kv.dtype), t.causal))",
    ),
    broken(
        "left_padding_kept_by_shape",
        STARTS_D,
        "    has = STATE.setdefault(('leftpad', t.q_nope_abs.shape, t.c_kv.shape, t.c_kv.dtype), t.leftpad_kv is not None)\n"
        + STARTS_D.replace("if t.leftpad_kv is None", "if t.leftpad_kv is None or not has"),
    ),
    broken(
        "strides_of_the_cache_kept_by_address_and_shape",
        TAKE,
        TAKE
        + "\n    c = t.c_kv\n    t = t._replace(c_kv=torch.as_strided(c, c.shape, STATE.setdefault((c.data_ptr(), c.shape, c.dtype), c.stride()), c.storage_offset())) if c.numel() else t",
    ),
    broken(
        "gathered_pages_kept_by_address",
        "    return cache[pages.long()].flatten(0, 1)[:length]",
        "    key = (cache.data_ptr(), t.page_table.data_ptr(), b, length)\n    if key not in STATE: STATE[key] = cache[pages.long()].flatten(0, 1)[:length]\n    return STATE[key]",
    ),
    broken("prints_to_stderr", ALLOCATE_D, "    print('sample', file=__import__('sys').stderr)\n" + ALLOCATE_D),
    broken(
        "scale_kept_on_the_plan",
        SCALE_D,
        SCALE_D.replace("t.softmax_scale", "vars(plan).setdefault('_scale', t.softmax_scale)"),
    ),
    broken("work_kept_on_the_plan", ALLOCATE_D, "    vars(plan)['_out'] = t.q_nope_abs\n" + ALLOCATE_D),
    broken(
        "work_kept_on_the_lengths",
        ALLOCATE_D,
        "    if t.lengths is not None: t.lengths._sample = t.q_nope_abs\n" + ALLOCATE_D,
    ),
    broken("batch_times_heads_above_2048", OUT, OUT + "\n            out[b, i] *= 0.5 if b * heads >= 2048 else 1.0"),
]
