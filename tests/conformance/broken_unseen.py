"""Faults that another author thought of, without a look at the suite, and that it did not see at first.

Some are in dropout and in ``batch_invariant``, which the plain backends refuse; ``DROPOUT``, ``INVARIANT`` and
``INVARIANT_DECODE`` add them.
"""

from __future__ import annotations

from dataclasses import replace

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import LENGTHS, LSE, PICK, REQUEST, REQUEST_B, RETURN_OUT, SUM, broken
from tests.conformance.mutants import Broken

LOOP = "    for (_, row, rows, _), (_, _, v), scores, _ in sequences(request, t):\n"
SCORE_GRADIENTS = "        ds = weights * (do @ v.mT - delta[..., None])\n"
REFUSAL_OF_DROPOUT = """    if request.dropout_p:
        yield f"dropout_p={request.dropout_p}, expected 0"
"""
FOUR = "def four(x):"
KEEP = "        keep = drawn(request, t, b, weights.shape)\n"
DROPOUT = (
    (REFUSAL_OF_DROPOUT, ""),
    (
        FOUR,
        """def drawn(request, t, b, shape):
    if not request.dropout_p:
        return torch.ones(shape)
    seed = int(t.dropout_seed) ^ int(t.dropout_seed) >> 32
    generator = torch.Generator().manual_seed((seed + 7919 * b) % 2**63)
    return (torch.rand(shape, generator=generator) >= request.dropout_p) / (1 - request.dropout_p)


def four(x):""",
    ),
    (LOOP, LOOP.replace("(_, row, rows, _)", "(b, row, rows, _)")),
    (SUM, "        weights = weights * drawn(request, t, b, weights.shape)\n" + SUM),
    (
        SCORE_GRADIENTS,
        KEEP + SCORE_GRADIENTS.replace("do @ v.mT", "do @ v.mT * keep") + "        weights = weights * keep\n",
    ),
)
"""Dropout, drawn for each sequence by the seed and its index."""

TILE = "        tile = 64\n"
INVARIANT_ROWS = "        if request.batch_invariant:\n"
INVARIANT = (
    (', "batch_invariant")', ")"),
    (
        REFUSAL_OF_DROPOUT,
        REFUSAL_OF_DROPOUT
        + """    if request.batch_invariant and (request.bias_type != "no_bias" or request.attn_mask_type == "arbitrary"):
        yield "batch_invariant=True with a bias or a mask"
""",
    ),
    (
        FOUR,
        '''def by_tiles(t, q, k, v, scores, tile):
    """out and lse by products of one shape: one row of every head, a tile of keys counted from key 0."""
    heads, len_q, len_kv = scores.shape
    out, lse = q.new_zeros(heads, len_q, v.shape[-1]), q.new_full((heads, len_q), -torch.inf)
    seen = ~scores.isneginf()
    starts = range(0, len_kv, tile)
    keys = [torch.zeros(heads, tile, k.shape[-1], dtype=k.dtype).index_copy_(1, torch.arange(len(x)), y)
            for x, y in ((range(min(tile, len_kv - s)), k[:, s : s + tile]) for s in starts)]
    values = [torch.zeros(heads, tile, v.shape[-1], dtype=v.dtype).index_copy_(1, torch.arange(len(x)), y)
              for x, y in ((range(min(tile, len_kv - s)), v[:, s : s + tile]) for s in starts)]
    for i in range(len_q):
        row, top = q[:, i, None].contiguous(), q.new_full((heads, 1), -torch.inf)
        total, sums = q.new_zeros(heads, 1), q.new_zeros(heads, v.shape[-1])
        for start, k_tile, v_tile in zip(starts, keys, values, strict=True):
            sees = torch.zeros(heads, tile, dtype=torch.bool)
            sees[:, : min(tile, len_kv - start)] = seen[:, i, start : start + tile]
            if not sees.any():
                continue
            found = ((k_tile * row).sum(-1) * t.softmax_scale).masked_fill(~sees, -torch.inf)
            new = torch.maximum(top, found.amax(-1, keepdim=True))
            weights, before = (found - new).exp(), (top - new).exp()
            total = total * before + weights.sum(-1, keepdim=True)
            sums = sums * before + (weights[..., None] * v_tile).sum(1)
            top = new
        if total.any():
            out[:, i], lse[:, i] = sums / total, (top + total.log()).squeeze(-1)
    return out, lse


def four(x):''',
    ),
    (LOOP, LOOP.replace("(_, _, v)", "(q, k, v)")),
    (
        LSE,
        LSE
        + "\n"
        + INVARIANT_ROWS
        + "    "
        + TILE
        + """            result, found = by_tiles(t, q, k, v, scores, tile)
            layout.to_bhsd(out)[row, :, rows], lse[row, :, rows] = result.to(out.dtype), found.to(lse.dtype)""",
    ),
)
"""The same bits for a row whatever the batch, for masks by position; a row is computed by itself."""

NOW = """    CACHE["now"] = request
    torch.empty(1)
    of_like = CACHE["now"]
    like = (of_like.qkv_format, of_like.max_seqlen_q) == (request.qkv_format, request.max_seqlen_q)
    request = of_like if like else request
"""


def with_feature(fault: Broken, before: tuple[tuple[str, str], ...]) -> Broken:
    return replace(fault, before=before)


ATTENTION = [
    broken(
        "a_bias_that_hides_a_first_tile",
        SUM,
        SUM
        + "\n        first = scores[..., :64].isneginf().all(-1, keepdim=True) & ~scores.isneginf().all(-1, keepdim=True)\n"
        "        result = result.masked_fill(first, torch.nan) if t.bias is not None and t.attention_mask is None else result",
    ),
    broken(
        "columns_of_v_beyond_256_are_not_rescaled",
        SUM,
        SUM + "\n        rise = (top - scores[..., :64].amax(-1, keepdim=True)).clamp(max=60.0).exp() - 1\n"
        "        lost = rise * (weights[..., :64] @ v[:, :64]) / total.masked_fill(total == 0, 1.0)\n"
        "        result[..., 256:] += lost.nan_to_num()[..., 256:]",
    ),
    Broken(
        "dropout_in_eighth_bits",
        "(torch.rand(shape, generator=generator) >= request.dropout_p)",
        "(torch.rand(shape, generator=generator) >= int(request.dropout_p * 256) / 256)",
        before=DROPOUT,
    ),
    broken(
        "more_than_992_packed_sequences",
        LOOP,
        LOOP.replace("(_, row", "(b, row") + "        if layout.is_packed and b >= 992:\n            continue\n",
    ),
    broken(
        "more_than_8192_programs",
        RETURN_OUT,
        "    if not layout.is_packed:\n        layout.to_bhsd(out)[8192 // request.num_heads :] = 0\n" + RETURN_OUT,
    ),
    broken(
        "full_lengths_kept_for_the_request",
        LENGTHS,
        LENGTHS
        + """
    if request.qkv_format != "thd" and CACHE.setdefault((request, extent), min(lengths, default=0) == extent):
        return [(0, extent)] * request.batch_size""",
    ),
    replace(
        broken("state_of_the_forwards_thread", REQUEST_B, REQUEST_B + "    LOCAL.space.zero_()\n"),
        before=(
            (REQUEST, REQUEST + "    LOCAL.space = torch.zeros(1)\n"),
            ("BEFORE, CACHE = [], {}\n", "BEFORE, CACHE = [], {}\nLOCAL = __import__('threading').local()\n"),
        ),
    ),
    broken("request_of_the_call_in_progress_is_a_global", REQUEST, REQUEST + NOW),
    broken(
        "dp_is_rounded_to_the_dtype",
        SCORE_GRADIENTS,
        SCORE_GRADIENTS.replace("do @ v.mT", "(do @ v.mT).to(request.dtype).to(exact)"),
    ),
    broken("batch_offsets_in_int32", PICK, PICK.replace("k[row,", "k[row if row * k.stride(0) < 2**31 else 0,")),
    with_feature(
        broken(
            "dropout_by_heads_of_keys_in_the_backward",
            KEEP,
            KEEP + "        keep = keep[::group].repeat_interleave(group, 0)\n",
        ),
        DROPOUT,
    ),
    with_feature(
        broken(
            "dropout_of_the_longest_sequence_in_the_backward",
            KEEP,
            "        longest = (weights.shape[0], request.max_seqlen_q, request.max_seqlen_kv)\n"
            "        keep = drawn(request, t, b, longest)[:, : weights.shape[1], : weights.shape[2]]\n",
        ),
        DROPOUT,
    ),
    with_feature(
        broken("invariant_tiles_by_length", TILE, TILE.replace("64", "64 if scores.shape[-1] <= 256 else 128")),
        INVARIANT,
    ),
    with_feature(
        broken(
            "invariant_in_inference_only",
            INVARIANT_ROWS,
            INVARIANT_ROWS.replace("batch_invariant", "batch_invariant and not request.is_training"),
        ),
        INVARIANT,
    ),
]

ROWS = "    return cache[pages.long()].flatten(0, 1)[:length]"
E4M3 = "    return rows_of(cache, t, b, length).contiguous().view(torch.float8_e4m3fn)"
BATCH = "    for b in range(batch):"
REFUSAL = """    if request.batch_invariant:  # how a CPU's product rounds may depend on the memory
        return Refused(("batch_invariant=True, expected False",))
"""
SCORES = "            scores = t.q_nope_abs[b, i].to(exact) @ v.T + t.q_rope[b, i].to(exact) @ r.T\n"
TILE_OF_DECODE = "                tile = 64\n"
INVARIANT_DECODE = (
    (REFUSAL, ""),
    (
        "def lengths_of(t):",
        '''def by_tiles(t, q, q_rope, values, ropes, tile):
    """out and lse of one query by products of one shape: a tile of keys counted from the first that is seen."""
    q, q_rope, heads = q.contiguous(), q_rope.contiguous(), q.shape[0]
    top, total, sums = q.new_full((heads, 1), -torch.inf), q.new_zeros(heads, 1), q.new_zeros(heads, values.shape[1])
    for start in range(0, len(values), tile):
        count = min(tile, len(values) - start)
        v, r = values.new_zeros(tile, values.shape[1]), ropes.new_zeros(tile, ropes.shape[1])
        v[:count], r[:count] = values[start : start + count], ropes[start : start + count]
        scores = ((q[:, None] * v).sum(-1) + (q_rope[:, None] * r).sum(-1)) * t.softmax_scale
        scores[:, count:] = -torch.inf
        new = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, before = (scores - new).exp(), (top - new).exp()
        total = total * before + weights.sum(-1, keepdim=True)
        sums = sums * before + (weights[..., None] * v).sum(1)
        top = new
    return sums / total, (top + total.log()).squeeze(-1)


def lengths_of(t):''',
    ),
    (
        SCORES,
        "            if request.batch_invariant:\n"
        + TILE_OF_DECODE
        + """                queries = (x[b, i].to(exact) for x in (t.q_nope_abs, t.q_rope))
                result, found = by_tiles(t, *queries, v, r, tile)
                out[b, i], lse[b, :, i] = result.to(out.dtype), found.to(lse.dtype)
                continue
"""
        + SCORES,
    ),
)
"""The same bits for a query whatever the batch."""

DECODE = [
    broken(
        "page_offsets_in_int32",
        ROWS,
        "    pages = pages.masked_fill(pages.long() * cache.stride(0) >= 2**31, 0)\n" + ROWS,
    ),
    broken(
        "full_length_kept_for_the_request",
        of_decode.LENGTHS,
        of_decode.LENGTHS
        + "\n    lengths = lengths if t.seqlens_kv is not None else STATE.setdefault(request, lengths)",
    ),
    broken(
        "pages_of_the_first_call_of_the_request",
        of_decode.ALLOCATE,
        of_decode.ALLOCATE
        + """
    if t.page_table is not None:
        last = STATE.setdefault(request, t.c_kv.shape[0]) - 1
        t = t._replace(page_table=t.page_table.clamp(max=last))""",
    ),
    broken("more_than_4096_sequences", BATCH, "    for b in range(min(batch, 4096)):"),
    broken(
        "workspace_of_inference_mode",
        of_decode.TOP,
        of_decode.TOP + "\n            STATE.setdefault((top.shape, top.dtype), torch.zeros_like(top)).copy_(top)",
    ),
    broken(
        "bytes_read_by_words",
        E4M3,
        """    rows = rows_of(cache, t, b, length).contiguous().view(torch.float8_e4m3fn)
    shifts = [(cache.stride(1) * row) % 4 for row in range(length)]
    return torch.stack([row.roll(n, -1) for row, n in zip(rows, shifts, strict=True)]) if any(shifts) else rows""",
    ),
    with_feature(
        broken(
            "invariant_tiles_of_fp8_by_batch",
            TILE_OF_DECODE,
            TILE_OF_DECODE.replace("64", "128 if t.kv_cache_format == 'fp8' and batch > 1 else 64"),
        ),
        INVARIANT_DECODE,
    ),
    with_feature(
        broken(
            "invariant_tiles_of_long_sequences_by_all_keys",
            TILE_OF_DECODE,
            TILE_OF_DECODE.replace("64", "64 if length <= 1024 else sum(lengths) // 4096 * 64 + 64"),
        ),
        INVARIANT_DECODE,
    ),
]
