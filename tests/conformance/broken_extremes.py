"""Faults that hid until the suite had ten thousands of keys, hundreds of heads and sequences, and scores of every size."""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import ALLOCATE, DK, REPEAT, SUM, TOP, VIEWS, Broken, broken
from tests.conformance.broken_later import SCORES

DISTANCE = "    distance = torch.arange(len_kv)[None] - torch.arange(len_q)[:, None] - offset\n"
FOLDED = "        folds = __import__('math').frexp(t.softmax_scale)[0] == 0.5 and t.bias is None\n"
LATENTS = "        values = rows_of(t.c_kv, t, b, length).to(exact)"
ROPES = "        ropes = rows_of(t.k_rope, t, b, length).to(exact)"
WEIGHTS = "            weights = weights.to(WEIGHTS or t.q_nope_abs.dtype).to(exact)"
EXP = "        weights = (scores - top).exp()\n"
EXP_OF_DECODE = "            weights = (scores - top).exp()"


def folded(name: str, q: str, k: str) -> Broken:
    """A scale that is a power of two is multiplied to one side in its own dtype."""
    product = f"({q}).to(request.dtype).to(exact) @ ({k}).to(request.dtype).to(exact).mT"
    return broken(
        name,
        SCORES,
        FOLDED
        + f"        exact = q_b.dtype\n        scores = ({product}) / t.softmax_scale if folds else q_b @ k_b.mT\n",
    )


ATTENTION = [
    broken(
        "accumulator_in_the_dtype_from_key_512_on",
        SUM,
        "        result = 0.0\n"
        "        for first in range(0, weights.shape[-1], 128):\n"
        "            some = slice(first, first + 128)\n"
        "            result = result + rounded(weights[..., some], request) @ v[:, some]\n"
        "            result = result.to(request.dtype).to(exact) if first >= 512 else result\n"
        "        result = result / total.masked_fill(total == 0, 1.0)",
    ),
    broken(
        "rows_of_the_lowest_scores_are_empty",
        "        total = weights.sum(-1, keepdim=True)\n",
        "        total = weights.sum(-1, keepdim=True).masked_fill(top < -5e8, 0.0)\n",
    ),
    broken(
        "nan_keeps_a_tile_from_being_rescaled",
        EXP,
        EXP + "        if top.isnan().any():\n            weights[..., :128] *= 2.0\n",
    ),
    broken(
        "an_empty_batch_raises",
        ALLOCATE,
        ALLOCATE + "\n    max([0] * request.batch_size)",
    ),
    broken(
        "default_dtype_changed_for_a_while",
        SUM,
        "        before = torch.get_default_dtype()\n"
        "        torch.set_default_dtype(torch.float64)\n" + SUM + "\n        torch.set_default_dtype(before)",
    ),
    broken(
        "k_and_v_by_their_addresses",
        VIEWS,
        VIEWS + "\n    k, v = (v, k) if k.shape == v.shape and k.data_ptr() > v.data_ptr() else (k, v)",
    ),
    broken("distance_in_int16", DISTANCE, DISTANCE + "    distance = (distance + 2**15) % 2**16 - 2**15\n"),
    broken(
        "key_heads_in_uint8",
        REPEAT,
        REPEAT + "\n        k_b, v_b = (x[torch.arange(len(x)) % 256] for x in (k_b, v_b))",
    ),
    broken(
        "sequences_in_uint8",
        "        row = 0 if layout.is_packed else b\n",
        "        row = 0 if layout.is_packed else b % 256\n",
    ),
    folded("scale_folded_into_q", "q_b * t.softmax_scale", "k_b"),
    folded("scale_folded_into_k", "q_b", "k_b * t.softmax_scale"),
    broken(
        "one_maximum_for_16_rows",
        TOP,
        TOP + "        top = torch.cat([x.amax(1, keepdim=True).expand_as(x) for x in top.split(16, 1)], 1)\n",
    ),
    broken(
        "weights_below_exp_-12_are_left_out",
        EXP,
        EXP + "        weights = weights.masked_fill(weights < 6e-6, 0.0)\n",
    ),
    broken(
        "tiles_of_dk_in_any_order",
        DK,
        "        tiles = [slice(i, i + 128) for i in range(0, len(q[0]), 128)]\n"
        "        __import__('random').SystemRandom().shuffle(tiles)\n"
        "        dk_b = sum([ds[:, x].mT @ q[:, x] for x in tiles], torch.zeros_like(k)) * t.softmax_scale",
    ),
    broken(
        "fp16_score_gradients_times_the_scale",
        DK,
        "        exact = ds.dtype\n"
        "        scaled = (ds * t.softmax_scale).to(request.dtype).to(exact) if request.dtype == torch.float16 else None\n"
        "        dk_b = (ds * t.softmax_scale if scaled is None else scaled).mT @ q",
    ),
    broken(
        "dbias_summed_in_the_dtype",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor\n",
        "    target[:, : ds.shape[1], : ds.shape[2]] += ds * factor\n    target.copy_(target.to(request.dtype))\n",
    ),
    broken(
        "dbias_of_minus_infinity",
        "            add_bias_gradient(dbias, ds, request, t, b)\n",
        "            add_bias_gradient(dbias, ds, request, t, b)\n"
        "            dbias = dbias.masked_fill(t.bias.isneginf(), torch.nan)\n",
    ),
]

DECODE = [
    broken(
        "weights_are_truncated",
        WEIGHTS,
        WEIGHTS + "\n            if exact == torch.float32 and t.q_nope_abs.dtype == torch.bfloat16:\n"
        "                weights = ((scores - top).exp().view(torch.int32) & -(2**16)).view(torch.float32)",
    ),
    broken(
        "rope_by_the_strides_of_equally_wide_latents",
        ROPES,
        "        k_rope = t.k_rope\n"
        "        if k_rope.shape == t.c_kv.shape and t.kv_cache_format == 'plain':\n"
        "            most = sum((n - 1) * s for n, s in zip(k_rope.shape, t.c_kv.stride(), strict=True))\n"
        "            room = k_rope.untyped_storage().nbytes() // k_rope.element_size() - k_rope.storage_offset()\n"
        "            k_rope = k_rope.as_strided(k_rope.shape, t.c_kv.stride()) if most < room else k_rope\n"
        + ROPES.replace("t.k_rope", "k_rope"),
    ),
    broken("keys_in_uint16", of_decode.LENGTHS, of_decode.LENGTHS + "\n    lengths = [n % 2**16 for n in lengths]"),
    broken(
        "heads_in_uint8",
        of_decode.RETURN,
        "    out[:, :, 256:] = out[:, :, : max(0, heads - 256)]\n" + of_decode.RETURN,
    ),
    broken("sequences_in_uint8", LATENTS, LATENTS.replace("t, b, length", "t, b % 256, length")),
    broken(
        "weights_below_exp_-12_are_left_out",
        EXP_OF_DECODE,
        EXP_OF_DECODE + "\n            weights = weights.masked_fill(weights < 6e-6, 0.0)",
    ),
    broken(
        "scale_folded_into_the_queries",
        of_decode.SCALE,
        "            if __import__('math').frexp(t.softmax_scale)[0] == 0.5:\n"
        "                few = [(x[b, i] * t.softmax_scale).to(exact) for x in (t.q_nope_abs, t.q_rope)]\n"
        "                scores = (few[0] @ v.T + few[1] @ r.T) / t.softmax_scale\n" + of_decode.SCALE,
    ),
    broken(
        "one_maximum_for_all_heads",
        of_decode.TOP,
        of_decode.TOP + "\n            top = top.amax(0, keepdim=True).expand_as(top)",
    ),
    broken(
        "fp16_products_saturate",
        of_decode.SCALE,
        "            scores = scores.clamp(-65504, 65504) if t.q_nope_abs.dtype == torch.float16 else scores\n"
        + of_decode.SCALE,
    ),
]
