"""Faults in what connects the parts of a call, or calls: residuals of another backend, keys on other devices, a forward
with two backwards, tensors that are parts of others, lengths that layers share, and features beside dropout and
``batch_invariant``.
"""

from __future__ import annotations

from dataclasses import replace

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import DELTA, REQUEST, RETURN, RETURN_OUT, VIEWS, broken
from tests.conformance.broken_beside import but_for, of_dropout
from tests.conformance.broken_later import SPANS
from tests.conformance.broken_rare import OUT_AND_DOUT
from tests.conformance.broken_unseen import INVARIANT, KEEP, TILE, with_feature
from tests.conformance.mutants import Broken

NO_PARTIAL = but_for("not request.partial", "partial={request.partial}, expected False")
AS_IF_CONTIGUOUS = """    x = residuals.{0}
    residuals = replace(residuals, {0}=x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()))
"""
PADDED_LSE = """    wide = lse.new_full((*lse.shape[:-1], -(-lse.shape[-1] // 128) * 128), -torch.inf)
    wide[..., : lse.shape[-1]] = lse
    lse = wide[..., : lse.shape[-1]]
"""
OF_PADDED_LSE = """    x = residuals.lse
    strides = torch.empty((*x.shape[:-1], -(-x.shape[-1] // 128) * 128), device="meta").stride()
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, strides))
    if x.numel() and last < x.untyped_storage().nbytes() // x.itemsize:
        residuals = replace(residuals, lse=x.as_strided(x.shape, strides))
"""
DQ_B = "        layout.to_bhsd(dq)[row, :, rows] = dq_b.to(dq.dtype)\n"
SEEN = "        seen = weights != 0\n"
KEPT_DELTA = """
        from torch.multiprocessing.reductions import StorageWeakRef
        owner = StorageWeakRef(residuals.out.untyped_storage())
        if 'delta' not in CACHE or CACHE['delta'][0].cdata != owner.cdata or CACHE['delta'][0].expired():
            CACHE['delta'] = owner, {}
        delta = CACHE['delta'][1].setdefault(b, delta)"""
V_IN_K = """
    first = t.v.storage_offset() - t.k.storage_offset()
    is_inside = t.v.untyped_storage().data_ptr() == t.k.untyped_storage().data_ptr() and t.v.stride() == t.k.stride()
    if is_inside and 0 <= first <= t.k.shape[-1] - t.v.shape[-1]:
        v = k[..., : t.v.shape[-1]]"""


def without_partial(fault: Broken) -> Broken:
    """The fault in a backend that refuses ``partial=True``, so that only its own requests show it."""
    return replace(fault, before=(*NO_PARTIAL, *fault.before), refuses_more=True)


def kept_by_lengths(name: str, what: str, use: str, condition: str = "True") -> Broken:
    """A schedule of a ``DecodeLengths`` that holds what is not the lengths' own, as ``kept`` of the first layer."""
    return broken(
        name,
        of_decode.STARTS,
        f"""    if t.lengths is not None and {condition}:
        made = __import__("types").SimpleNamespace(value={what}, renew=lambda _: False)
        kept = t.lengths.schedule("sample", lambda _: made).value
        {use}
{of_decode.STARTS}""",
    )


ATTENTION = [
    *(
        without_partial(
            broken(f"residual_{name}_as_if_contiguous", OUT_AND_DOUT, AS_IF_CONTIGUOUS.format(name) + OUT_AND_DOUT)
        )
        for name in ("out", "lse")
    ),
    without_partial(
        replace(
            broken("residual_lse_as_if_padded", OUT_AND_DOUT, OF_PADDED_LSE + OUT_AND_DOUT),
            before=((RETURN_OUT, PADDED_LSE + RETURN_OUT),),
        )
    ),
    broken(
        "dq_where_all_keys_are_elsewhere",
        DQ_B,
        "        dq_b = dq_b.masked_fill((~seen.any(-1) & ~lse_b.isneginf())[..., None], 1e-2)\n" + DQ_B,
    ),
    broken(
        "weights_of_hidden_keys_where_all_others_are_elsewhere",
        SEEN,
        "        blind = scores.isneginf().all(-1) & ~lse_b.isneginf()\n"
        "        weights = weights.masked_fill(blind[..., None], 1.0 / max(1, weights.shape[-1]))\n" + SEEN,
    ),
    replace(
        broken(
            "dq_added_up_over_the_backwards_of_a_forward",
            RETURN,
            "    CACHE[residuals.out.data_ptr()] = CACHE.get(residuals.out.data_ptr(), 0) + 1\n"
            "    dq = dq * CACHE[residuals.out.data_ptr()]\n" + RETURN,
        ),
        before=((RETURN_OUT, "    CACHE[out.data_ptr()] = 0\n" + RETURN_OUT),),
    ),
    replace(
        broken("delta_kept_for_a_forward", DELTA, DELTA + KEPT_DELTA),
        before=((RETURN_OUT, "    CACHE.pop('delta', None)\n" + RETURN_OUT),),
    ),
    broken("v_in_k_taken_for_its_first_columns", VIEWS, VIEWS + V_IN_K),
    broken(
        "queries_without_gaps_mean_keys_without_gaps",
        SPANS,
        SPANS.replace(
            "t.cu_seqlens_kv_padded", "None if t.cu_seqlens_q_padded is t.cu_seqlens_q else t.cu_seqlens_kv_padded"
        ),
    ),
    broken(
        "one_tensor_of_rows_means_one_of_lengths",
        SPANS,
        SPANS
        + "\n    if t.cu_seqlens_q_padded is not None and t.cu_seqlens_q_padded is t.cu_seqlens_kv_padded:"
        + "\n        spans_kv = spans_q",
    ),
    *(
        broken(
            f"strides_of_{name}_kept_for_like_calls",
            VIEWS,
            f"{VIEWS}\n    if t.kept is not None and t.{name} is not None:"
            f"\n        v = v * (0.5 if t.kept.setdefault('sample', t.{name}.stride()) != t.{name}.stride() else 1.0)",
        )
        for name in ("cu_seqlens_q", "bias")
    ),
]
ATTENTION += [
    of_dropout(
        f"dropout_not_in_the_backward_{name}",
        KEEP,
        KEEP + f"        keep = torch.ones_like(keep) if {condition} else keep\n",
    )
    for name, condition in {
        "of_causal_sbhd": "request.qkv_format == 'sbhd' and request.is_causal",
        "if_partial": "request.partial",
    }.items()
]
ATTENTION += [
    with_feature(
        broken(
            f"invariant_tiles_by_length_{name}",
            TILE,
            TILE.replace("64", f"32 if scores.shape[-1] > 100 and {condition} else 64"),
        ),
        INVARIANT,
    )
    for name, condition in {
        "of_one_query": "scores.shape[-2] == 1",
        "if_deterministic": "request.deterministic",
        "with_padding": "request.has_padding and not layout.is_packed",
        "with_gaps": "request.pad_between_seqs",
    }.items()
]
ATTENTION += [
    broken(f"sets_{name}", REQUEST, f"{REQUEST}    {statement}\n")
    for name, statement in {
        "logging_disable": "__import__('logging').disable(30)",
        "excepthooks": "setattr(__import__('sys'), 'excepthook', print)",
        "signal_of_ctrl_c": "__import__('signal').signal(2, lambda *_: None)",
    }.items()
]
DECODE = [
    *(
        kept_by_lengths(f"{name}_kept_for_the_layers", what, use)
        for name, (what, use) in {
            "left_padding": ("t.leftpad_kv", "t = t._replace(leftpad_kv=kept)"),
            "softmax_scale": ("t.softmax_scale", "t = t._replace(softmax_scale=kept)"),
            "page_table": ("t.page_table", "t = t._replace(page_table=kept)"),
            "format": (
                "t.kv_cache_format",
                "t = t._replace(q_rope=t.q_rope * (0.5 if kept != t.kv_cache_format else 1))",
            ),
            "page_count": (
                "None if t.page_table is None else [-(-n // t.c_kv.shape[1]) for n in lengths_of(t)]",
                "if kept is not None and t.page_table is not None:\n"
                "            lengths = [min(n, count * t.c_kv.shape[1]) for n, count in zip(lengths, kept)]",
            ),
        }.items()
    ),
    kept_by_lengths(
        "kv_scale_kept_for_the_layers",
        "t.kv_scale.clone()",
        "t = t._replace(kv_scale=kept)",
        "t.kv_cache_format == 'fp8'",
    ),
    broken(
        "equal_pages_taken_for_a_common_prefix",
        of_decode.PAGES,
        of_decode.PAGES
        + """
    least = min(-(-n // cache.shape[1]) for n in lengths_of(t))
    table = t.page_table[:, :least]
    common = int((table == table[:1]).all(0).sum())
    pages = torch.cat([table[0, :common], pages[common:]])""",
    ),
]
