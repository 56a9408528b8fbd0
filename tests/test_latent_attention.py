"""Latent attention against float64: layouts, masks, groups of heads, what is kept, what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from mla_plugin import attention, latent_attention
from mla_plugin.arguments.latent import LatentSizes, LatentTensors
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.operations.attention import compute as attention_compute
from mla_plugin.operations.latent import expansion, plain, rows
from mla_plugin.operations.latent import operator as ops
from tests.latent_calls import LatentCall, draw, expected

DENSE = ("bshd", "sbhd", "bhsd")


@pytest.fixture(autouse=True)
def _memory_starts_as_nan() -> Iterator[None]:
    """With deterministic algorithms on, PyTorch fills uninitialised memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[2, 5])
def heads_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many heads are expanded together, of 5."""
    limit_heads(monkeypatch, request.param)
    return int(request.param)


def limit_heads(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    one = lambda sizes, tokens, dtype: max(1, tokens * sizes.numbers_per_head * dtype.itemsize)  # noqa: E731
    whole = expansion.groups_of_heads

    def limited(sizes: LatentSizes, tokens: int, dtype: torch.dtype) -> Any:
        monkeypatch.setattr(expansion, "MAX_EXPANDED_BYTES", most * one(sizes, tokens, dtype))
        return whole(sizes, tokens, dtype)

    monkeypatch.setattr("mla_plugin.operations.latent.compute.groups_of_heads", limited)


def offsets(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def check(call: LatentCall, *, tolerance: float = 1e-13, with_lse: bool = False) -> None:
    """out, lse and gradients against float64; the arguments are left as they were."""
    before = {name: x.detach().clone() for name, x in call.tensors.items()}
    out, lse = latent_attention(**call.inputs(), **call.arguments, return_lse=True)
    dout = torch.randn(*out.shape[:-1], 2 * out.shape[-1], dtype=out.dtype)[..., ::2]
    dlse = torch.randn_like(lse).masked_fill(lse.isneginf(), 0) if with_lse else None
    outputs = [out, lse] if with_lse else [out]
    found = torch.autograd.grad(outputs, list(call.tensors.values()), [dout, dlse] if with_lse else [dout])
    found = {"out": out, "lse": lse, **dict(zip(call.tensors, found, strict=True))}
    for name, wanted in expected(call, dout, dlse).items():
        got = found[name].detach()
        assert got.dtype == (torch.promote_types(out.dtype, torch.float32) if name == "lse" else out.dtype)
        assert got.shape == wanted.shape, name
        finite = ~wanted.isneginf()
        assert torch.equal(got.isneginf(), ~finite), name
        error = (got.double() - wanted)[finite].norm() / wanted[finite].norm().clamp(min=1e-30)
        assert error <= tolerance, f"{name}: relative error {error:.1e}"
    for name, x in call.tensors.items():
        assert torch.equal(x.detach().nan_to_num(), before[name].nan_to_num()), name


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize(
    ("mask", "lengths", "more"),
    [
        ("causal", (9, 9), {}),
        ("no_mask", (4, 7), {"softmax_scale": 0.3}),
        ("causal_bottom_right", (3, 11), {}),
        ("causal", (9, 9), {"window_size": (3, 0)}),
        ("no_mask", (6, 8), {"window_size": (2, 1)}),
    ],
)
def test_dense_layouts(layout: str, mask: str, lengths: tuple[int, int], more: Any, heads_at_once: int) -> None:
    check(draw(layout, lengths=lengths, attn_mask_type=mask, **more), with_lse=True)


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_padding_of_dense_layouts_has_no_influence(layout: str, mask: str, heads_at_once: int) -> None:
    call = draw(
        layout,
        batch=3,
        lengths=(6, 8),
        attn_mask_type=mask,
        cu_seqlens_q=offsets(4, 0, 6),
        cu_seqlens_kv=offsets(5, 0, 8),
    )
    for name, lengths in (("q", (4, 0, 6)), ("c_kv", (5, 0, 8)), ("k_rope", (5, 0, 8))):
        rows = call.tensors[name].detach()
        rows = {"sbhd": rows.transpose(0, 1), "bhsd": rows.transpose(1, 2) if name == "q" else rows}.get(layout, rows)
        for sequence, length in enumerate(lengths):
            rows[sequence, length:] = 1e30 if name == "q" else torch.nan
    plain_call = LatentCall(
        {name: x.detach().nan_to_num(0).clone().requires_grad_() for name, x in call.tensors.items()}, call.arguments
    )
    results = []
    for given in (call, plain_call):
        out = latent_attention(**given.inputs(), **given.arguments)
        results.append((out, *torch.autograd.grad(out, list(given.tensors.values()), torch.ones_like(out))))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    plain_call.tensors["q"].detach().clamp_(max=10)
    check(plain_call, with_lse=True)


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "causal"])
def test_packed_sequences(mask: str, heads_at_once: int) -> None:
    cu = offsets(4, 1, 0, 7)
    check(draw("thd", lengths=(12, 12), attn_mask_type=mask, cu_seqlens_q=cu, max_seqlen_q=7, max_seqlen_kv=7))


def test_packed_sequences_of_two_lengths(heads_at_once: int) -> None:
    cu_q, cu_kv = offsets(4, 1, 0, 3), offsets(6, 2, 5, 3)
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv, "max_seqlen_q": 4, "max_seqlen_kv": 6}
    check(draw("thd", lengths=(8, 17), attn_mask_type="padding_causal_bottom_right", **given), with_lse=True)


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_packed_padding_may_hold_nan(mask: str, heads_at_once: int) -> None:
    """Rows before the first, between and after the sequences."""
    padded = torch.tensor([1, 5, 8, 8, 16], dtype=torch.int32)
    call = draw(
        "thd",
        lengths=(18, 18),
        attn_mask_type=mask,
        cu_seqlens_q=offsets(4, 1, 0, 7),
        cu_seqlens_q_padded=padded,
        max_seqlen_q=7,
        max_seqlen_kv=7,
    )
    padding = torch.ones(18, dtype=torch.bool)
    for start, length in zip(padded.tolist(), (4, 1, 0, 7), strict=False):
        padding[start : start + length] = False
    for name in ("q", "c_kv", "k_rope"):
        call.tensors[name].detach()[padding] = torch.nan
    out, lse = latent_attention(**call.inputs(), **call.arguments, return_lse=True)
    dout = torch.randn_like(out)
    gradients = dict(zip(call.tensors, torch.autograd.grad(out, list(call.tensors.values()), dout), strict=True))
    assert (lse[:, padding] == -torch.inf).all()
    for x in (out, gradients["q"], gradients["c_kv"], gradients["k_rope"]):
        assert (x[padding] == 0).all()
    clean = LatentCall(
        {name: x.detach().nan_to_num(0).clone().requires_grad_() for name, x in call.tensors.items()}, call.arguments
    )
    wanted = expected(clean, dout)
    for name, x in {"out": out, **gradients}.items():
        torch.testing.assert_close(x, wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_narrow_dtypes(layout: str, dtype: torch.dtype, tolerance: float, heads_at_once: int) -> None:
    more = {"cu_seqlens_q": offsets(20, 13)} if layout == "thd" else {}
    check(draw(layout, lengths=(33, 33), dtype=dtype, dims=(32, 16, 24, 48), **more), tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_products_of_gradients_are_not_rounded(dtype: torch.dtype) -> None:
    a, b = torch.randn(7, 33, dtype=dtype).t(), torch.randn(7, 12, dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    found = expansion.exact_product(a, b)
    assert found.dtype == wide
    torch.testing.assert_close(found, a.to(wide) @ b.to(wide))


def test_the_sum_over_heads_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head at a time: a sum in bfloat16 would be off by 1e-2."""
    limit_heads(monkeypatch, 1)
    call = draw(heads=64, batch=1, lengths=(8, 8), dtype=torch.bfloat16)
    many = torch.autograd.grad(latent_attention(**call.inputs()).sum(), call.tensors["c_kv"])[0]
    monkeypatch.undo()
    call_32 = LatentCall({name: x.detach().float().requires_grad_() for name, x in call.tensors.items()})
    out = latent_attention(**call_32.inputs())
    wanted = torch.autograd.grad(out, call_32.tensors["c_kv"], torch.ones_like(out))[0]
    assert (many.float() - wanted).norm() / wanted.norm() < 4e-3


def test_no_rope() -> None:
    check(draw(dims=(16, 0, 12, 20)))


@pytest.mark.parametrize("wanted", [["q"], ["c_kv"], ["k_rope"], ["weight"], ["q", "weight"], ["c_kv", "k_rope"]])
@pytest.mark.parametrize("way", ["eager", "operator"])
def test_only_some_inputs_need_gradients(wanted: list[str], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = draw()
    with_all = latent_attention(**call.inputs())
    dout = torch.randn_like(with_all)
    all_gradients = dict(
        zip(call.tensors, torch.autograd.grad(with_all, list(call.tensors.values()), dout), strict=True)
    )
    some = {name: x.detach().requires_grad_(name in wanted) for name, x in call.tensors.items()}
    if way == "operator":
        monkeypatch.setattr("mla_plugin.operations.latent.operator.is_observed", lambda *_: True)
    products: list[Any] = []
    exact_product = expansion.exact_product
    monkeypatch.setattr(expansion, "exact_product", lambda a, b: products.append(a) or exact_product(a, b))
    out = latent_attention(**LatentCall(some).inputs())
    out.backward(dout)
    for name, x in some.items():
        if name in wanted:
            torch.testing.assert_close(x.grad, all_gradients[name], rtol=0, atol=0)
        else:
            assert x.grad is None
    latents, weights = bool({"c_kv", "k_rope"} & set(wanted)), "weight" in wanted
    assert len(products) == 2 * latents + 2 * weights  # a frozen weight costs nothing


def test_inference_keeps_nothing_and_is_equal() -> None:
    call = draw()
    out = latent_attention(**call.inputs())
    with torch.no_grad():
        again = latent_attention(**call.inputs())
    assert not again.requires_grad
    assert torch.equal(out, again)


@pytest.mark.parametrize("way", ["eager", "operator"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_kept_for_the_backward(layout: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 1.1 times q + c_kv + k_rope + out + lse, views of the weights aside."""
    if way == "operator":
        monkeypatch.setattr("mla_plugin.operations.latent.operator.is_observed", lambda *_: True)
    limit_heads(monkeypatch, 2)
    more = {"cu_seqlens_q": offsets(40, 24)} if layout == "thd" else {}
    call = draw(layout, lengths=(64, 64), dtype=torch.bfloat16, dims=(128, 64, 128, 512), **more)
    inputs, saved = call.inputs(), 0
    weight = call.tensors["weight"].untyped_storage().data_ptr()

    def pack(x: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += 0 if x.untyped_storage().data_ptr() == weight else x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out, lse = latent_attention(**inputs, **call.arguments, return_lse=True)
    counted = (inputs["q"], inputs["c_kv"], inputs["k_rope"], out, lse)
    least = sum(x.numel() * x.element_size() for x in counted)
    assert least <= saved <= 1.1 * least
    out.sum().backward()


def test_groups_of_heads() -> None:
    sizes = LatentSizes(LAYOUTS["bshd"], 128, 128, 64, 128, 512)
    groups = list(expansion.groups_of_heads(sizes, 2**17, torch.bfloat16))
    assert [(g.first, g.count) for g in groups] == [(16 * i, 16) for i in range(8)]
    for heads, tokens in ((7, 2**18), (128, 100), (5, 2**24), (3, 0)):
        groups = list(expansion.groups_of_heads(sizes._replace(num_heads=heads), tokens, torch.bfloat16))
        assert [g.first for g in groups] == [sum(h.count for h in groups[:i]) for i in range(len(groups))]
        assert sum(g.count for g in groups) == heads
        counts = {g.count for g in groups}
        assert max(counts) - min(counts) <= 1
        assert max(counts) == 1 or max(counts) * tokens * 320 * 2 <= expansion.MAX_EXPANDED_BYTES


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_equals_eager(layout: str) -> None:
    torch.use_deterministic_algorithms(False)  # it would be another graph
    more = {"cu_seqlens_q": offsets(4, 5)} if layout == "thd" else {}

    def layer(q: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = call.inputs(q=q * 2, c_kv=c_kv, k_rope=k_rope, weight=weight)
        out, lse = latent_attention(**given, **call.arguments, return_lse=True)
        return out.sin().sum() + lse.cos().sum()

    call = draw(layout, dtype=torch.float32, **more)
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        loss = function(*call.tensors.values())
        results.append((loss, *torch.autograd.grad(loss, list(call.tensors.values()))))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_compiled_with_dynamic_lengths_compiles_once() -> None:
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(latent_attention, fullgraph=True, dynamic=True, backend=counter)
    for length in (7, 10, 11):
        inputs = {name: x.detach() for name, x in draw(lengths=(length, length)).inputs().items()}
        torch.testing.assert_close(compiled(**inputs), latent_attention(**inputs))
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_opcheck(layout: str) -> None:
    torch.use_deterministic_algorithms(False)
    more = {"cu_seqlens_q": offsets(4, 5)} if layout == "thd" else {}
    call = draw(layout, **more)
    seen: list[tuple[Any, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mla_plugin.operations.latent.operator.is_observed", lambda *_: True)
        arguments_of = ops.arguments_of
        patch.setattr(ops, "arguments_of", lambda call: seen.append(arguments_of(call)) or seen[-1])
        out, lse = latent_attention(**call.inputs(), **call.arguments, return_lse=True)
    arguments = seen[0]
    torch.library.opcheck(ops.latent_attention.forward_operator, arguments)
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    for wants in ((True, True), (False, True), (True, False)):
        saved = [detached[0], out.detach(), lse.detach()]
        given = (torch.ones_like(out), torch.ones_like(lse), saved, *wants)
        torch.library.opcheck(ops.latent_attention.backward_operator, (*given, *detached))


def test_meta_tensors_give_shapes() -> None:
    call = draw()
    inputs = {name: x.detach().to("meta") for name, x in call.inputs().items()}
    out, lse = latent_attention(**inputs, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 9, 5, 12), (2, 5, 9))


def test_autocast_casts_to_its_dtype_and_gradients_come_back() -> None:
    call = draw(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = latent_attention(**call.inputs())
        out.float().sum().backward()  # inside: products of the backward keep their dtypes
    assert out.dtype == torch.bfloat16
    assert all(x.grad.dtype == torch.float32 for x in call.tensors.values())
    narrow = LatentCall({name: x.detach().bfloat16() for name, x in call.tensors.items()})
    torch.testing.assert_close(out, latent_attention(**narrow.inputs()), rtol=0, atol=0)
    wide = draw()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert latent_attention(**wide.inputs()).dtype == torch.float64


def test_autocast_around_the_backward_changes_nothing() -> None:
    gradients = []
    inputs = {name: x.detach().requires_grad_() for name, x in draw(dtype=torch.bfloat16).inputs().items()}
    for enabled in (False, True):
        out = latent_attention(**inputs)
        with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
            gradients.append(torch.autograd.grad(out, list(inputs.values()), torch.ones_like(out)))
    for plain_gradient, under_autocast in zip(*gradients, strict=True):
        assert torch.equal(plain_gradient, under_autocast)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    call = draw()
    results = []
    for recompute in (False, True):
        function = lambda *x: latent_attention(**call.inputs(**dict(zip(call.tensors, x, strict=True))))  # noqa: E731
        given = list(call.tensors.values())
        out = checkpoint(function, *given, use_reentrant=reentrant) if recompute else function(*given)
        for x in given:
            x.grad = None
        out.square().sum().backward()
        results.append([out, *(x.grad.clone() for x in given)])
    for plain_result, recomputed in zip(*results, strict=True):
        assert torch.equal(plain_result, recomputed)


@pytest.mark.parametrize("way", ["eager", "operator"])
def test_a_backward_keeps_to_its_forwards_decision(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "operator":
        monkeypatch.setattr("mla_plugin.operations.latent.operator.is_observed", lambda *_: True)
    limit_heads(monkeypatch, 2)
    call = draw()
    out = latent_attention(**call.inputs())
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(RuntimeError, match="NVTE_UNFUSED_ATTN=0"):
        latent_attention(**call.inputs())
    limit_heads(monkeypatch, 5)  # a group of another size was never decided
    out.sum().backward()


def test_every_group_asks_for_its_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    forward = attention_compute.forward

    def watched(known: Any, tensors: Any) -> Any:
        request = known.request
        seen.append((request.num_heads, request.num_kv_heads, request.is_training, request.host, known.backend))
        assert tensors.kept is known.kept
        return forward(known, tensors)

    monkeypatch.setattr(attention_compute, "forward", watched)
    limit_heads(monkeypatch, 2)
    latent_attention(**draw().inputs(), backend="sdpa", host="transformers")
    assert [row[0] for row in seen] == [1, 2, 2]
    assert all(row[1:] == (row[0], True, "transformers", "sdpa") for row in seen)


@pytest.mark.parametrize(("s_q", "s_kv"), [(0, 7), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(s_q: int, s_kv: int) -> None:
    call = draw(lengths=(s_q, s_kv))
    out, lse = latent_attention(**call.inputs(), return_lse=True)
    assert out.shape == (2, s_q, 5, 12)
    assert not out.any()
    assert (lse == -torch.inf).all()
    out.sum().backward()
    assert all(not x.grad.any() and x.grad.shape == x.shape for x in call.tensors.values())


def test_derivatives_that_there_are_not() -> None:
    call = draw()
    out = latent_attention(**call.inputs())
    (gradient,) = torch.autograd.grad(out.sum(), call.tensors["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()
    inputs = {name: x.detach() for name, x in call.inputs().items()}
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs["c_kv"], torch.ones_like(inputs["c_kv"]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            latent_attention(**inputs | {"c_kv": dual})
    with pytest.raises(NotImplementedError, match=r"torch\.func.*torch\.autograd\.grad"):
        torch.func.grad(lambda q: latent_attention(**inputs | {"q": q}).sum())(inputs["q"])


def test_padding_is_found_without_reading_a_value() -> None:
    """A fake tensor has no values: reading one is an error there, as it is a wait on a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    call = draw("thd", lengths=(12, 12), cu_seqlens_q=offsets(4, 1, 7))
    inputs = {name: x.detach() for name, x in call.inputs().items()}
    with FakeTensorMode() as mode:
        inputs = {name: mode.from_tensor(x) for name, x in inputs.items()}
        cu = mode.from_tensor(call.arguments["cu_seqlens_q"])
        tensors = LatentTensors(**inputs, softmax_scale=1.0, cu_seqlens_q=cu, cu_seqlens_kv=cu)
        assert rows.clear_padding(rows.join(tensors), tensors, LatentSizes.of(tensors, "thd")).shape == (12, 28)


B, S, H, NOPE, ROPE, V, R = 2, 9, 5, 16, 8, 12, 20
SHAPES = {
    "q": (B, S, H, NOPE + ROPE),
    "c_kv": (B, S, R),
    "k_rope": (B, S, ROPE),
    "w_uk": (H, NOPE, R),
    "w_uv": (H, V, R),
}
W_UK = "expected [H, qk_nope_head_dim, R] = (5, 16, 20)"
W_UV = "expected [H, head_dim_v, R] = (5, head_dim_v, 20)"


@pytest.mark.parametrize("way", ["eager", "operator"])
@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"w_uk": (H, R, NOPE)}, ValueError, "w_uk has shape (5, 20, 16); " + W_UK + ": it looks transposed"),
        ({"w_uv": (H, R, V)}, ValueError, "w_uv has shape (5, 20, 12); " + W_UV + ": it looks transposed"),
        ({"w_uk": (H * NOPE, R)}, ValueError, "w_uk has shape (80, 20); " + W_UK + ": kv_b_proj.weight.unflatten"),
        ({"w_uv": (4, V, R)}, ValueError, "w_uv has shape (4, 12, 20)"),
        ({"w_uk": (H, NOPE, R + 1)}, ValueError, "w_uk has shape (5, 16, 21)"),
        ({"q": (B, S, H, NOPE + ROPE + 1)}, ValueError, "(5, 16, 20); expected [H, qk_nope_head_dim, R] = (5, 17, 20)"),
        ({"q": (B, S, H, ROPE)}, ValueError, "q has 5 heads of width 8, k_rope 8 and c_kv 20 columns"),
        ({"q": (B, S, H * (NOPE + ROPE))}, ValueError, "q has shape (2, 9, 120); bshd is [B, S, H, D], 4 dimensions"),
        ({"q": (B + 1, S, H, NOPE + ROPE)}, ValueError, "batch size: q has 3 and c_kv 2"),
        ({"k_rope": (B, S, 1, ROPE)}, ValueError, "bshd needs [B, S, qk_rope_head_dim]; it has no head axis"),
        ({"c_kv": (B, S + 1, R)}, ValueError, "c_kv has shape (2, 10, 20) and k_rope (2, 9, 8); [B, S] must be equal"),
        ({"qkv_format": "bsdh"}, ValueError, "qkv_format='bsdh'; expected one of bshd, sbhd, bhsd, thd"),
        ({"attn_mask_type": "arbitrary"}, ValueError, "latent_attention takes no attention_mask"),
        ({"attn_mask_type": "cusal"}, ValueError, "attn_mask_type='cusal'; expected one of no_mask, causal"),
        ({"attn_mask_type": "padding"}, ValueError, "needs cu_seqlens_q"),
        ({"cu_seqlens_q": offsets(9, 9)}, ValueError, "lengths need a padding mask"),
        ({"softmax_scale": -1.0}, ValueError, "softmax_scale=-1.0; expected a positive, finite number"),
        ({"window_size": (1, 2, 3)}, ValueError, "window_size=(1, 2, 3)"),
    ],
)  # fmt: skip
def test_errors(way: str, changes: Any, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {
        "q": (B, S, H, NOPE + ROPE),
        "c_kv": (B, S, R),
        "k_rope": (B, S, ROPE),
        "w_uk": (H, NOPE, R),
        "w_uv": (H, V, R),
    }
    shapes |= {name: shape for name, shape in changes.items() if name in shapes}
    given = {name: value for name, value in changes.items() if name not in shapes}
    monkeypatch.setattr(plain, "_rows", lambda *_: pytest.fail("something was computed"))
    if way == "operator":
        monkeypatch.setattr("mla_plugin.operations.latent.operator.is_observed", lambda *_: True)
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    with pytest.raises(error, match=re.escape(words)):
        latent_attention(**tensors, **given)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("c_kv", torch.zeros(B, S, R).half(), "dtypes are q torch.float32, c_kv torch.float16"),
        ("q", torch.zeros(B, S, H, NOPE + ROPE).int(), "dtypes are q torch.int32"),
        ("w_uv", torch.zeros(H, V, R).double(), "w_uv torch.float64; expected one dtype of"),
        ("k_rope", None, "k_rope is NoneType; expected a torch.Tensor"),
        ("w_uk", [1.0], "w_uk is list; expected a torch.Tensor"),
        ("backend", 3, "backend=3 is int"),
        ("softmax_scale", torch.tensor(1.0), "softmax_scale is a torch.Tensor"),
        ("deterministic", 1, "deterministic=1; expected True or False"),
    ],
)
def test_wrong_types(name: str, value: Any, words: str) -> None:
    given: dict[str, Any] = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    with pytest.raises(TypeError, match=re.escape(words)):
        latent_attention(**given | {name: value})


def test_tensors_on_two_devices() -> None:
    inputs = {name: x.detach() for name, x in draw().inputs().items()}
    with pytest.raises(ValueError, match="devices are q cpu, c_kv meta"):
        latent_attention(**inputs | {"c_kv": inputs["c_kv"].to("meta")})


def test_lengths_that_do_not_fit_the_tensors() -> None:
    call = draw("thd", lengths=(12, 12), cu_seqlens_q=offsets(4, 9))
    with pytest.raises(ValueError, match="ends at 13; the tensor holds 12 tokens"):
        latent_attention(**call.inputs(), **call.arguments)


def test_one_group_is_the_plain_call_bit_for_bit() -> None:
    """K and V by one product each; attention on them is the library's own."""
    call = draw(dtype=torch.float32)
    inputs = {name: x.detach() for name, x in call.inputs().items()}
    x = torch.cat([inputs["c_kv"], inputs["k_rope"]], -1).flatten(0, 1)
    w_aug = torch.zeros(H, NOPE + ROPE, R + ROPE)
    w_aug[:, :NOPE, :R] = inputs["w_uk"]
    w_aug[:, NOPE:, R:] = torch.eye(ROPE)
    k = (x @ w_aug.flatten(0, 1).t()).view(B, S, H, NOPE + ROPE)
    v = (x[:, :R] @ inputs["w_uv"].reshape(-1, R).t()).view(B, S, H, V)
    assert torch.equal(latent_attention(**inputs), attention(inputs["q"].contiguous(), k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_on_a_gpu_without_waiting_for_it(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.use_deterministic_algorithms(False)
    limit_heads(monkeypatch, 2)
    more = {"cu_seqlens_q": offsets(300, 0, 212).cuda(), "max_seqlen_q": 300, "max_seqlen_kv": 300}
    call = draw(
        layout, lengths=(512, 512), dtype=torch.bfloat16, dims=(128, 64, 128, 512), **more if layout == "thd" else {}
    )
    call.tensors = {name: x.detach().cuda().requires_grad_() for name, x in call.tensors.items()}
    latent_attention(**call.inputs(), **call.arguments).sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = latent_attention(**call.inputs(), **call.arguments)
        dout = torch.empty_like(out).normal_()
        gradients = torch.autograd.grad(out, list(call.tensors.values()), dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = expected(call, dout)
    for name, got in {"out": out, **dict(zip(call.tensors, gradients, strict=True))}.items():
        error = (got.double() - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-2, f"{name}: {error:.1e}"
