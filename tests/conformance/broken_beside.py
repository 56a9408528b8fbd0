"""Faults of what no single case shows: dropout, biases of -inf in float64, inference mode, like calls, loggers.

``NARROWER`` are correct backends that refuse more than the plain one, so that other calls become the plainest that there
are; with ``DROPOUT`` and ``INVARIANT`` they are the ones that ``many_seeds`` runs.
"""

from __future__ import annotations

from dataclasses import replace

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import DELTA, DQ, LENGTHS, REQUEST, RETURN, RETURN_OUT, SUM, TOP, broken
from tests.conformance.broken_unseen import DROPOUT, KEEP, REFUSAL, SCORE_GRADIENTS, with_feature
from tests.conformance.mutants import Broken

REFUSALS = "def refusals(request):\n"
BIAS = "            bias = bias.expand(-1, q.shape[2], k.shape[2])[:, :len_q, :len_kv]\n"
SPANS_B = "    dbias = torch.zeros(t.bias.shape, dtype=exact) if request.bias_requires_grad else None\n"
MASK = "        full = four(t.attention_mask)."
BIASED = "            bias = four(t.bias)."
TARGET = "    target = dbias[b if dbias.shape[0] > 1 else 0]\n"
LEFT = "        mask = mask | (distance < -left)\n"
RIGHT = "        mask = mask | (distance > right)\n"
ADD_BIAS = "            add_bias_gradient(dbias, ds, request, t, b)\n"
DRAWN = "    return (torch.rand(shape, generator=generator) >= request.dropout_p) / (1 - request.dropout_p)\n"
BASIC = "    __import__('logging').basicConfig()\n"
ROPES = "        ropes = rows_of(t.k_rope, t, b, length).to(exact)\n"
SEED = "(seed + 7919 * b) % 2**63"
LOW = "0 < request.dropout_p < 0.01 and request.dtype == torch.bfloat16"


def but_for(condition: str, text: str) -> tuple[tuple[str, str], ...]:
    """What refuses all requests of which the condition does not hold."""
    return ((REFUSALS, f"{REFUSALS}    if not ({condition}):\n        yield f{text!r}\n"),)


NARROWER = {
    "float64": but_for("request.dtype == torch.float64", "dtype={request.dtype}, expected torch.float64"),
    "float16": but_for("request.dtype == torch.float16", "dtype={request.dtype}, expected torch.float16"),
    "packed": but_for("request.qkv_format == 'thd'", "qkv_format={request.qkv_format!r}, expected 'thd'"),
    "biased": but_for("request.bias_shape == 'bhss'", "bias_shape={request.bias_shape!r}, expected 'bhss'"),
    "equal_lengths": but_for(
        "request.max_seqlen_q == request.max_seqlen_kv and not request.lengths_may_differ",
        "lengths_may_differ={request.lengths_may_differ}, expected queries as long as keys",
    ),
    "inference": but_for("not request.is_training", "is_training={request.is_training}, expected False"),
    "one_kv_head": but_for(
        "request.num_kv_heads == 1 < request.num_heads", "num_kv_heads={request.num_kv_heads}, expected 1 of several"
    ),
    "heads_by_fours": but_for("request.num_heads % 4 == 0", "num_heads={request.num_heads}, expected a multiple of 4"),
}
"""By what they take alone."""


def decode_but_for(condition: str, text: str) -> tuple[tuple[str, str], ...]:
    """The same of decode."""
    return ((REFUSAL, f"    if not ({condition}):\n        return Refused((f{text!r},))\n" + REFUSAL),)


NARROWER_DECODE = {
    "float16": decode_but_for("request.dtype == torch.float16", "dtype={request.dtype}, expected torch.float16"),
    "one_query": decode_but_for("request.seqlen_q == 1", "seqlen_q={request.seqlen_q}, expected 1"),
    "fp8": decode_but_for(
        "request.kv_cache_format == 'fp8'", "kv_cache_format={request.kv_cache_format!r}, expected fp8"
    ),
    "heads_by_sixteens": decode_but_for(
        "request.dtype == torch.bfloat16 and request.num_heads % 16 == 0 and request.page_size == 64",
        "num_heads={request.num_heads}, dtype={request.dtype}, page_size={request.page_size}, expected a multiple of 16, "
        "torch.bfloat16, 64",
    ),
}


def narrower(fault: Broken, name: str) -> Broken:
    return replace(fault, before=NARROWER[name], refuses_more=True)


def of_dropout(name: str, old: str, new: str) -> Broken:
    return with_feature(broken(name, old, new), DROPOUT)


def of_draw(name: str, line: str) -> Broken:
    """``keep`` is what is drawn, 0 or 1, and the line changes it in both passes."""
    drawn = "    keep = (torch.rand(shape, generator=generator) >= request.dropout_p).float()\n"
    return of_dropout(name, DRAWN, f"{drawn}    {line}\n    return keep / (1 - request.dropout_p)\n")


MORE_OF_DROPOUT = [
    of_dropout("delta_without_dropout", DELTA, "        delta = (do * (weights @ v)).sum(-1)"),
    of_dropout("sums_of_what_is_kept", SUM, "        total = weights.sum(-1, keepdim=True)\n" + SUM),
    of_draw(
        "heads_of_one_key_head_drop_alike",
        "keep = keep[:: request.num_heads // request.num_kv_heads].repeat_interleave(request.num_heads // request.num_kv_heads, 0)",
    ),
    of_draw("the_diagonal_is_never_dropped", "keep.diagonal(dim1=-2, dim2=-1).fill_(1.0)"),
    of_draw("keys_from_64_on_are_never_dropped", "keep[..., 64:] = 1.0"),
    of_draw(
        "divided_by_the_share_that_was_kept", "keep = keep / keep.mean(-1, keepdim=True) * (1 - request.dropout_p)"
    ),
    of_draw(
        "packed_in_inference_drops_nothing",
        "keep = keep if request.is_training or request.qkv_format != 'thd' else torch.full(shape, 1 - request.dropout_p)",
    ),
    of_dropout("sequences_by_fours_drop_alike", SEED, SEED.replace("* b", "* (b % 4)")),
    of_dropout(
        "seeds_beyond_int32_are_0",
        SEED,
        SEED.replace("seed", "(seed if int(t.dropout_seed) < 2**31 else 0)"),
    ),
    of_draw("more_are_dropped_and_not_made_up_for", "keep = keep * (torch.rand(shape, generator=generator) >= 0.05)"),
]

ATTENTION = [
    of_dropout(
        "low_dropout_is_not_divided_in_bf16", DRAWN, DRAWN.rstrip().replace("/ (", f"/ (1 if {LOW} else ", 1) + "\n"
    ),
    of_dropout(
        "low_dropout_is_not_in_the_backward_in_bf16",
        KEEP,
        KEEP + f"        keep = torch.ones_like(keep) if {LOW} else keep\n",
    ),
    of_dropout(
        "low_dropout_is_not_divided_in_the_backward_in_bf16",
        KEEP,
        KEEP + f"        keep = keep * (1 - request.dropout_p) if {LOW} else keep\n",
    ),
    of_dropout(
        "low_dropout_of_dv_alone_in_bf16",
        "        weights = weights * keep\n",
        f"        weights = weights if {LOW} else weights * keep\n",
    ),
    of_draw(
        "packed_sequences_drop_a_quarter_or_nothing",
        "keep = torch.ones(shape) if request.qkv_format == 'thd' and request.dropout_p < 0.2 else keep",
    ),
    of_draw("the_last_key_is_never_dropped", "keep[..., -1] = 1.0"),
    of_draw("the_first_query_drops_nothing", "keep[:, 0] = 1.0"),
    of_draw("the_last_head_drops_nothing", "keep[-1] = 1.0 if shape[0] > 2 else keep[-1]"),
    of_draw("tiles_of_32_queries_drop_alike", "keep = keep[:, :32].repeat(1, -(-shape[1] // 32), 1)[:, : shape[1]]"),
    of_draw("tiles_of_16_keys_drop_alike", "keep = keep[..., :16].repeat(1, 1, -(-shape[2] // 16))[..., : shape[2]]"),
    of_draw(
        "heads_by_twos_drop_alike_in_the_first_half",
        "keep[1::2, : shape[1] // 2] = keep[::2, : shape[1] // 2][: len(keep[1::2])]",
    ),
    of_draw(
        "sequences_drop_alike_but_for_one_query",
        "keep[:, 1:] = torch.rand(shape, generator=generator.manual_seed(int(t.dropout_seed)))[:, 1:] >= request.dropout_p",
    ),
    of_dropout("the_seed_counts_by_twos", SEED, SEED.replace("seed", "seed // 2")),
    of_dropout(
        "delta_is_dropped_too",
        SCORE_GRADIENTS.replace("do @ v.mT", "do @ v.mT * keep"),
        SCORE_GRADIENTS.replace("do @ v.mT - delta[..., None]", "(do @ v.mT - delta[..., None]) * keep"),
    ),
    of_dropout(
        "low_dropout_in_inference_is_not_divided",
        DRAWN,
        DRAWN.rstrip().replace("/ (", "/ (1 if request.dropout_p < 0.01 and not request.is_training else ", 1) + "\n",
    ),
    narrower(
        broken("bias_of_-inf_is_nothing_in_float64", BIAS, BIAS + "            bias = bias.nan_to_num(neginf=0.0)\n"),
        "float64",
    ),
    narrower(
        broken("bias_of_float64_is_at_least_-30", BIAS, BIAS + "            bias = bias.clamp(min=-30.0)\n"),
        "float64",
    ),
    broken(
        "bias_of_-inf_is_-20_in_float64",
        BIAS,
        BIAS + "            bias = bias.clamp(min=-20.0) if request.dtype == torch.float64 else bias\n",
    ),
    broken(
        "workspace_of_inference_mode",
        TOP,
        TOP + "        CACHE.setdefault((top.shape, top.dtype), torch.zeros_like(top)).copy_(top)\n",
    ),
    broken(
        "grown_workspace_of_inference_mode",
        TOP,
        TOP + "        if CACHE.get('space', top[:0]).numel() < top.numel():\n"
        "            CACHE['space'] = torch.zeros(top.numel())\n"
        "        CACHE['space'][: top.numel()].copy_(top.flatten())\n",
    ),
    with_feature(
        broken("workspace_of_inference_mode_in_the_backward", SPANS_B, SPANS_B + "    CACHE[t.q.shape].zero_()\n"),
        ((RETURN_OUT, "    CACHE.setdefault(t.q.shape, torch.zeros(1))\n" + RETURN_OUT),),
    ),
    broken(
        "lengths_kept_for_like_backwards",
        SPANS_B,
        SPANS_B + "    if t.kept is not None and t.cu_seqlens_kv is not None:\n"
        "        t = replace(t, cu_seqlens_kv=t.kept.setdefault('sample', t.cu_seqlens_kv.clone()))\n",
    ),
    broken(
        "no_bias_kept_for_like_backwards",
        SPANS_B,
        SPANS_B
        + "    if t.kept is not None and t.bias is not None and t.kept.setdefault('sample', not t.bias.any()):\n"
        "        t = replace(t, bias=torch.zeros_like(t.bias))\n",
    ),
    *MORE_OF_DROPOUT,
    broken(
        "bias_of_-inf_makes_its_gradient_nan_in_float64",
        ADD_BIAS,
        "            ds = ds.masked_fill(scores.isneginf(), torch.nan) if exact == torch.float64 else ds\n" + ADD_BIAS,
    ),
    broken(
        "bias_that_hides_16_first_keys_in_float64",
        TOP,
        TOP + "        first = scores[..., :16].isneginf().all(-1, keepdim=True) & (t.bias is not None)\n"
        "        first &= ~scores.isneginf().all(-1, keepdim=True) & (request.attn_mask_type == 'no_mask')\n"
        "        top = top.masked_fill(first & (exact == torch.float64), torch.nan)\n",
    ),
    broken(
        "workspace_of_inference_mode_for_long_packed_sequences",
        TOP,
        TOP + "        if layout.is_packed and scores.shape[-1] > 300:\n"
        "            CACHE.setdefault(scores.shape, torch.zeros_like(top)).copy_(top)\n",
    ),
    broken(
        "mask_kept_for_like_backwards",
        SPANS_B,
        SPANS_B + "    if t.kept is not None and t.attention_mask is not None:\n"
        "        t = replace(t, attention_mask=t.kept.setdefault('mask', t.attention_mask.clone()))\n",
    ),
    broken(
        "alignment_kept_for_like_backwards",
        SPANS_B,
        SPANS_B + "    start = t.q.storage_offset() % 8\n"
        "    if t.kept is not None and t.kept.setdefault('start', start) != start:\n"
        "        dout = dout.roll(1, -1)\n",
    ),
    broken(
        "unused_lse_kept_for_like_backwards",
        SPANS_B,
        SPANS_B + "    if t.kept is not None and not t.kept.setdefault('dlse', dlse is not None):\n"
        "        dlse = None\n",
    ),
    narrower(
        broken(
            "gradients_of_more_than_992_sequences_of_one_length",
            RETURN,
            "    layout.to_bhsd(dk)[992:] = 0\n" + RETURN,
        ),
        "equal_lengths",
    ),
    narrower(
        broken(
            "more_than_4096_packed_sequences_of_one_length",
            LENGTHS,
            LENGTHS + "\n    lengths[4096:] = [0] * len(lengths[4096:])",
        ),
        "equal_lengths",
    ),
    narrower(
        broken(
            "more_than_992_sequences_of_one_length",
            RETURN_OUT,
            "    if not layout.is_packed:\n        layout.to_bhsd(out)[992:] = 0\n" + RETURN_OUT,
        ),
        "equal_lengths",
    ),
    narrower(
        broken(
            "more_than_992_sequences_with_a_bias",
            RETURN_OUT,
            "    layout.to_bhsd(out)[992:] = 0\n" + RETURN_OUT,
        ),
        "biased",
    ),
    broken(
        "dq_added_up_in_the_dtype_tile_by_tile",
        DQ,
        "        dq_b = torch.zeros_like(q)\n        for i in range(0, k.shape[1], 128):\n"
        "            part = ds[..., i : i + 128] @ k[:, i : i + 128] * t.softmax_scale\n"
        "            dq_b = (dq_b + part).to(dq.dtype).to(exact)",
    ),
    broken("handlers_of_the_root_logger", REQUEST, REQUEST + BASIC),
    with_feature(
        broken(
            "dropped_weights_kept_by_the_seed",
            DRAWN,
            DRAWN.replace("return (", "return CACHE.setdefault((int(t.dropout_seed), b, shape), (")[:-1] + ")\n",
        ),
        DROPOUT,
    ),
    with_feature(broken("dropout_seed_and_sequence_added", SEED, SEED.replace("7919 * b", "b")), DROPOUT),
    with_feature(
        broken("dropout_seed_in_32_bits", SEED, SEED.replace("seed", "int(t.dropout_seed)")),
        DROPOUT,
    ),
    of_dropout(
        "dropout_of_each_tile_alike",
        DRAWN,
        "    tile = torch.rand((shape[0], *(min(n, 128) for n in shape[1:])), generator=generator)\n"
        "    drawn = tile.repeat(1, *(-(-n // 128) for n in shape[1:]))[:, : shape[1], : shape[2]]\n"
        "    return (drawn >= request.dropout_p) / (1 - request.dropout_p)\n",
    ),
    with_feature(
        broken(
            "dropout_by_the_global_generator_in_between",
            DRAWN,
            "    with torch.random.fork_rng(devices=[]):\n        torch.manual_seed(generator.initial_seed())\n"
            "        return (torch.rand(shape) >= request.dropout_p) / (1 - request.dropout_p)\n",
        ),
        DROPOUT,
    ),
    broken(
        "deterministic_by_one_thread_alone",
        REFUSALS,
        REFUSALS + "    if request.deterministic and torch.get_num_threads() > 1:\n"
        "        yield 'deterministic=True with several threads, expected one'\n",
    ),
    broken(
        "sequences_and_heads_beyond_16_bits",
        REQUEST,
        REQUEST + "    assert request.batch_size * request.num_heads < 2**16, 'invalid configuration argument'\n",
    ),
    broken("last_call_is_kept", REQUEST, REQUEST + "    CACHE['last'] = tensors\n"),
    broken(
        "only_the_first_reason",
        "    reasons = tuple(refusals(request))\n",
        "    reasons = tuple(refusals(request))[:1]\n",
    ),
    broken(
        "mask_of_two_dimensions_taken_for_padding",
        MASK,
        "        x = t.attention_mask\n        is_padding = x.dim() == 2 and x.shape[0] == request.batch_size\n"
        "        full = (x[:, None, None] if is_padding else four(x)).",
    ),
    broken(
        "bias_of_two_dimensions_taken_for_padding",
        BIASED,
        "            x = t.bias\n            is_padding = x.dim() == 2 and x.shape[0] == request.batch_size\n"
        "            bias = (x[:, None, None] if is_padding else four(x)).",
    ),
    broken(
        "bias_of_three_dimensions_taken_by_sequence",
        BIASED,
        "            x = t.bias\n            bias = (x[:, None] if x.shape[0] == request.batch_size and x.dim() == 3 else four(x)).",
    ),
    broken(
        "first_tile_of_a_window_one_key_too_late",
        LEFT,
        LEFT + "        first = torch.arange(len_q)[:, None] // 128 * 128 + offset - left\n"
        "        mask = mask | (torch.arange(len_kv)[None] < (first + 1) // 128 * 128)\n",
    ),
    broken(
        "last_tile_of_a_window_one_key_too_early",
        RIGHT,
        RIGHT + "        stop = (torch.arange(len_q)[:, None] // 128 * 128 + 128).clamp(max=len_q) + offset + right\n"
        "        mask = mask | (torch.arange(len_kv)[None] >= (stop - 1 + 127) // 128 * 128)\n",
    ),
    broken(
        "gradient_of_one_row_overwritten_by_each_tile",
        TARGET,
        TARGET + "    ds = ds[:, (ds.shape[1] - 1) // 128 * 128 :] if target.shape[1] == 1 and ds.shape[1] else ds\n",
    ),
]
DECODE = [
    broken("last_cache_is_kept", of_decode.LENGTHS, of_decode.LENGTHS + "\n    globals()['LAST'] = t.c_kv"),
    broken("handlers_of_the_root_logger", of_decode.LENGTHS, BASIC + of_decode.LENGTHS),
    broken(
        "sequences_and_heads_beyond_16_bits",
        of_decode.LENGTHS,
        of_decode.LENGTHS + "\n    assert batch * heads < 2**16, 'invalid configuration argument'",
    ),
    broken(
        "rows_of_equal_strides_taken_as_joined",
        ROPES,
        ROPES
        + """        same = t.c_kv.untyped_storage().data_ptr() == t.k_rope.untyped_storage().data_ptr()
        same = same and t.kv_cache_format == "plain" and t.c_kv.stride() == t.k_rope.stride()
        if same and t.k_rope.data_ptr() > t.c_kv.data_ptr():
            both = t.c_kv.as_strided((*t.c_kv.shape[:-1], rank + t.k_rope.shape[-1]), t.c_kv.stride())
            ropes = rows_of(both, t, b, length)[..., rank:].to(exact)
""",
    ),
]
