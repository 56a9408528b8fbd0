"""Calls under transforms, traces and tensors without memory: right through their operators, or a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mla_plugin
from mla_plugin import cache
from mla_plugin.kernels import mla_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Q_NOPE_ABS, Q_ROPE = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 4, 8)
C_KV, K_ROPE = torch.randn(2, 9, 16), torch.randn(2, 9, 8)


def decode(q_nope_abs: torch.Tensor = Q_NOPE_ABS, c_kv: torch.Tensor = C_KV) -> torch.Tensor:
    return mla_plugin.decode(q_nope_abs, Q_ROPE, (c_kv, K_ROPE), softmax_scale=0.2)


Q, K, V = torch.randn(2, 5, 4, 24), torch.randn(2, 5, 4, 24), torch.randn(2, 5, 4, 16)
LATENTS = (torch.randn(2, 5, 8), torch.randn(2, 5, 8), torch.randn(4, 16, 8), torch.randn(4, 16, 8))
PAGES, TABLE = torch.randn(5, 4, 24), torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
LENGTHS = torch.tensor([3, 5], dtype=torch.int32)


def latent(q: torch.Tensor = Q, w_uk: torch.Tensor = LATENTS[2]) -> torch.Tensor:
    return mla_plugin.latent_attention(q, *LATENTS[:2], w_uk, LATENTS[3])


def gather(pages: torch.Tensor = PAGES, lengths: torch.Tensor = LENGTHS) -> tuple[torch.Tensor, torch.Tensor]:
    return cache.gather(pages, TABLE, lengths, kv_lora_rank=16)


def appended(pages: torch.Tensor, c_kv: torch.Tensor) -> torch.Tensor:
    cache.append(pages, c_kv, torch.ones(2, 8), torch.tensor([5, 0]))
    return pages


def in_tuple(results: Any) -> tuple[torch.Tensor, ...]:
    return (results,) if isinstance(results, torch.Tensor) else tuple(results)


MAPPED: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "attention": (lambda q: mla_plugin.attention(q, K, V, return_lse=True), Q),
    "latent_attention": (latent, Q),
    "latent_attention, weights": (lambda w_uk: latent(w_uk=w_uk), LATENTS[2]),
    "decode": (lambda c_kv: decode(c_kv=c_kv), C_KV),
    "slot_mapping": (lambda lengths: cache.slot_mapping(TABLE, lengths, 4, 2), LENGTHS),
    "gather": (gather, PAGES),
    "gather, lengths": (lambda lengths: gather(lengths=lengths), LENGTHS),
}


@pytest.mark.parametrize("name", MAPPED)
def test_vmap_is_a_loop(name: str) -> None:
    function, x = MAPPED[name]
    each = [x, x + 1, x - 1]
    found, expected = torch.vmap(function)(torch.stack(each)), [function(x) for x in each]
    for result, parts in zip(in_tuple(found), zip(*map(in_tuple, expected), strict=True), strict=True):
        torch.testing.assert_close(result, torch.stack(parts))


@pytest.mark.parametrize("name", ["attention", "latent_attention", "decode", "gather"])
def test_vmap_within_vmap(name: str) -> None:
    function, x = MAPPED[name]
    mapped = torch.stack([torch.stack([x, 2 * x]), torch.stack([-x, x]), torch.stack([x, 3 * x])])
    found = in_tuple(torch.vmap(torch.vmap(function), in_dims=1)(mapped))
    torch.testing.assert_close([result[1, 2] for result in found], list(in_tuple(function(3 * x))))


def test_the_kernels_own_function_under_vmap() -> None:
    q, k = torch.randn(2, 1, 4, 2, 16).to(DEVICE).requires_grad_(), torch.randn(1, 4, 2, 16, device=DEVICE)
    out = torch.vmap(lambda q: mla_attention(q, k, k, is_causal=True))(q)
    alone = mla_attention(q[0], k, k, is_causal=True)
    torch.testing.assert_close(out[0], alone)
    several = torch.randn(2, *alone.shape, device=DEVICE)
    (found,) = torch.autograd.grad(alone, q, several, is_grads_batched=True, retain_graph=True)
    (expected,) = torch.autograd.grad(alone, q, several[1])
    torch.testing.assert_close(found[1], expected)


def test_a_transformed_derivative_of_the_kernels_own_function_is_a_clear_error() -> None:
    q = torch.randn(1, 4, 2, 16, device=DEVICE)

    def run(q: torch.Tensor) -> torch.Tensor:
        return mla_attention(q, q, q)

    with pytest.raises(NotImplementedError, match=r"mla_attention does not support torch\.func's grad"):
        torch.func.grad(lambda q: run(q).sum())(q)
    for function, given in ((run, q), (torch.vmap(run), q[None])):
        with pytest.raises(NotImplementedError, match="mla_attention has no forward-mode derivative"):
            torch.func.jvp(function, (given,), (given,))


def test_vmap_of_append_writes_to_each_cache() -> None:
    pages, rows = torch.stack([PAGES, -PAGES]), torch.randn(2, 2, 16)
    expected = torch.stack([appended(each.clone(), row) for each, row in zip(pages, rows, strict=True)])
    torch.testing.assert_close(torch.vmap(appended)(pages.clone(), rows), expected)
    with pytest.raises(NotImplementedError, match=r"append_to_cache.* writes to c_kv, which all calls share; map over"):
        torch.vmap(lambda row: appended(pages[0], row))(rows)


def test_vmap_over_nothing_is_a_clear_error() -> None:
    with pytest.raises(ValueError, match=r"attention_forward.* under vmap over a dimension of size 0; expected at"):
        torch.vmap(lambda q: mla_plugin.attention(q, K, V))(torch.zeros(0, *Q.shape))


@pytest.mark.parametrize("function", [lambda q: mla_plugin.attention(q, K, V), latent])
def test_the_gradient_of_a_vmap(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    mapped, looped = (torch.stack([Q, 2 * Q]).requires_grad_() for _ in range(2))
    torch.vmap(function)(mapped).square().sum().backward()
    torch.stack([function(q) for q in looped]).square().sum().backward()
    torch.testing.assert_close(mapped.grad, looped.grad)


def test_several_gradients_of_one_forward_at_once() -> None:
    q = Q.clone().requires_grad_()
    out = mla_plugin.attention(q, K, V)
    several = torch.randn(3, *out.shape)
    (found,) = torch.autograd.grad(out, q, several, is_grads_batched=True, retain_graph=True)
    expected = [torch.autograd.grad(out, q, dout, retain_graph=True)[0] for dout in several]
    torch.testing.assert_close(found, torch.stack(expected))
    of_latents = latent(q)
    with pytest.raises(NotImplementedError, match="does not support is_grads_batched=True nor vectorize=True; call"):
        torch.autograd.grad(of_latents, q, several, is_grads_batched=True)


@pytest.mark.parametrize("argument", ["q_nope_abs", "c_kv"])
def test_a_transformed_derivative_is_a_clear_error(argument: str) -> None:
    x = {"q_nope_abs": Q_NOPE_ABS, "c_kv": C_KV}[argument]
    with pytest.raises(NotImplementedError, match="decode has no derivative"):
        torch.func.grad(lambda x: decode(**{argument: x}).sum())(x)
    with pytest.raises(NotImplementedError, match="decode has no derivative"):
        torch.func.jvp(lambda x: decode(**{argument: x}), (x,), (x,))


@pytest.mark.parametrize("name", ["decode", "gather"])
def test_a_derivative_is_not_dropped_silently(name: str) -> None:
    """Of forward mode, and of a transform with vmap inside."""
    function, x = MAPPED[name]
    words = "decode has no derivative" if name == "decode" else "gather has no derivative"

    def total(x: torch.Tensor) -> torch.Tensor:
        return in_tuple(torch.vmap(function)(x))[0].sum()

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=words):
            function(dual)
        function(x)
    mapped = torch.stack([x, x])
    for derivative in (torch.func.grad(total), lambda x: torch.func.jvp(total, (x,), (x,))):
        with pytest.raises(NotImplementedError, match=words):
            derivative(mapped)


def test_append_drops_no_derivative_silently() -> None:
    rows = torch.randn(2, 16)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="append writes in place"):
        appended(PAGES.clone(), torch.autograd.forward_ad.make_dual(rows, rows))


def test_decode_can_be_functionalised() -> None:
    torch.testing.assert_close(torch.func.functionalize(decode)(Q_NOPE_ABS), decode())


def test_a_graph_of_real_tensors_holds_the_operators() -> None:
    """Their kernels write to memory that it knows nothing of."""
    arguments = (Q_NOPE_ABS, LENGTHS, PAGES.clone(), torch.randn(2, 16))

    def step(q: torch.Tensor, lengths: torch.Tensor, pages: torch.Tensor, row: torch.Tensor) -> Any:
        rows = cache.slot_mapping(TABLE, lengths, 4)
        out = mla_plugin.decode(q, Q_ROPE, PAGES, softmax_scale=0.2, page_table=TABLE, seqlens_kv=lengths)
        return rows, out, appended(pages, row), *gather(pages, lengths)

    graph = make_fx(step)(*arguments)
    for name in ("decode", "append_to_cache", "gather_cache"):
        assert f"mla_plugin.{name}" in graph.code
    others = (2 * Q_NOPE_ABS, LENGTHS - 2, -PAGES, torch.randn(2, 16))
    torch.testing.assert_close(graph(*others), step(*others))


@pytest.mark.filterwarnings("ignore")
def test_a_trace_holds_the_operator() -> None:
    traced = torch.jit.trace(decode, (Q_NOPE_ABS,), check_trace=False)
    assert "mla_plugin::decode" in str(traced.graph)


def test_meta_tensors_give_shapes() -> None:
    meta = [x.to("meta") for x in (Q_NOPE_ABS, Q_ROPE, C_KV, K_ROPE)]
    out, lse = mla_plugin.decode(*meta[:2], (meta[2], meta[3]), softmax_scale=0.2, return_lse=True)
    assert (out.shape, out.device.type, lse.shape) == ((2, 1, 4, 16), "meta", (2, 4, 1))


@pytest.mark.parametrize("kv_format", ["plain", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_cache_without_memory(kind: str, kv_format: str) -> None:
    """As a model is run to find out its shapes."""
    rank, rope, width = {"plain": (16, 8, 24), "fp8": (16, 8, 24), "fp8_ds_mla": (512, 64, 656)}[kv_format]
    pages = torch.zeros(5, 4, width, dtype=torch.float32 if kv_format == "plain" else torch.uint8)
    rows, scale = torch.randn(2, 1, rank + rope), torch.ones(())
    mode = FakeTensorMode()
    with mode if kind == "fake" else torch.device("meta"):
        pages, table, lengths, rows, scale = (
            mode.from_tensor(x) if kind == "fake" else x.to("meta") for x in (pages, TABLE, LENGTHS, rows, scale)
        )
        more = {"kv_cache_format": kv_format} | ({"kv_scale": scale} if kv_format == "fp8" else {})
        slots = cache.slot_mapping(table, lengths, 4)
        cache.append(pages, rows[..., :rank], rows[..., rank:], slots, **more)
        c_kv, k_rope = cache.gather(pages, table, lengths, kv_lora_rank=rank, **more)
        with pytest.raises(ValueError, match=r"k_rope has shape \[2, 1, 3\]"):
            cache.append(pages, rows[..., :rank], rows[..., :3], slots, **more)
    dtype = torch.float32 if kv_format == "plain" else torch.bfloat16
    assert (slots.shape, slots.dtype) == ((2, 1), torch.int64)
    assert (c_kv.shape, k_rope.shape, c_kv.dtype) == ((2, 8, rank), (2, 8, rope), dtype)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"is_causal": "no"}, TypeError, "is_causal='no'; expected True or False"),
        ({"qkv_format": ["bshd"]}, ValueError, r"qkv_format=\['bshd'\]; expected"),
        ({"q": [1.0]}, TypeError, "q is list; expected a torch.Tensor"),
        ({"q": torch.zeros(1, 4, 2, 584), "k": torch.zeros(1, 4, 2, 584)}, ValueError, "head_dim_qk=584"),
        ({"v": torch.zeros(1, 4, 2, 0)}, ValueError, "head_dim_v=0"),
    ],
)
def test_wrong_arguments_of_the_kernels_own_function(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    x = torch.randn(1, 4, 2, 16)
    with pytest.raises(error, match=words):
        mla_attention(**{"q": x, "k": x, "v": x, **changes})


def test_forward_mode_through_the_kernels_own_function_is_a_clear_error() -> None:
    x = torch.randn(1, 4, 2, 16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            mla_attention(dual, x, x)


@pytest.mark.parametrize("compiled", [False, True])
def test_inference_mode_records_nothing_although_gradients_are_enabled(compiled: bool) -> None:
    """As PyTorch's own operators: a result without a graph."""
    q, latents = torch.randn(1, 4, 2, 12, requires_grad=True), torch.randn(1, 4, 16, requires_grad=True)
    weights, query = torch.randn(2, 8, 16), Q_NOPE_ABS.clone().requires_grad_()

    def run() -> list[torch.Tensor]:
        return [
            mla_plugin.attention(q, q, q),
            mla_plugin.latent_attention(q, latents, torch.ones(1, 4, 4), weights, weights),
            decode(query),
        ]

    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(), torch.enable_grad():
        assert not any(x.requires_grad for x in run())
    if not compiled:
        assert mla_plugin.attention(q, q, q).requires_grad
        with pytest.raises(NotImplementedError, match="requires grad"):
            run()
