"""The operators under autograd, torch.compile, autocast, checkpointing and opcheck."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mla_plugin import Accepted, AttentionOutput, AttentionRequest, AttentionTensors, Plan, attention, hookimpl
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.manager import get_manager
from mla_plugin.operations.attention import compute, known
from mla_plugin.operations.attention import operator as ops
from mla_plugin.operations.attention.run import run
from mla_plugin.resolver.attention import resolve
from tests.requests import mla_request

LAYOUTS = {"bshd": (2, 5, 4), "sbhd": (5, 2, 4), "bhsd": (2, 4, 5), "thd": (9, 4)}
KV = {"bshd": (2, 7, 2), "sbhd": (7, 2, 2), "bhsd": (2, 2, 7), "thd": (12, 2)}


def inputs(layout: str = "bshd", dtype: torch.dtype = torch.float64, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()

    return [draw(*LAYOUTS[layout], 24), draw(*KV[layout], 24), draw(*KV[layout], 16)]


def options(layout: str) -> dict[str, object]:
    if layout != "thd":
        return {"qkv_format": layout, "attn_mask_type": "causal_bottom_right"}
    return {
        "qkv_format": "thd",
        "attn_mask_type": "padding_causal_bottom_right",
        "cu_seqlens_q": torch.tensor([0, 2, 2, 8], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 4, 5, 11], dtype=torch.int32),
        "max_seqlen_q": 6,
        "max_seqlen_kv": 6,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradcheck_through_out_and_lse(layout: str) -> None:
    def run(*qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(*qkv, return_lse=True, **options(layout))
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(run, inputs(layout))


def test_gradcheck_of_a_bias() -> None:
    bias = torch.randn(1, 4, 5, 7, dtype=torch.float64, requires_grad=True)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)

    assert torch.autograd.gradcheck(run, (*inputs(), bias))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_equals_eager_forward_and_backward(layout: str) -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attention(q * 2, k, v, return_lse=True, **options(layout))
        return out.sin(), lse.exp()

    results = []
    for function in (run, torch.compile(run, fullgraph=True)):
        qkv = inputs(layout, torch.float32)
        out, lse = function(*qkv)
        torch.autograd.backward((out, lse), (torch.cos(out.detach()), torch.cos(lse.detach())))
        results.append((out, lse, *(x.grad for x in qkv)))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=1e-5)  # the compiler has its own sin and exp


def test_compiled_with_dynamic_lengths_compiles_once() -> None:
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    for length in (5, 6, 9):
        q, v = torch.randn(2, length, 4, 24), torch.randn(2, length, 4, 16)
        torch.testing.assert_close(compiled(q, q, v), attention(q, q, v))
    assert counter.frame_count == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_opcheck(layout: str) -> None:
    q, k, v = inputs(layout)
    given = options(layout)
    lengths = {name: given.pop(name) for name in list(given) if name.startswith("cu_seqlens")}
    tensors = AttentionTensors(q, k, v, 0.2, **lengths)
    call = ops.Call(tensors, CallOptions(**given, return_lse=True).completed(tensors), None)
    torch.library.opcheck(ops.attention_forward, call.in_order())
    detached = replace(tensors, q=q.detach(), k=k.detach(), v=v.detach())
    output = run(AttentionRequest.of(detached, **given, return_lse=True), detached)
    out, lse = output.out, output.lse
    torch.library.opcheck(
        ops.attention_backward,
        (torch.ones_like(out), torch.ones_like(lse), out, lse, *call._replace(tensors=detached).in_order()),
    )


def test_unused_outputs_need_no_gradient() -> None:
    for use in ("out", "lse"):
        qkv = inputs()
        out, lse = attention(*qkv, return_lse=True)
        (out if use == "out" else lse).sum().backward()
        assert qkv[0].grad is not None
        assert qkv[0].grad.abs().sum() > 0
        assert bool(qkv[2].grad.abs().sum() > 0) is (use == "out")


def test_no_grad_asks_for_inference() -> None:
    with torch.no_grad():
        assert not attention(*inputs()).requires_grad


def test_a_second_backward_is_a_clear_error() -> None:
    qkv = inputs()
    (gradient,) = torch.autograd.grad(attention(*qkv).sum(), qkv[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        gradient.sum().backward()


def test_forward_mode_is_a_clear_error_not_a_zero() -> None:
    q, k, v = (x.detach() for x in inputs())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            attention(dual, k, v)
        attention(q, k, v)
    with pytest.raises(NotImplementedError, match=r"torch\.func.*torch\.autograd\.grad"):
        torch.func.jvp(lambda q: attention(q, k, v), (q,), (q,))
    with pytest.raises(NotImplementedError, match=r"torch\.func.*torch\.autograd\.grad"):
        torch.func.grad(lambda q: attention(q, k, v).sum())(q)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((1, 2), "forward of the backend 'broken' returned tuple, not AttentionOutput"),
        (AttentionOutput(torch.zeros(2, 5, 4, 24), torch.zeros(2, 4, 5)), r"out as \(2, 5, 4, 24\)"),
        (AttentionOutput(torch.zeros(2, 5, 4, 16), torch.zeros(2, 5, 4)), r"lse as \(2, 5, 4\)"),
        (
            AttentionOutput(torch.zeros(2, 5, 4, 16).half(), torch.zeros(2, 4, 5)),
            r"float16 .* expected a dense tensor .* torch.float32 on cpu",
        ),
    ],
)
def test_a_backend_that_breaks_the_contract_is_named(answer: object, words: str) -> None:
    class Broken:
        @hookimpl
        def select_backend(self) -> Accepted:
            return Accepted()

        @hookimpl
        def forward(self) -> object:
            return answer

    get_manager().register(Broken(), "broken")
    try:
        with pytest.raises((RuntimeError, TypeError), match=words):
            attention(*inputs(dtype=torch.float32), backend="broken")
    finally:
        get_manager().unregister("broken")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_equals_a_loop() -> None:
    q, k, v = (torch.stack([x.detach(), -x.detach()]) for x in inputs())
    expected = torch.stack([attention(*qkv) for qkv in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.vmap(attention)(q, k, v), expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", ["q", "k", "v", "dout"])
def test_a_last_dimension_that_is_not_contiguous_changes_nothing(
    layout: str, dtype: torch.dtype, transposed: str
) -> None:
    results = []
    for is_transposed in (False, True):
        tensors = dict(zip("qkv", (x.detach() for x in inputs(layout, dtype)), strict=True))
        tensors["dout"] = torch.cos(torch.arange(tensors["q"][..., :16].numel())).view(*LAYOUTS[layout], 16).to(dtype)
        if is_transposed:
            tensors[transposed] = tensors[transposed].mT.contiguous().mT
            assert tensors[transposed].stride(-1) != 1
        q, k, v = (tensors[name].requires_grad_() for name in "qkv")
        out = attention(q, k, v, **options(layout))
        results.append((out, *torch.autograd.grad(out, (q, k, v), tensors["dout"])))
    for plain, strided in zip(*results, strict=True):
        torch.testing.assert_close(strided, plain, rtol=0, atol=0)


def test_autocast_casts_to_its_dtype_and_gradients_come_back() -> None:
    qkv = inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(*qkv)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in qkv)
    expected = attention(*(x.detach().bfloat16() for x in qkv))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_autocast_does_not_make_numbers_of_integers() -> None:
    qkv = [x.detach().int() for x in inputs()]
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="int32"):
        attention(*qkv)


def test_meta_tensors_give_shapes() -> None:
    out, lse = attention(*(x.detach().to("meta") for x in inputs()), return_lse=True)
    assert (out.shape, out.device.type, lse.shape) == ((2, 5, 4, 16), "meta", (2, 4, 5))


def test_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*inputs()).dtype == torch.float64


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(dropout_p: float, reentrant: bool) -> None:
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(5)
        qkv = inputs()

        def run(*qkv: torch.Tensor) -> torch.Tensor:
            return attention(*qkv, dropout_p=dropout_p)

        out = checkpoint(run, *qkv, use_reentrant=reentrant) if recompute else run(*qkv)
        out.square().sum().backward()
        gradients.append([out, *(x.grad for x in qkv)])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=0, atol=0)


def test_dropout_draws_again_at_each_call_and_follows_the_seed() -> None:
    qkv = [x.detach() for x in inputs()]
    torch.manual_seed(1)
    first, second = attention(*qkv, dropout_p=0.5), attention(*qkv, dropout_p=0.5)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    torch.testing.assert_close(attention(*qkv, dropout_p=0.5), first, rtol=0, atol=0)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 7), (5, 0), (0, 0)])
def test_no_queries_or_no_keys(q_len: int, kv_len: int) -> None:
    q = torch.randn(2, q_len, 4, 24, requires_grad=True)
    k, v = torch.randn(2, kv_len, 2, 24, requires_grad=True), torch.randn(2, kv_len, 2, 16, requires_grad=True)
    out, lse = attention(q, k, v, return_lse=True)
    assert out.shape == (2, q_len, 4, 16)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full((2, 4, q_len), -torch.inf))
    out.sum().backward()
    assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in (q, k, v))


def test_an_empty_batch_and_an_empty_pack() -> None:
    q = torch.randn(0, 5, 4, 24)
    assert attention(q, q, q[..., :16]).shape == (0, 5, 4, 16)
    q, cu = torch.randn(0, 4, 24), torch.zeros(1, dtype=torch.int32)
    assert attention(q, q, q[..., :16], qkv_format="thd", cu_seqlens_q=cu).shape == (0, 4, 16)


def test_the_scale_is_the_one_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.detach() for x in inputs())
    doubled = attention(q * 2, k, v, softmax_scale=0.1)
    torch.testing.assert_close(attention(q, k, v, softmax_scale=0.2), doubled)
    monkeypatch.setenv("NVTE_APPLY_QK_LAYER_SCALING", "1")
    torch.testing.assert_close(attention(q, k, v, softmax_scale=0.2), doubled)
    torch.testing.assert_close(attention(q, k, v), attention(q, k, v, softmax_scale=24**-0.5), rtol=0, atol=0)


def test_a_variable_takes_effect_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv = [x.detach() for x in inputs()]
    attention(*qkv)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    with pytest.raises(RuntimeError, match="NVTE_UNFUSED_ATTN=0"):
        attention(*qkv)
    monkeypatch.delenv("NVTE_UNFUSED_ATTN")
    attention(*qkv)


def watch_requests(monkeypatch: pytest.MonkeyPatch) -> list[AttentionRequest]:
    """The requests of the plans that calls get from here on."""
    seen: list[AttentionRequest] = []
    resolve = known.resolve

    def watched(request: AttentionRequest, backend: str | None) -> Plan:
        plan = resolve(request, backend=backend)
        seen.append(plan.request)
        return plan

    monkeypatch.setattr(known, "resolve", watched)
    monkeypatch.setattr(known, "_known", {})
    return seen


@pytest.mark.parametrize("how", ["argument", "variable", "torch"])
def test_each_way_to_ask_for_determinism_reaches_the_request(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_requests(monkeypatch)
    qkv = [x.detach() for x in inputs()]
    attention(*qkv)
    if how == "variable":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    if how == "torch":
        torch.use_deterministic_algorithms(True)
    try:
        attention(*qkv, deterministic=how == "argument")
    finally:
        torch.use_deterministic_algorithms(False)
    assert [request.deterministic for request in seen] == [False, True]


def test_requests_describe_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_requests(monkeypatch)
    for layout in LAYOUTS:
        attention(*inputs(layout), **options(layout))
    bias = torch.zeros(2, 1, 1, 7, dtype=torch.float64)
    attention(*inputs(), core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    for request in seen[:3]:
        assert (request.batch_size, request.max_seqlen_q, request.max_seqlen_kv) == (2, 5, 7)
    assert (seen[3].batch_size, seen[3].max_seqlen_q, seen[3].max_seqlen_kv) == (3, 6, 6)
    for request in seen:
        assert (request.num_heads, request.num_kv_heads, request.head_dim_qk, request.head_dim_v) == (4, 2, 24, 16)
        assert request.is_training
    assert seen[4].bias_shape == "b11s"


@pytest.mark.parametrize(
    ("device_type", "mask", "check", "reads"),
    [
        ("cpu", "padding", None, True),
        ("cpu", "causal", "1", False),
        ("cuda", "padding", None, False),
        ("cuda", "padding", "true", False),
        ("cuda", "padding_causal", "1", True),
    ],
)
def test_lengths_are_read_where_it_costs_nothing_or_is_asked_for(
    device_type: str, mask: str, check: str | None, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if check is not None:
        monkeypatch.setenv("MLA_PLUGIN_CHECK", check)
    assert compute.reads_lengths(mla_request(device_type=device_type, attn_mask_type=mask)) == reads


def test_one_tensor_of_offsets_for_both_sides_says_that_lengths_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(request: AttentionRequest, *, backend: str | None) -> Plan:
        seen.append(request.lengths_may_differ)
        return resolve(request, backend=backend)

    monkeypatch.setattr(known, "resolve", spy)
    monkeypatch.setattr(known, "_known", {})
    q = torch.randn(9, 2, 8, requires_grad=True)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    for cu_seqlens_kv in (None, offsets, offsets.clone()):
        out = attention(q, q, q, qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=cu_seqlens_kv, max_seqlen_q=5)
        out.sum().backward()
    assert seen == [False, True]  # the second call is like the first, and a backward keeps to its forward's decision
