"""What mla_attention accepts, and its values and gradients against float64, eager and under torch.compile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mla_plugin.kernels import mla_attention
from mla_plugin.kernels.prefill import attention
from mla_plugin.kernels.prefill import launch_forward as prefill
from mla_plugin.kernels.prefill.packing import l2_cache_bytes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}  # from [B, S, H, D]
Shape = tuple[int, int, int, int, int, int, int]  # B, S_q, S_kv, H, H_kv, head_dim_qk, head_dim_v
SMALL: Shape = (2, 5, 7, 4, 2, 24, 16)


def draw(shape: Shape, layout: str = "bshd", dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and dout as views of [B, S, H, D] tensors: only for bshd are they contiguous."""
    batch, seqlen_q, seqlen_kv, heads, kv_heads, head_dim_qk, head_dim_v = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (
        (batch, seqlen_q, heads, head_dim_qk),
        (batch, seqlen_kv, kv_heads, head_dim_qk),
        (batch, seqlen_kv, kv_heads, head_dim_v),
        (batch, seqlen_q, heads, head_dim_v),
    )
    return [torch.randn(size, generator=generator).to(DEVICE, dtype).permute(LAYOUTS[layout]) for size in sizes]


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, layout: str, scale: float | None = None
) -> torch.Tensor:
    """The same by its definition, in the dtype of the inputs."""
    q, k, v = (x.permute(torch.tensor(LAYOUTS[layout]).argsort().tolist()).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
        scores = scores.masked_fill(~seen, -torch.inf)
    out = scores.softmax(-1).nan_to_num(0.0) @ v
    return out.transpose(1, 2).permute(LAYOUTS[layout])


def with_gradients(run: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = run(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]


def error(x: torch.Tensor, exact: torch.Tensor) -> float:
    return ((x.double() - exact).norm() / exact.norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [(2, 13, 29, 4, 2, 24, 16), (1, 67, 71, 2, 1, 96, 64), (1, 37, 23, 3, 3, 40, 72)],
    ids=["grouped", "two blocks of columns", "more queries than keys"],
)
def test_as_good_as_pytorch(shape: Shape, dtype: torch.dtype, is_causal: bool, layout: str) -> None:
    tensors = draw(shape, layout, dtype)
    ours = with_gradients(lambda *qkv: mla_attention(*qkv, is_causal=is_causal, qkv_format=layout), tensors)
    same = with_gradients(lambda *qkv: plain(*qkv, is_causal, layout), tensors)
    exact = with_gradients(lambda *qkv: plain(*qkv, is_causal, layout), [x.double() for x in tensors])
    rounding = torch.finfo(dtype).eps
    for x, y, z in zip(ours, same, exact, strict=True):
        assert x.dtype == dtype
        assert x.shape == z.shape
        assert error(x, z) <= 2 * error(y, z) + rounding


def test_a_single_key_is_given_back() -> None:
    tensors = draw((1, 1, 1, 1, 1, 8, 8))
    out, dq, dk, dv = with_gradients(mla_attention, tensors)
    assert torch.equal(out, tensors[2])
    assert torch.equal(dv, tensors[3])
    for gradient in (dq, dk):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0.0, atol=1e-5)


def test_the_scale_is_the_callers() -> None:
    q, k, v, _ = draw(SMALL)
    out = mla_attention(q, k, v, softmax_scale=0.7)
    torch.testing.assert_close(out, plain(q, k, v, False, "bshd", 0.7))
    assert not torch.allclose(out, mla_attention(q, k, v))


def test_queries_that_see_no_key_give_zero_and_no_gradient() -> None:
    out, dq, dk, dv = with_gradients(lambda *qkv: mla_attention(*qkv, is_causal=True), draw((1, 5, 2, 2, 2, 24, 16)))
    assert not out[:, :3].any()
    assert not dq[:, :3].any()
    assert out[:, 3:].any()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 3), (3, 0), (0, 0)])
def test_without_queries_or_keys(seqlen_q: int, seqlen_kv: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = draw((1, seqlen_q, seqlen_kv, 2, 2, 24, 16))
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **o: new_empty(*a, **o).fill_(1))
    out, *gradients = with_gradients(mla_attention, tensors)
    assert out.shape == (1, seqlen_q, 2, 16)
    assert not out.any()
    assert not any(x.any() for x in gradients)


@pytest.mark.parametrize(
    ("batch_heads", "group", "kv_bytes", "expected"),
    [
        *((16, 1, 1 << 20, 8), (16, 1, 3 << 20, 8), (16, 1, 4 << 20, 4), (16, 1, 8 << 20, 1), (16, 1, 25 << 20, 1)),
        *((64, 16, 24 << 20, 8), (16, 4, 10 << 20, 8), (12, 1, 1, 4), (9, 9, 1, 1)),
    ],
)
def test_as_many_heads_go_together_as_the_cache_holds(
    batch_heads: int, group: int, kv_bytes: int, expected: int
) -> None:
    assert prefill.heads_together(batch_heads, group, kv_bytes, l2_bytes=50 << 20) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_many_heads_go_together_changes_no_bit(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = draw((2, 150, 150, 4, 2, 24, 16), layout)
    found, asked = [], []
    for together in (1, 4, 8):
        for cache in (prefill._forward_launch, attention._kept):
            cache.cache_clear()
        monkeypatch.setattr(prefill, "heads_together", lambda *a, together=together: asked.append(a) or together)
        found.append(mla_attention(q, k, v, is_causal=True, qkv_format=layout))
    for cache in (prefill._forward_launch, attention._kept):
        cache.cache_clear()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    kv_bytes = 150 * (24 + 16) * 4
    assert asked == [(2 * 4, 2, kv_bytes, l2_cache_bytes(q.device))] * 3


def test_what_decides_about_a_kept_launch() -> None:
    """Each argument that a launch depends on, changed alone after a call that was kept, gives the right result."""
    q, k, v, _ = draw((2, 40, 40, 4, 2, 24, 16))
    calls: list[tuple[tuple[torch.Tensor, ...], dict]] = [((q, k, v), {})]
    calls += [((q, k, v), {"is_causal": True}), ((q, k, v), {"softmax_scale": 0.5})]
    calls += [((q[:, :39], k, v), {}), ((q, k[:, :39], v[:, :39]), {}), ((q, k, v[..., :8]), {})]
    calls += [((q.half(), k.half(), v.half()), {}), ((q[..., :8], k[..., :8], v), {}), ((q[:1], k[:1], v[:1]), {})]
    calls += [((q, k[:, :, :1], v[:, :, :1]), {})]
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    calls += [((*(strided[i] if i == n else x for i, x in enumerate((q, k, v))),), {}) for n in range(3)]
    calls += [((k, k, k[..., :16]), {}), ((k, k, torch.randn_like(k)[..., :16]), {})]
    distinct = len(calls) - 1  # but for the address of v
    calls += [((torch.cat([q.flatten()[:3], q.flatten()])[3:].view(q.shape), k, v), {})]  # not aligned
    attention._kept.cache_clear()
    found = [mla_attention(*given, **options) for given, options in calls * 2]
    assert attention._kept.cache_info().currsize == distinct
    for (given, options), out, again in zip(calls, found[: len(calls)], found[len(calls) :], strict=True):
        attention._kept.cache_clear()
        prefill._forward_launch.cache_clear()
        assert torch.equal(out, mla_attention(*given, **options))
        assert torch.equal(out, again)


def test_an_empty_query_needs_no_memory() -> None:
    """Under vmap a tensor has no address."""
    q, k, v = torch.randn(3, 2, 0, 4, 16), torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4, 8)
    assert torch.vmap(mla_attention)(q, k, v).shape == (3, 2, 0, 4, 8)


def test_the_format_decides_about_a_kept_launch() -> None:
    """Square shapes, so that only the name of the layout tells them apart."""
    q, k, v = (torch.randn(4, 4, 4, 16, device=DEVICE) for _ in range(3))
    found = [mla_attention(q, k, v, qkv_format=layout) for layout in [*LAYOUTS] * 2]
    for layout, out in zip([*LAYOUTS] * 2, found, strict=True):
        attention._kept.cache_clear()
        assert torch.equal(out, mla_attention(q, k, v, qkv_format=layout))
    assert not torch.equal(found[0], found[1])


def test_two_backwards_agree_bit_for_bit() -> None:
    tensors = draw((1, 67, 71, 4, 2, 24, 16), dtype=torch.float16)
    first, second = (with_gradients(lambda *qkv: mla_attention(*qkv, is_causal=True), tensors) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_equals_eager(layout: str) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return mla_attention(q * 2, k, v, is_causal=True, qkv_format=layout) * 3

    tensors = draw(SMALL, layout)
    compiled = with_gradients(torch.compile(run, fullgraph=True), tensors)
    for x, y in zip(compiled, with_gradients(run, tensors), strict=True):
        torch.testing.assert_close(x, y)


def test_compiled_with_dynamic_lengths_compiles_once() -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(mla_attention, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 6, 9):
        q, k, v, _ = draw((1, length, length, 2, 2, 24, 16))
        torch.testing.assert_close(compiled(q, k, v), mla_attention(q, k, v))
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operators_follow_their_schemas(layout: str) -> None:
    q, k, v, dout = draw(SMALL, layout)
    operators = torch.ops.mla_plugin_kernels
    given = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(operators.prefill_forward.default, (*given, 0.2, True, layout))
    out, lse = (x.detach() for x in operators.prefill_forward(q, k, v, 0.2, True, layout))
    inputs = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(operators.prefill_backward.default, (*inputs, out, lse, dout, 0.2, True, layout))


@pytest.mark.parametrize("needed", ["q", "k", "v"])
def test_one_input_that_needs_a_gradient_is_enough(needed: str) -> None:
    tensors = dict(zip("qkv", draw(SMALL), strict=False))
    tensors[needed].requires_grad_()
    (gradient,) = torch.autograd.grad(mla_attention(**tensors).sum(), tensors[needed])
    assert gradient.shape == tensors[needed].shape
    with torch.no_grad():
        assert not mla_attention(**tensors).requires_grad


def test_a_dout_without_a_contiguous_last_dimension_is_taken() -> None:
    *qkv, dout = draw(SMALL)
    strided = dout.mT.contiguous().mT
    assert strided.stride(-1) != 1
    for x, y in zip(
        with_gradients(mla_attention, [*qkv, strided]), with_gradients(mla_attention, [*qkv, dout]), strict=True
    ):
        assert torch.equal(x, y)


Change = Callable[[dict[str, object]], object]


def change(name: str, function: Callable[[torch.Tensor], object]) -> Change:
    return lambda given: given.update({name: function(given[name])})  # type: ignore[arg-type]


def layout_change(q: int, kv: int) -> Change:
    """Drop ``q`` of the query heads and ``kv`` of the key-value heads."""

    def apply(given: dict[str, torch.Tensor]) -> None:
        given["q"] = given["q"][:, :, : given["q"].shape[2] - q]
        for name in "kv":
            given[name] = given[name][:, :, : given[name].shape[2] - kv]

    return apply  # type: ignore[return-value]


WRONG: dict[str, tuple[Change, type[Exception], str]] = {
    "packed": (lambda given: given.update(qkv_format="thd"), ValueError, "qkv_format='thd'.*mla_plugin.attention"),
    "layout": (
        lambda given: given.update(qkv_format="bsh"),
        ValueError,
        "qkv_format='bsh'; expected one of bshd, sbhd, bhsd",
    ),
    "dimensions": (change("q", lambda x: x[0]), ValueError, "3, 4, 4 dimensions; bshd has 4"),
    "dtype": (change("q", torch.Tensor.double), TypeError, "torch.float64, torch.float32.*bfloat16, float16, float32"),
    "dtypes": (change("v", torch.Tensor.half), TypeError, "torch.float32, torch.float32, torch.float16"),
    "devices": (change("k", lambda x: x.to("meta")), ValueError, f"{DEVICE}.*, meta, {DEVICE}.*one device"),
    "head_dim_qk": (change("k", lambda x: x[..., :16]), ValueError, r"\(2, 7, 2, 16\).*q and k share head_dim_qk"),
    "keys and values": (change("v", lambda x: x[:, :6]), ValueError, r"\(2, 6, 2, 16\).*k and v all but the last"),
    "odd head_dim_v": (change("v", lambda x: x[..., :15]), ValueError, "head_dim_v=15; both must be multiples of 8"),
    "batch": (change("q", lambda x: x[:1]), ValueError, "batch 1 and 2"),
    "heads": (layout_change(1, 0), ValueError, "3 query heads over 2 key-value heads.*multiple"),
    "no heads": (layout_change(0, 2), ValueError, "4 query heads over 0 key-value heads"),
    "scale 0": (
        lambda given: given.update(softmax_scale=0.0),
        ValueError,
        "softmax_scale=0.0; expected a positive, finite",
    ),
    "scale nan": (lambda given: given.update(softmax_scale=float("nan")), ValueError, "softmax_scale=nan"),
    "strides": (change("v", lambda x: x.mT.contiguous().mT), ValueError, r"strides 1, 1, 2;.*\.contiguous\(\)"),
}


@pytest.mark.parametrize(("apply", "kind", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(apply: Change, kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = dict(zip("qkv", draw(SMALL), strict=False))
    mla_attention(**given)
    monkeypatch.setattr(prefill, "forward", lambda *_: pytest.fail("launched"))
    apply(given)
    with pytest.raises(kind, match=message):
        mla_attention(**given)


def test_the_cpu_is_an_error_outside_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_INTERPRETED", False)
    q, k, v, _ = (x.cpu() for x in draw(SMALL))
    with pytest.raises(ValueError, match="q, k, v are on cpu; the kernels need a CUDA device"):
        mla_attention(q, k, v)


@pytest.mark.parametrize("layout", ["sbhd", "bhsd"])
def test_wrong_batches_and_heads_in_other_layouts(layout: str) -> None:
    q, k, v, _ = draw(SMALL, layout)
    batch, heads = (1, 2) if layout == "sbhd" else (0, 1)
    with pytest.raises(ValueError, match="batch 1 and 2"):
        mla_attention(q.narrow(batch, 0, 1), k, v, qkv_format=layout)
    with pytest.raises(ValueError, match="3 query heads over 2"):
        mla_attention(q.narrow(heads, 0, 3), k, v, qkv_format=layout)


def test_outside_of_autograd_neither_its_function_nor_the_operator_costs_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = draw(SMALL)
    monkeypatch.setattr(attention, "_operator", lambda *_: pytest.fail("dispatched"))
    monkeypatch.setattr(attention._Eager, "apply", lambda *_: pytest.fail("recorded"))
    mla_attention(q, k, v)
