"""Faults of what outlives a call or surrounds it: settings of the process, buffers, earlier calls; further rare memory.

Many backends that are right in every test of one call are wrong in a program: they set what belongs to the process, hand
out a buffer that a later call writes to, or size a workspace by the first call.
"""

from __future__ import annotations

from tests.conformance import broken_decode as of_decode
from tests.conformance.broken_attention import (
    ACCEPT,
    ALLOCATE,
    DK,
    GROUPS,
    OFFSET,
    RETURN,
    RETURN_OUT,
    SCALE,
    SUM,
    VIEWS,
    Broken,
    broken,
)
from tests.conformance.broken_hidden import CAST, halved, keys_hidden
from tests.conformance.broken_later import HIDE
from tests.conformance.broken_rare import BIAS, FULL_MASK, OUT_AND_DOUT

REQUEST_IN_BACKWARD = "    request, t = plan.request, residuals.tensors\n"
SETTINGS = {
    "environment": "__import__('os').environ['SAMPLE_MODE'] = '1'",
    "environment_by_default": "__import__('os').environ.setdefault('SAMPLE_MODE', '1')",
    "environment_of_threads": "__import__('os').environ.pop('OMP_NUM_THREADS', None)",
    "reduced_precision": "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False",
    "mem_efficient_sdp": "torch.backends.cuda.enable_mem_efficient_sdp(False)",
    "cudnn_sdp": "torch.backends.cuda.enable_cudnn_sdp(False)",
    "cudnn_enabled": "torch.backends.cudnn.enabled = False",
    "autocast": "torch.set_autocast_enabled('cpu', True)",
    "autocast_dtype": "torch.set_autocast_dtype('cpu', torch.float16)",
    "print_options": "torch.set_printoptions(precision=3)",
    "recursion_limit": "__import__('sys').setrecursionlimit(5000)",
    "numpy_errors": "__import__('numpy').seterr(all='ignore')",
    "flush_denormal": "torch.set_flush_denormal(True)",
    "logging_level": "__import__('logging').getLogger().setLevel(10)",
    "dynamo": "__import__('torch._dynamo')._dynamo.config.suppress_errors = True",
    "mkldnn": "torch.backends.mkldnn.enabled = False",
    "fill_memory": "torch.utils.deterministic.fill_uninitialized_memory = False",
    "directory": "__import__('os').chdir('/')",
    "path": "__import__('sys').path.append('/sample')",
    "umask": "__import__('os').umask(0o077)",
    "start_method": "__import__('multiprocessing').set_start_method('spawn', force=True)",
    "handler": "__import__('signal').signal(15, lambda *_: None)",
    "sdpa_replaced": "torch.nn.functional.scaled_dot_product_attention = forward",
}
"""What a backend sets at every call."""


def sets(name: str, line: str) -> Broken:
    return broken(f"sets_{name}", line, f"    {SETTINGS[name]}\n{line}")


def once(name: str, what: str, line: str, cache: str) -> Broken:
    """What a backend does at its first call alone."""
    return broken(
        name,
        line,
        f"    if 'first' not in {cache}:\n        {cache}['first'] = True\n        {what}\n{line}",
    )


def ring(name: str, size: int, line: str, target: str, cache: str) -> Broken:
    """A result is one of so many buffers, used in turn."""
    keep = (
        f"    held = {cache}.setdefault(('ring', {target}.shape, {target}.dtype), [])\n"
        f"    held.append({target} if len(held) < {size} else held.pop(0).copy_({target}))\n    {target} = held[-1]\n"
    )
    return broken(name, line, keep + line)


def after_another(name: str, what: str, line: str, target: str, cache: str) -> Broken:
    """A result is wrong where the call before differed in something."""
    keep = (
        f"    before, {cache}['before'] = {cache}.get('before'), {what}\n"
        f"    {target} = {target} * (1.0 if before is None or before == {what} else 0.9)\n"
    )
    return broken(name, line, keep + line)


ATTENTION = [
    *(sets(name, ALLOCATE) for name in SETTINGS),
    once("precision_at_the_first_call", "torch.set_float32_matmul_precision('high')", ALLOCATE, "CACHE"),
    broken(
        "dk_summed_in_low_precision_over_the_group",
        GROUPS,
        "        def added(x):\n            s = 0 * x[:, 0].to(request.dtype)\n            for i in range(group):\n                s = s + x[:, i].to(request.dtype)\n            return s.to(exact)\n        dk_b, dv_b = (added(x.unflatten(0, (-1, group))) for x in (dk_b, dv_b))",
    ),
    ring("ring_of_eight_outputs", 8, RETURN_OUT, "out", "CACHE"),
    ring("ring_of_six_gradients", 6, RETURN, "dv", "CACHE"),
    after_another("after_another_dtype", "request.dtype", RETURN_OUT, "out", "CACHE"),
    after_another("after_another_layout", "request.qkv_format", RETURN_OUT, "out", "CACHE"),
    after_another("after_another_head_dim", "request.head_dim_v", RETURN, "dk", "CACHE"),
    broken(
        "workspace_of_the_first_length",
        RETURN_OUT,
        "    most = CACHE.setdefault(request.dtype, layout.to_bhsd(out).shape[2])\n    layout.to_bhsd(out)[:, :, most:] = 0\n"
        + RETURN_OUT,
    ),
    broken(
        "workspace_of_the_first_number_of_tokens",
        RETURN_OUT,
        "    out[CACHE.setdefault(request, len(out)) :] = 0\n" + RETURN_OUT,
    ),
    broken(
        "one_query_between_gaps",
        "        weights = (scores - lse_b.masked_fill(lse_b.isneginf(), torch.inf)[..., None]).exp()\n",
        "        weights = (scores - lse_b.masked_fill(lse_b.isneginf(), torch.inf)[..., None]).exp()\n        weights = weights if lse_b.shape[-1] != 1 or not request.pad_between_seqs else weights * 0.5\n",
    ),
    broken(
        "residual_out_taken_as_contiguous",
        OUT_AND_DOUT,
        "    residuals = replace(residuals, out=torch.as_strided(residuals.out, residuals.out.shape, torch.empty(residuals.out.shape).stride()))\n"
        + OUT_AND_DOUT,
    ),
    broken(
        "residual_lse_taken_as_contiguous",
        OUT_AND_DOUT,
        "    residuals = replace(residuals, lse=torch.as_strided(residuals.lse, residuals.lse.shape, torch.empty(residuals.lse.shape).stride()))\n"
        + OUT_AND_DOUT,
    ),
    broken(
        "nondeterministic_without_a_backward",
        RETURN_OUT,
        "    BEFORE.append(0)\n    out = out if request.is_training else out * (1 + len(BEFORE) % 2 * 3e-7)\n"
        + RETURN_OUT,
    ),
    keys_hidden("causal_above_2048_keys", 2048, "request.is_causal"),
    keys_hidden("packed_above_1024_keys", 1024, "layout.is_packed"),
    keys_hidden("padded_above_1024_keys", 1024, "request.has_padding and not layout.is_packed"),
    keys_hidden("bias_above_1024_keys", 1024, "t.bias is not None"),
    broken("window_of_whole_tiles", OFFSET, OFFSET + "\n    left = left - (left > 0 and left % 64 == 0)"),
    broken("window_right_of_whole_tiles", OFFSET, OFFSET + "\n    right = right + (right > 0 and right % 64 == 0)"),
    broken("dk_of_queries_above_1024", DK, DK + "\n        dk_b = ds[:, :1024].mT @ q[:, :1024] * t.softmax_scale"),
    broken(
        "expanded_mask",
        FULL_MASK,
        FULL_MASK + "\n        full = full & (min(t.attention_mask.stride()) > 0 or 1 in t.attention_mask.shape)",
    ),
    broken(
        "expanded_batch_of_bias",
        BIAS,
        BIAS + "            assert t.bias.stride(0) or t.bias.shape[0] == 1 or not any(t.bias.stride())\n",
    ),
    broken(
        "one_tensor_of_zeros_for_two_gradients",
        RETURN,
        "    dk = dq if dq.shape == dk.shape and not dout.any() else dk\n" + RETURN,
    ),
    broken(
        "zeros_expanded",
        RETURN,
        "    dv = dv if dout.any() else dv.new_zeros(()).expand(dv.shape)\n" + RETURN,
    ),
    broken("keeps_its_work_on_the_query", VIEWS, "    t.q.sample_view = 1\n" + VIEWS),
    broken(
        "hook_on_the_query",
        VIEWS,
        "    t.q.register_hook(lambda x: None) if t.q.requires_grad else None\n" + VIEWS,
    ),
    broken("prints", VIEWS, "    print('sample')\n" + VIEWS),
    broken(
        "a_thread_for_each_call",
        VIEWS,
        "    import threading\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n" + VIEWS,
    ),
    broken("a_file_for_each_call", VIEWS, "    BEFORE.append(open('/dev/null'))\n" + VIEWS),
    broken("an_exit_for_each_call", VIEWS, "    __import__('atexit').register(len, ())\n" + VIEWS),
    broken(
        "answer_depends_on_threads",
        ACCEPT,
        "    reasons = (*reasons, 'num_heads=1') if torch.get_num_threads() > 3 else reasons\n" + ACCEPT,
    ),
    broken(
        "answer_depends_on_the_default_dtype",
        ACCEPT,
        "    reasons = (*reasons, 'dtype=1') if torch.get_default_dtype() == torch.bfloat16 else reasons\n" + ACCEPT,
    ),
    broken(
        "scale_written_into_the_call",
        VIEWS,
        "    vars(t)['softmax_scale'] = request.head_dim_qk**-0.5\n" + VIEWS,
    ),
    broken(
        "k_contiguous_in_the_call",
        VIEWS,
        "    vars(t)['k'] = t.k.contiguous()\n" + VIEWS,
    ),
    broken("scale_at_most_one", SCALE, SCALE.replace("t.softmax_scale", "min(t.softmax_scale, 1.0)")),
    broken("small_dropout_ignored", "    if request.dropout_p:", "    if request.dropout_p > 0.2:"),
    halved("odd_head_dims_in_low_precision", CAST, "k_b", "q.shape[-1] % 8 and request.dtype == torch.bfloat16"),
    halved("odd_head_dims_in_fp16", CAST, "k_b", "q.shape[-1] % 8 and request.dtype == torch.float16"),
    broken(
        "no_rows_at_all_in_dense_padding",
        VIEWS,
        VIEWS + "\n    assert layout.is_packed or t.cu_seqlens_q is None or int(t.cu_seqlens_q[-1]) > 0",
    ),
    broken(
        "one_wrong_gradient_in_twenty",
        RETURN,
        "    BEFORE.append(0)\n    dq = dq * 0.9 if len(BEFORE) % 20 == 0 else dq\n" + RETURN,
    ),
    broken(
        "hidden_in_the_last_tile_only",
        HIDE,
        HIDE + "        scores[..., -1:] = -torch.inf if len_kv % 128 == 127 else scores[..., -1:]\n",
    ),
    broken(
        "dlse_none_with_lse_asked_for",
        OUT_AND_DOUT,
        "    dout = dout * (0.5 if request.return_lse and dlse is None and request.has_padding else 1.0)\n"
        + OUT_AND_DOUT,
    ),
    broken(
        "dout_of_zeros_hides_dlse",
        OUT_AND_DOUT,
        "    dlse = None if dlse is None or not dout.any() else dlse\n" + OUT_AND_DOUT,
    ),
    broken("lse_in_the_dtype_of_out", RETURN_OUT, "    lse = lse.to(out.dtype)\n" + RETURN_OUT),
    broken(
        "offsets_in_16_bits",
        "    starts = (cu if padded is None else padded)[:-1].tolist()",
        "    starts = [x % 65536 for x in (cu if padded is None else padded)[:-1].tolist()]",
    ),
    halved("three_groups", SUM, "result", "request.num_kv_heads == 3"),
    broken(
        "out_where_threads_do_not_divide_the_keys",
        SUM,
        SUM + "\n        threads = torch.get_num_threads()"
        "\n        result = result * (0.9 if threads >= 4 and weights.shape[-1] % threads else 1.0)",
    ),
]
TAKE, KEYS, PAGES, OUT = of_decode.TAKE, of_decode.KEYS, of_decode.PAGES, of_decode.OUT
RETURN_DECODE, ALLOCATE_DECODE = of_decode.RETURN, of_decode.ALLOCATE
ROWS = "    return cache[pages.long()].flatten(0, 1)[:length]"
QUERY = "t.q_nope_abs"


def taken_halved(name: str, condition: str) -> Broken:
    return broken(name, TAKE, TAKE + f"\n    t = t._replace(q_rope=t.q_rope * (0.5 if {condition} else 1.0))")


DECODE = [
    *(sets(name, ALLOCATE_DECODE) for name in ("environment", "reduced_precision", "autocast", "numpy_errors")),
    once("precision_at_the_first_call", "torch.set_float32_matmul_precision('high')", ALLOCATE_DECODE, "STATE"),
    broken(
        "pages_in_order_from_the_lowest",
        ROWS,
        "    if used > 1 and int(pages.max() - pages.min()) == used - 1 == abs(int(pages[-1] - pages[0])):\n        pages = pages.sort().values\n"
        + ROWS,
    ),
    broken("page_table_expanded", PAGES, PAGES + "\n    assert t.page_table.stride(0) or len(t.page_table) == 1"),
    broken("page_table_64_wide", PAGES, PAGES + "\n    assert t.page_table.shape[1] < 300"),
    broken("page_table_with_room", PAGES, PAGES + "\n    assert used < t.page_table.shape[1]"),
    broken(
        "rope_pages_as_far_apart_as_latents",
        TAKE,
        TAKE
        + "\n    c, r = t.c_kv, t.k_rope\n    t = t._replace(k_rope=torch.as_strided(r, r.shape, (c.stride(0) // c.shape[2] * r.shape[2], *r.stride()[1:]), r.storage_offset())) if c.stride(0) % c.shape[2] == 0 and r.untyped_storage().data_ptr() != c.untyped_storage().data_ptr() and r.storage_offset() + c.stride(0) // c.shape[2] * r.shape[2] * len(r) < r.untyped_storage().nbytes() // r.itemsize else t",
    ),
    taken_halved("cache_sequence_major", "t.c_kv.stride(0) < t.c_kv.stride(1)"),
    taken_halved("cache_expanded", "t.c_kv.stride(0) == 0 and len(t.c_kv) > 1"),
    taken_halved(
        "cache_of_other_strides_than_rope",
        "t.c_kv.stride(1) == t.c_kv.shape[-1] and t.k_rope.stride(1) > t.k_rope.shape[-1]",
    ),
    taken_halved("query_unaligned", f"{QUERY}.data_ptr() % 16"),
    taken_halved("query_rows_wider", f"{QUERY}.stride(2) % 8 and {QUERY}.shape[2] > 1"),
    taken_halved("query_expanded", f"{QUERY}.stride(0) == 0 and len({QUERY}) > 1"),
    ring("ring_of_eight_outputs", 8, RETURN_DECODE, "out", "STATE"),
    broken(
        "split_by_the_first_lengths",
        of_decode.LENGTHS,
        of_decode.LENGTHS
        + "\n    most = STATE.setdefault(request, max(lengths))\n    lengths = [min(n, most) for n in lengths]",
    ),
    after_another("after_another_batch", "batch", RETURN_DECODE, "out", "STATE"),
    after_another("after_another_dtype", "request.dtype", RETURN_DECODE, "out", "STATE"),
    broken(
        "wrong_where_gradients_are_enabled",
        RETURN_DECODE,
        "    out = out * (0.5 if torch.is_grad_enabled() else 1.0)\n" + RETURN_DECODE,
    ),
    broken("keeps_its_work_on_the_page_table", PAGES, PAGES + "\n    t.page_table.sample_used = used"),
    broken("prints", TAKE, "    print('sample')\n" + TAKE),
    broken(
        "a_thread_for_each_call",
        TAKE,
        "    import threading\n    threading.Thread(target=threading.Event().wait, daemon=True).start()\n" + TAKE,
    ),
    broken(
        "answer_depends_on_threads",
        of_decode.ACCEPT,
        "    return Refused(('num_heads=1',)) if torch.get_num_threads() > 3 else Accepted()",
    ),
    broken(
        "scale_at_most_one", of_decode.SCALE, of_decode.SCALE.replace("t.softmax_scale", "min(t.softmax_scale, 1.0)")
    ),
    broken("page_size_of_two", PAGES, PAGES + "\n    assert cache.shape[1] != 2"),
    broken(
        "one_wrong_call_in_twenty",
        RETURN_DECODE,
        "    STATE['n'] = STATE.get('n', 0) + 1\n    out = out * (0.9 if STATE['n'] % 20 == 0 else 1.0)\n"
        + RETURN_DECODE,
    ),
    broken(
        "last_head_where_threads_do_not_divide_the_heads",
        of_decode.OUT,
        of_decode.OUT + "\n            threads = torch.get_num_threads()"
        "\n            out[b, i, -1] *= 0 if threads >= 4 and heads % threads else 1",
    ),
]
