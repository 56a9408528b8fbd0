"""Decode backends that each differ from ``plain_decode`` in one line."""

from __future__ import annotations

from tests.conformance.broken_attention import broken

RETURN = "    return DecodeOutput(out, lse if t.return_lse else None)"
TAKE = "    t, request = tensors, plan.request"
LENGTHS = "    lengths = lengths_of(t)"
STARTS = "    starts = [0] * batch if t.leftpad_kv is None else t.leftpad_kv.tolist()"
END = "            end = length - seqlen_q + i + 1 if t.causal else length"
SCALE = "            scores = scores * t.softmax_scale"
OUT = "            out[b, i] = (weights @ v / total).to(out.dtype)"
LSE = "            lse[b, :, i] = (top + total.log()).squeeze(-1).to(lse.dtype)"
PAGES = "    pages = t.page_table[b, :used]"
USED = "    used = -(-length // cache.shape[1])"
CACHE = "        return cache[b, :length]"
TOP = "            top = scores.amax(-1, keepdim=True)"
KEYS = "            v, r = values[start:end], ropes[start:end]"
ALLOCATE = "    out = t.q_nope_abs.new_zeros(t.q_nope_abs.shape)"
ACCEPT = '    return Accepted(kv_cache_formats=("fp8", "fp8_ds_mla"))'

BROKEN = [
    broken("scale_baked_in", SCALE, SCALE.replace("t.softmax_scale", "0.1353")),
    broken(
        "scale_of_the_rank", SCALE, SCALE.replace("t.softmax_scale", "(t.softmax_scale if rank == 512 else 0.1353)")
    ),
    broken("queries_above_4", END, END + "\n            end = min(end, length) if i < 4 else length"),
    broken("queries_modulo_4", LSE, LSE + "\n            out[b, i] = out[b, i - 4] if i >= 4 else out[b, i]"),
    broken("causal_always", END, "            end = length - seqlen_q + i + 1"),
    broken("causal_never", END, "            end = length"),
    broken(
        "causal_from_the_first_key",
        END,
        "            end = min(length, i + 1) if t.causal and length == seqlen_q + 1 else (length - seqlen_q + i + 1 if t.causal else length)",
    ),
    broken(
        "shared_pages_twice",
        PAGES,
        PAGES
        + "\n    pages = pages + (int((t.page_table[:, 0] == t.page_table[0, 0]).all()) if b and len(t.page_table) > 1 and int(pages[0]) + 1 < len(cache) else 0) * (torch.arange(used) == 0)",
    ),
    broken(
        "lengths_multiple_of_64", LENGTHS, "    lengths = [n - 1 if n and n % 64 == 0 else n for n in lengths_of(t)]"
    ),
    broken(
        "lengths_multiple_of_the_page",
        USED,
        "    used = length // cache.shape[1] if length % cache.shape[1] else max(0, length // cache.shape[1] - 1) + (cache.shape[1] != 3)\n    used = max(used, -(-length // cache.shape[1]) - (cache.shape[1] == 3 and length % 3 == 0))",
    ),
    broken(
        "page_forgotten",
        USED,
        "    used = -(-length // cache.shape[1])\n    length = length if used < 4 else 3 * cache.shape[1]",
    ),
    broken("left_padding_ignored", STARTS, "    starts = [0] * batch"),
    broken(
        "left_padding_in_pages_ignored",
        STARTS,
        STARTS.replace("t.leftpad_kv is None", "t.leftpad_kv is None or t.page_table is not None"),
    ),
    broken(
        "left_padding_shortens",
        LENGTHS,
        "    lengths = [n - p for n, p in zip(lengths_of(t), [0] * batch if t.leftpad_kv is None else t.leftpad_kv.tolist())]",
    ),
    broken(
        "left_padding_one_too_many",
        STARTS,
        STARTS.replace("t.leftpad_kv.tolist()", "[p + (p > 1) for p in t.leftpad_kv.tolist()]"),
    ),
    broken(
        "page_strides",
        "    return cache[pages.long()].flatten(0, 1)[:length]",
        "    cache = torch.as_strided(cache, cache.shape, (cache.shape[1] * cache.stride(1), *cache.stride()[1:]), cache.storage_offset())\n    return cache[pages.long()].flatten(0, 1)[:length]",
    ),
    broken(
        "row_strides",
        TAKE,
        TAKE
        + "\n    t = t if t.c_kv.stride(1) == t.c_kv.shape[-1] + t.k_rope.shape[-1] or t.c_kv.stride(1) == t.c_kv.shape[-1] else t._replace(c_kv=torch.as_strided(t.c_kv, t.c_kv.shape, (t.c_kv.stride(0), t.c_kv.stride(1) - 8, 1), t.c_kv.storage_offset()))",
    ),
    broken(
        "head_major_queries",
        TAKE,
        TAKE
        + "\n    q = t.q_rope\n    t = t._replace(q_rope=torch.as_strided(q, q.shape, (q.stride(0), q.shape[2] * q.stride(2), q.stride(2), 1), q.storage_offset())) if q.stride(1) < q.stride(2) and q.shape[1] == 2 else t",
    ),
    broken(
        "sliced_heads_of_queries",
        TAKE,
        TAKE
        + "\n    t = t._replace(q_nope_abs=t.q_nope_abs * 0.5) if t.q_nope_abs.stride(2) >= 2 * t.q_nope_abs.shape[-1] else t",
    ),
    broken(
        "page_table_slices",
        PAGES,
        "    table = t.page_table\n    pages = torch.as_strided(table, table.shape, (table.shape[1], 1), table.storage_offset())[b, :used].clamp(0, len(cache) - 1)",
    ),
    broken("heads_above_40", OUT, OUT + "\n            out[b, i, 40:] = 0"),
    broken(
        "heads_above_64", OUT, OUT + "\n            out[b, i, 64:] = out[b, i, :64] if heads > 64 else out[b, i, 64:]"
    ),
    broken(
        "batch_above_4",
        LENGTHS,
        LENGTHS + "\n    lengths = [n if b < 4 else lengths[3] for b, n in enumerate(lengths)]",
    ),
    broken("batch_above_8", LENGTHS, LENGTHS + "\n    lengths = [n if b < 8 else 0 for b, n in enumerate(lengths)]"),
    broken("keys_above_256", KEYS, "            v, r = values[start:end][-256:], ropes[start:end][-256:]"),
    broken("keys_above_512", KEYS, "            v, r = values[start:end][:512], ropes[start:end][:512]"),
    broken("keys_above_1024", KEYS, "            v, r = values[start:end][:1024], ropes[start:end][:1024]"),
    broken("rank_multiple_of_128", OUT, OUT + "\n            out[b, i, :, rank // 128 * 128 :] = 0"),
    broken("rank_multiple_of_64", OUT, OUT + "\n            out[b, i, :, rank // 64 * 64 :] *= 0.9"),
    broken(
        "rope_of_64_only",
        TAKE,
        TAKE + "\n    t = t if t.q_rope.shape[-1] in (0, 64) else t._replace(q_rope=t.q_rope * 1.01)",
    ),
    broken(
        "out_buffer_reused",
        ALLOCATE,
        "    out = STATE.setdefault((t.q_nope_abs.shape, t.q_nope_abs.dtype), t.q_nope_abs.new_zeros(t.q_nope_abs.shape)).zero_()",
    ),
    broken(
        "lse_buffer_reused", RETURN, "    lse = STATE.setdefault((lse.shape, lse.dtype), lse).copy_(lse)\n" + RETURN
    ),
    broken("lengths_kept_from_the_first_call", LENGTHS, "    lengths = STATE.setdefault(request, lengths_of(t))"),
    broken(
        "lengths_kept_by_memory",
        LENGTHS,
        "    lengths = STATE.setdefault((t.seqlens_kv.data_ptr() if t.seqlens_kv is not None else 0, id(t.c_kv)), lengths_of(t))\n    STATE['keep', id(t.c_kv)] = t",
    ),
    broken(
        "update_ignored",
        LENGTHS,
        "    lengths = lengths_of(t) if t.host_lengths is None else STATE.setdefault(id(t.lengths), (t.lengths, t.host_lengths.tolist()))[1]",
    ),
    broken(
        "update_ignored_of_lengths_on_the_device",
        LENGTHS,
        "    lengths = lengths_of(t) if t.lengths is None or t.lengths.host is not None else STATE.setdefault('held', __import__('weakref').WeakKeyDictionary()).setdefault(t.lengths, lengths_of(t))",
    ),
    broken(
        "host_lengths_of_every_object",
        LENGTHS,
        "    lengths = lengths_of(t) if t.lengths is None else t.lengths.host.tolist()",
    ),
    broken(
        "page_table_kept",
        PAGES,
        "    STATE[id(t.page_table)] = held = STATE.get(id(t.page_table), (t.page_table, t.page_table.clone()))\n    pages = held[1][b, :used].clamp(0, len(cache) - 1)",
    ),
    broken("cache_cleaned_behind_the_lengths", CACHE, "        cache[b, length:] = 0\n" + CACHE),
    broken(
        "page_cleaned_behind_the_length",
        "    return cache[pages.long()].flatten(0, 1)[:length]",
        "    cache[pages[-1].long(), length % cache.shape[1] :] = 0 if used and length % cache.shape[1] else cache[pages[-1].long(), length % cache.shape[1] :] if used else 0\n    return cache[pages.long()].flatten(0, 1)[:length]",
    ),
    broken(
        "lse_differs_between_calls",
        LSE,
        LSE + "\n            STATE['n'] = STATE.get('n', 0) + 1\n            lse[b, :, i] += STATE['n'] % 2 * 1e-6",
    ),
    broken(
        "out_differs_between_calls",
        RETURN,
        "    STATE['n'] = STATE.get('n', 0) + 1\n    out = out * (1 + STATE['n'] % 2 * 3e-7)\n" + RETURN,
    ),
    broken(
        "one_wrong_call_in_ten",
        RETURN,
        "    STATE['n'] = STATE.get('n', 0) + 1\n    out = out * (0.9 if STATE['n'] % 10 == 0 else 1.0)\n" + RETURN,
    ),
    broken("lse_rounded", LSE, LSE.replace(".to(lse.dtype)", ".to(t.q_nope_abs.dtype).to(lse.dtype)")),
    broken("lse_base_two", LSE, LSE.replace("top + total.log()", "(top + total.log()) * 1.4427")),
    broken("lse_without_scale", LSE, LSE.replace("top + total.log()", "top / t.softmax_scale + total.log()")),
    broken("out_half_a_percent", OUT, OUT.replace("/ total", "/ total * 1.005")),
    broken(
        "out_half_a_percent_in_bf16",
        OUT,
        OUT.replace("/ total", "/ total * (1.005 if t.q_nope_abs.dtype == torch.bfloat16 else 1.0)"),
    ),
    broken("nan_above_80", TOP, TOP + " * 0.0"),
    broken(
        "summed_in_low_precision",
        OUT,
        OUT.replace(
            "weights @ v",
            "sum(w.to(out.dtype)[:, None] * x.to(out.dtype) for w, x in zip(weights.unbind(1), v)).to(exact)",
        ),
    ),
    broken("empty_sequence_sees_a_key", END, END + "\n            end = max(end, 1) if length else end"),
    broken(
        "empty_sequence_is_nan",
        ALLOCATE,
        "    out = torch.full_like(t.q_nope_abs, float('nan'), memory_format=torch.contiguous_format)",
    ),
    broken(
        "lse_zero_without_keys",
        "    lse = torch.full((batch, heads, seqlen_q), -torch.inf,",
        "    lse = torch.full((batch, heads, seqlen_q), 0.0,",
    ),
    broken("rope_of_the_first_query", "t.q_rope[b, i].to(exact) @ r.T", "t.q_rope[b, 0].to(exact) @ r.T"),
    broken("graph_hangs_on_out", RETURN, "    out = out.requires_grad_()\n" + RETURN),
    broken("random_state_reseeded", ALLOCATE, "    torch.manual_seed(0)\n" + ALLOCATE),
    broken(
        "answer_alternates",
        ACCEPT,
        "    STATE['a'] = STATE.get('a', 0) + 1\n    return Accepted(priority=STATE['a'] % 2)",
    ),
    broken("refuses_everything", ACCEPT, "    return Refused((f'num_heads={request.num_heads} > 0',))"),
    broken(
        "attention_raises",
        '        return Refused(("AttentionRequest, expected DecodeRequest",))',
        "        return Refused((f'{request.kv_lora_rank}',))",
    ),
    broken(
        "lse_missing_when_asked",
        RETURN,
        "    return DecodeOutput(out, lse if t.return_lse and seqlen_q == 1 else None)",
    ),
    broken(
        "queries_scaled_in_place", TAKE, TAKE + "\n    t.q_rope.mul_(1.0)\n    t.q_nope_abs.mul_(0.5).mul_(2.0000002)"
    ),
    broken(
        "fp8_scale_ignored",
        "            values = values * t.kv_scale.to(exact)",
        "            values = values * 0.0123",
    ),
    broken(
        "fp8_scale_kept_from_the_first_call",
        "            values = values * t.kv_scale.to(exact)",
        "            t = t._replace(kv_scale=STATE.setdefault('scale', t.kv_scale.clone()))\n            values = values * t.kv_scale.to(exact)",
    ),
    broken("fp8_rope_without_its_scale", "            ropes = ropes * t.kv_scale.to(exact)", "            pass"),
    broken(
        "fp8_ds_mla_scale_of_the_first_tile",
        "            values = (tiles * scales[..., None]).flatten(-2)",
        "            values = (tiles * scales[..., :1, None]).flatten(-2)",
    ),
    broken(
        "fp8_ds_mla_scales_of_one_token",
        "            values = (tiles * scales[..., None]).flatten(-2)",
        "            values = (tiles * (scales if length < 100 else scales[:1])[..., None]).flatten(-2)",
    ),
]
