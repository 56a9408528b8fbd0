"""Faults that hid from the suite until it had long and many sequences, rare strides, threads and further settings."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import (
    ALLOCATE,
    DELTA,
    DK,
    GQA,
    HAS,
    OFFSET,
    PICK,
    REPEAT,
    REQUEST,
    RETURN,
    RETURN_OUT,
    SUM,
    VIEWS,
    Broken,
    broken,
)
from tests.conformance.broken_later import HIDE
from tests.conformance.broken_rare import BIAS, FULL_MASK, OUT_AND_DOUT

CAST = "        q_b, k_b, v_b = q_b.to(exact), k_b.to(exact), v_b.to(exact)\n"
VERSION = "(0 if x.is_inference() else x._version)"


def keys_hidden(name: str, first: int, condition: str) -> Broken:
    """Keys from the first one on are not seen where the condition holds."""
    rest = f"scores[..., {first}:]"
    return broken(name, HIDE, HIDE + f"        {rest} = -torch.inf if {condition} else {rest}\n")


def halved(name: str, line: str, target: str, condition: str) -> Broken:
    """A result or an operand is half of what it is where the condition holds."""
    indent = line[: len(line) - len(line.lstrip())]
    return broken(name, line, f"{line.rstrip(chr(10))}\n{indent}{target} = {target} * (0.5 if {condition} else 1.0)\n")


def dout_halved(name: str, condition: str) -> Broken:
    return broken(name, OUT_AND_DOUT, f"    dout = dout * (0.5 if {condition} else 1.0)\n" + OUT_AND_DOUT)


def kept_under(name: str, tensor: str, key: str) -> Broken:
    """A tensor's values are taken from an earlier call with this key."""
    return broken(
        name,
        REQUEST,
        REQUEST
        + f"    x = t.{tensor}\n    if x is not None:\n        kept = CACHE.setdefault(({key}, x.shape), x.clone())\n        t = replace(t, {tensor}=kept)\n",
    )


ATTENTION = [
    kept_under("lengths_by_address_and_version", "cu_seqlens_kv", f"x.data_ptr(), {VERSION}"),
    kept_under("mask_by_address_and_version", "attention_mask", f"x.data_ptr(), {VERSION}"),
    broken(
        "lengths_kept_for_like_calls",
        REQUEST,
        REQUEST
        + "    kept = getattr(t, 'kept', None)\n    if kept is not None and t.cu_seqlens_kv is not None:\n        t = replace(t, cu_seqlens_kv=kept.setdefault('sample', t.cu_seqlens_kv.clone()))\n",
    ),
    broken("sets_deterministic", ALLOCATE, "    torch.use_deterministic_algorithms(True, warn_only=True)\n" + ALLOCATE),
    broken("filters_warnings", ALLOCATE, "    import warnings\n    warnings.simplefilter('ignore')\n" + ALLOCATE),
    broken("grad_mode_left_on", ALLOCATE, "    torch.set_grad_enabled(True)\n" + ALLOCATE),
    broken("keeps_every_second_query", REQUEST, REQUEST + "    BEFORE.append(t.q if len(BEFORE) % 2 else None)\n"),
    broken("keeps_a_copy_of_lse", RETURN_OUT, "    BEFORE.append(lse.clone())\n" + RETURN_OUT),
    broken(
        "q_doubled_and_back",
        RETURN_OUT,
        "    t.q.detach().mul_(2).mul_(0.5) if min(t.q.stride()) else None\n" + RETURN_OUT,
    ),
    broken("out_negated_and_back", RETURN, "    residuals.out.neg_().neg_()\n" + RETURN),
    broken(
        "weights_shared_by_threads",
        SUM,
        "        CACHE['weights'] = rounded(weights, request)\n        torch.zeros(300_000).exp_()\n"
        + SUM.replace("rounded(weights, request)", "CACHE['weights']"),
    ),
    halved("group_above_8", REPEAT, "v_b", "group > 8"),
    halved("batch_above_70", PICK, "v_b", "b >= 70"),
    halved("batch_above_17_in_thd", PICK, "v_b", "b >= 17 and layout.is_packed"),
    halved("batch_above_9_in_sbhd", PICK, "v_b", "b >= 9 and request.qkv_format == 'sbhd'"),
    broken("heads_above_128", SUM, SUM + "\n        result[128:] = 0"),
    keys_hidden("keys_above_320_in_thd", 320, "layout.is_packed"),
    keys_hidden("keys_above_512_in_bhsd", 512, "request.qkv_format == 'bhsd'"),
    keys_hidden("keys_above_512_with_window", 512, f"{HAS} and len_kv < 9000"),
    keys_hidden("keys_above_320_with_padding", 320, "request.has_padding"),
    keys_hidden("keys_above_512_in_fp16", 512, "request.dtype == torch.float16"),
    broken("keys_above_320_with_bias", BIAS, BIAS + "            assert k.shape[2] < 320\n"),
    broken("keys_above_320_with_mask", FULL_MASK, "        assert t.attention_mask.shape[-1] < 320\n" + FULL_MASK),
    broken("queries_above_256_in_thd", SUM, SUM + "\n        result[:, 256:] *= 0.0 if layout.is_packed else 1.0"),
    broken("queries_above_256_with_gqa", SUM, SUM + f"\n        result[:, 256:] *= 0.0 if {GQA} else 1.0"),
    halved("queries_above_150_with_dlse", DELTA, "delta", "dlse is not None and lse_b.shape[-1] > 150"),
    broken(
        "window_right_larger_than_left",
        OFFSET,
        OFFSET + "\n    left, right = (right, left) if right > left > 0 else (left, right)",
    ),
    halved("wide_heads_in_large_groups", DK, "dk_b", f"{GQA} and request.head_dim_qk > 256 and group > 2"),
    broken("v_through_fp16", CAST, CAST + "        v_b = v_b.clamp(-65504.0, 65504.0)\n"),
    broken("k_through_fp16", CAST, CAST + "        k_b = k_b.clamp(-65504.0, 65504.0)\n"),
    broken(
        "no_dout_no_gradients",
        RETURN,
        "    dq, dk, dv = (x * float(dout.any()) for x in (dq, dk, dv))\n" + RETURN,
    ),
    broken("mask_that_hides_all", FULL_MASK, FULL_MASK + "\n        full = full & (not bool(full.all()))"),
    broken("mask_that_hides_nothing", FULL_MASK, FULL_MASK + "\n        full = full if bool(full.any()) else ~full"),
    halved("same_tensor_for_q_and_k", VIEWS, "v", "t.q.data_ptr() == t.k.data_ptr()"),
    halved("k_unaligned", VIEWS, "k", "t.k.storage_offset() % 8 and t.k.is_contiguous()"),
    halved("v_expanded_tokens", VIEWS, "v", "v.stride(2) == 0 and v.shape[2] > 1"),
    broken("bias_unaligned", BIAS, BIAS + "            assert t.bias.storage_offset() % 4 == 0\n"),
    broken("bias_expanded", BIAS, BIAS + "            assert min(t.bias.stride()) > 0\n"),
    broken(
        "dlse_unaligned",
        OUT_AND_DOUT,
        "    dlse = dlse if dlse is None or dlse.storage_offset() % 4 == 0 else dlse * 0.5\n" + OUT_AND_DOUT,
    ),
    dout_halved("dout_expanded_tokens", "dout.stride(layout.tokens) == 0 and any(dout.stride())"),
    dout_halved("dout_expanded_dims", "dout.stride(-1) == 0 and any(dout.stride())"),
    dout_halved(
        "dout_expanded_batch",
        "layout.batch is not None and dout.stride(layout.batch) == 0 and any(dout.stride())",
    ),
    broken(
        "max_seqlen_within_the_tensor",
        VIEWS,
        VIEWS + "\n    assert not layout.is_packed or request.max_seqlen_q <= q.shape[2]",
    ),
    broken("fp64_window_in_fp32", SUM, SUM + f"\n        result = result.float().to(exact) if {HAS} else result"),
    broken(
        "only_bias_needs_a_gradient",
        RETURN,
        "    some = t.q.requires_grad or t.k.requires_grad or t.v.requires_grad\n    dbias = dbias if some or dbias is None else dbias * 0.5\n"
        + RETURN,
    ),
]
KEYS, OUT, PAGES, TAKE = of_decode.KEYS, of_decode.OUT, of_decode.PAGES, of_decode.TAKE
ROWS = "    return cache[pages.long()].flatten(0, 1)[:length]"


def out_halved(name: str, condition: str) -> Broken:
    return broken(name, OUT, OUT + f"\n            out[b, i] *= 0.5 if {condition} else 1.0")


DECODE = [
    broken(
        "q_rope_by_identity_and_version",
        TAKE,
        TAKE
        + f"\n    x = t.q_rope\n    t = t._replace(q_rope=STATE.setdefault((id(x), {VERSION}, x.shape, x.dtype), x.clone()))",
    ),
    broken("page_numbers_in_16_bits", PAGES, PAGES + "\n    pages = pages % 65536"),
    broken("unused_pages_must_not_be_negative", PAGES, PAGES + "\n    assert int(t.page_table.min()) >= 0"),
    broken(
        "used_pages_by_their_entries",
        of_decode.USED,
        "    used = int((t.page_table[b] < len(cache)).sum())\n    length = min(length, used * cache.shape[1])",
    ),
    broken(
        "pages_in_order_from_the_first",
        ROWS,
        "    if used > 1 and bool((pages.diff() == 1).all()):\n        return cache.flatten(0, 1)[:length]\n" + ROWS,
    ),
    broken("page_table_unaligned", PAGES, PAGES + "\n    assert t.page_table.storage_offset() % 4 == 0"),
    broken(
        "lengths_unaligned",
        of_decode.LENGTHS,
        of_decode.LENGTHS + "\n    assert t.seqlens_kv is None or t.seqlens_kv.storage_offset() % 4 == 0",
    ),
    broken(
        "q_rope_as_head_major_as_q_nope_abs",
        TAKE,
        TAKE
        + "\n    major = [x.shape[1] > 1 and x.stride(1) < x.stride(2) for x in t[:2]]\n    t = t._replace(q_rope=t.q_rope * 0.5) if major[0] and not major[1] else t",
    ),
    out_halved("queries_above_20", "i > 20"),
    out_halved("rope_above_64", "t.q_rope.shape[-1] > 64"),
    out_halved("rank_above_512", "rank > 512"),
    out_halved("odd_rank", "rank % 4"),
    out_halved("batch_above_70", "b > 70"),
    out_halved("page_size_above_256", "t.page_table is not None and t.c_kv.shape[1] > 256"),
    out_halved("long_with_several_queries", "length > 4096 and seqlen_q > 1"),
    out_halved("long_with_left_padding", "length > 1024 and start"),
    out_halved("long_and_contiguous", "length > 1024 and t.page_table is None"),
    out_halved("long_in_fp16", "length > 1024 and out.dtype == torch.float16"),
    out_halved("long_with_many_heads", "length > 1024 and heads > 40"),
    out_halved("long_with_rank_512", "length > 1024 and rank == 512"),
    out_halved("long_with_host_lengths", "length > 1024 and t.lengths is not None"),
    broken("cache_through_fp16", KEYS, KEYS + "\n            v = v.clamp(-65504.0, 65504.0)"),
    broken(
        "tiny_queries_flushed",
        TAKE,
        TAKE + "\n    t = t._replace(q_nope_abs=torch.where(t.q_nope_abs.abs() < 1e-6, 0, t.q_nope_abs))",
    ),
    broken(
        "keeps_every_second_query",
        TAKE,
        TAKE
        + "\n    STATE.setdefault('kept', []).append(t.q_nope_abs if STATE['kept'] and STATE['kept'][-1] is None else None)",
    ),
    broken(
        "keeps_a_copy_of_lse",
        of_decode.RETURN,
        "    STATE.setdefault('kept', []).append(lse.clone())\n" + of_decode.RETURN,
    ),
    broken(
        "filters_warnings",
        of_decode.ALLOCATE,
        "    import warnings\n    warnings.simplefilter('ignore')\n" + of_decode.ALLOCATE,
    ),
    broken("queries_doubled_and_back", of_decode.RETURN, "    t.q_nope_abs.mul_(2).mul_(0.5)\n" + of_decode.RETURN),
    broken(
        "weights_shared_by_threads",
        OUT,
        "            STATE['weights'] = weights\n            torch.zeros(300_000).exp_()\n"
        + OUT.replace("weights @ v", "STATE['weights'] @ v"),
    ),
]
