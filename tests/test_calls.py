"""What a call of attention guarantees besides its values: a decision that lasts, no lost gradient, clear errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mla_plugin
from mla_plugin import (
    Accepted,
    AttentionOutput,
    AttentionRequest,
    AttentionTensors,
    Gradients,
    Plan,
    Refused,
    Residuals,
    attention,
)
from mla_plugin.hooks.manager import get_manager
from mla_plugin.operations.attention.run import run
from mla_plugin.plugins import sdpa

Q, K, V = torch.randn(2, 3, 4, 24), torch.randn(2, 5, 2, 24), torch.randn(2, 5, 2, 16)


class Observer(TorchDispatchMode):
    """Sees every operator and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Spy:
    """sdpa under another name, for calls whose lengths agree; it counts its passes."""

    def __init__(self) -> None:
        self.passes: list[str] = []

    @mla_plugin.hookimpl
    def select_backend(self, request: AttentionRequest) -> Accepted | Refused:
        return Refused(("lengths_may_differ=True",)) if request.lengths_may_differ else Accepted()

    @mla_plugin.hookimpl
    def forward(self, plan: Plan, tensors: object) -> AttentionOutput:
        self.passes.append("forward")
        return sdpa.forward(plan, tensors)

    @mla_plugin.hookimpl
    def backward(self, plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        self.passes.append("backward")
        self.request = plan.request
        return sdpa.backward(plan, residuals, dout, dlse)


@pytest.fixture
def spy() -> Iterator[Spy]:
    plugin = Spy()
    get_manager().register(plugin, "spy")
    yield plugin
    get_manager().unregister("spy")


WAYS = ("eager", "observed", "compiled")


def call(way: str, *args: object, **options: object) -> torch.Tensor:
    if way == "observed":
        with Observer() as observer:
            out = attention(*args, **options)
        assert "mla_plugin.attention_forward.default" in observer.seen
        return out
    if way == "compiled":
        torch.compiler.reset()
        return torch.compile(attention, backend="aot_eager", fullgraph=True)(*args, **options)
    return attention(*args, **options)


@pytest.mark.parametrize("way", WAYS)
def test_offloaded_tensors_do_not_change_the_decision(way: str, spy: Spy) -> None:
    q = torch.randn(9, 2, 8, requires_grad=True)
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
        out = call(way, q, q, q, qkv_format="thd", cu_seqlens_q=offsets, max_seqlen_q=5, backend="spy")
    out.sum().backward()
    assert spy.passes == ["forward", "backward"]
    expected = q.detach().clone().requires_grad_()
    attention(expected, expected, expected, qkv_format="thd", cu_seqlens_q=offsets, max_seqlen_q=5).sum().backward()
    torch.testing.assert_close(q.grad, expected.grad)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("name", "text"),
    [("MLA_PLUGIN_BLOCK", "spy"), ("MLA_PLUGIN_BACKEND", "sdpa"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")],
)
def test_a_variable_that_changes_before_the_backward_does_not_move_it(
    way: str, name: str, text: str, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "spy")
    q = Q.clone().requires_grad_()
    out = call(way, q, K, V)
    monkeypatch.setenv(name, text)
    out.sum().backward()
    assert spy.passes == ["forward", "backward"]


@pytest.mark.parametrize("way", WAYS)
def test_a_like_call_under_another_environment_does_not_move_the_backward_of_an_earlier_one(
    way: str, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = Q.clone().requires_grad_()
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "spy")
    first = call(way, q, K, V)
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "sdpa")
    second = call(way, q, K, V)
    second.sum().backward()
    assert spy.passes == ["forward"]
    first.sum().backward()
    assert spy.passes == ["forward", "backward"]


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("later", ["another backend", "another shape", "another bias"])
def test_a_later_call_does_not_move_the_backward_of_an_earlier_one(way: str, later: str, spy: Spy) -> None:
    q = Q.clone().requires_grad_()
    out = call(way, q, K, V, backend="spy")
    if later == "another backend":
        call(way, q, K, V, backend="sdpa")
    elif later == "another shape":
        call(way, torch.randn(2, 3, 2, 24, requires_grad=True), K, V, backend="spy")
        spy.passes.pop()
    else:
        bias = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": torch.zeros(3, 5)}
        out = call(way, q, K, V, backend="spy", **bias)
        call(way, q, K, V, backend="spy", **bias | {"core_attention_bias": torch.zeros(2, 4, 3, 5)})
        spy.passes[:] = ["forward"]
    out.sum().backward()
    assert spy.passes == ["forward", "backward"]
    assert spy.request.num_heads == 4
    assert spy.request.bias_shape == ("11ss" if later == "another bias" else None)


def test_an_unobserved_call_does_not_cross_the_dispatcher_and_an_observed_one_does() -> None:
    plain = attention(Q, K, V)
    for way in ("observed", "compiled"):
        assert torch.equal(call(way, Q, K, V), plain)
    with torch.profiler.profile() as profile:
        attention(Q, K, V)
    assert "mla_plugin::attention_forward" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_backends_get_contiguous_rows(way: str, name: str, monkeypatch: pytest.MonkeyPatch, spy: Spy) -> None:
    tensors = {"q": Q, "k": K, "v": V}
    tensors[name] = tensors[name].mT.contiguous().mT.requires_grad_()
    strides = []
    compute_forward, compute_backward = sdpa.forward, sdpa.backward

    def forward(plan: Plan, tensors: mla_plugin.AttentionTensors) -> AttentionOutput:
        strides.append([x.stride(-1) for x in (tensors.q, tensors.k, tensors.v)])
        return compute_forward(plan, tensors)

    def backward(plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        strides.append([x.stride(-1) for x in (residuals.tensors.q, residuals.tensors.k, residuals.tensors.v)])
        return compute_backward(plan, residuals, dout, dlse)

    monkeypatch.setattr(sdpa, "forward", forward)
    monkeypatch.setattr(sdpa, "backward", backward)
    call(way, **tensors, backend="spy").sum().backward()
    assert strides == [[1, 1, 1]] * 2


class Marked(torch.Tensor):
    """A subclass that stops at the first operator that it takes part in."""

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        raise LookupError(str(func))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_subclass_sees_the_operator(name: str) -> None:
    tensors = {"q": Q, "k": K, "v": V}
    tensors[name] = torch.Tensor._make_subclass(Marked, tensors[name])
    with pytest.raises(LookupError, match=r"mla_plugin\.attention_forward"):
        attention(**tensors)


def test_a_function_mode_and_a_trace_see_the_operator() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Mode():
        attention(Q, K, V)
    assert any("attention_forward" in name for name in Mode.seen)
    traced = torch.jit.trace(lambda q: attention(q, K, V), (Q,), check_trace=False)
    assert "mla_plugin::attention_forward" in str(traced.graph)


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd"])
@pytest.mark.parametrize("options", [{}, {"window_size": (2, 0)}])
def test_out_is_the_callers_to_change_and_a_backward_notices(way: str, qkv_format: str, options: dict) -> None:
    q, v = torch.randn(4, 4, 4, 24, requires_grad=True), torch.randn(4, 4, 4, 16)
    out, lse = call(way, q, q, v, qkv_format=qkv_format, return_lse=True, **options)
    assert not out._is_view()
    assert not lse._is_view()
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    with torch.no_grad():
        attention(q, q, v, qkv_format=qkv_format, **options).add_(1)


@pytest.mark.parametrize(
    ("scale", "error", "words"),
    [
        (torch.tensor(0.1, requires_grad=True), TypeError, "it gets no gradient"),
        (torch.tensor(0.1), TypeError, "float"),
        ("0.1", TypeError, "softmax_scale='0.1' is str; expected a positive number"),
        (True, TypeError, "softmax_scale=True"),
        (float("inf"), ValueError, "softmax_scale=inf; expected a positive, finite number"),
        (float("nan"), ValueError, "softmax_scale=nan"),
        (-1, ValueError, "softmax_scale=-1"),
    ],
)
def test_softmax_scale(scale: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        attention(Q, K, V, softmax_scale=scale)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float64])
@pytest.mark.parametrize("name", ["k", "v"])
def test_autocast_casts_no_keys_that_are_no_floats(dtype: torch.dtype, name: str) -> None:
    tensors = {"q": Q, "k": K, "v": V}
    tensors[name] = tensors[name].to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=str(dtype)):
        attention(**tensors)


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(("backend", "words"), [("typo", "'typo'"), (5, "5"), (["sdpa"], "sdpa")])
def test_a_backend_that_does_not_exist(backend: object, words: str, empty: bool) -> None:
    q = Q[:, :0] if empty else Q
    with pytest.raises((TypeError, ValueError), match=words):
        attention(q, K, V, backend=backend)


@pytest.mark.parametrize("name", ["q", "k", "v", "attention_mask"])
def test_nested_and_sparse_tensors(name: str) -> None:
    tensors = {"q": Q, "k": K, "v": V, "attention_mask": torch.zeros(2, 4, 3, 5, dtype=torch.bool)}
    for layout in (torch.strided, torch.jagged):
        ragged = torch.nested.nested_tensor([torch.randn(n, 4, 24) for n in (2, 3)], layout=layout)
        with pytest.raises(TypeError, match=f"{name} is a nested tensor.*thd"):
            attention(**{**tensors, name: ragged}, attn_mask_type="arbitrary")
    with pytest.raises(TypeError, match=rf"{name} has the memory layout torch\.sparse_coo; .*to_dense"):
        attention(**{**tensors, name: tensors[name].to_sparse()}, attn_mask_type="arbitrary")


def test_a_request_of_other_tensors_is_refused() -> None:
    tensors = mla_plugin.AttentionTensors(Q, K, V, 0.2)
    made = AttentionRequest.of(tensors)
    torch.testing.assert_close(run(made, tensors).out, attention(Q, K, V, softmax_scale=0.2))
    for other in (made.replace(num_heads=2), made.replace(softmax_type="off-by-one"), made.replace(fp8=True)):
        with pytest.raises(ValueError, match=r"not what AttentionRequest\.of returns for these tensors"):
            run(other, tensors)


def test_distributed_tensors_name_the_way_out() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        mesh = init_device_mesh("cpu", (1,))
        q = distribute_tensor(Q, mesh, [Replicate()])
        with pytest.raises(TypeError, match=r"q is a DTensor.*local_map.*to_local\(\)"):
            attention(q, K, V)
    finally:
        torch.distributed.destroy_process_group()


def test_lengths_as_views_of_one_tensor_agree() -> None:
    both = torch.tensor([[0, 7], [4, 8], [9, 9]], dtype=torch.int32)
    q = torch.randn(9, 2, 8)
    tensors = mla_plugin.AttentionTensors(q, q, q, 1.0, both[:, 0], both[:, 0])
    assert not AttentionRequest.of(tensors, qkv_format="thd").lengths_may_differ
    tensors = mla_plugin.AttentionTensors(q, q, q, 1.0, both[:, 0], both[:, 1])
    assert AttentionRequest.of(tensors, qkv_format="thd").lengths_may_differ
    ends = torch.tensor([0, 4, 9, 9, 9], dtype=torch.int32)
    tensors = mla_plugin.AttentionTensors(q, q, q, 1.0, ends[:3], ends[::2])
    assert AttentionRequest.of(tensors, qkv_format="thd").lengths_may_differ


@pytest.mark.parametrize("options", [{"window_size": (2, 0)}, {"core_attention_bias_type": "post_scale_bias"}, {}])
def test_autocast_reaches_no_backend(options: dict) -> None:
    if options and "window_size" not in options:
        options = {**options, "core_attention_bias": torch.randn(3, 5, dtype=torch.bfloat16)}
    low = [x.bfloat16().requires_grad_() for x in (Q, K, V)]
    out, lse = attention(*low, return_lse=True, **options)
    gradients = torch.autograd.grad(out.float().sum() + lse.nan_to_num(neginf=0).sum(), low)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, found_lse = attention(*low, return_lse=True, **options)
        again = torch.autograd.grad(found.float().sum() + found_lse.nan_to_num(neginf=0).sum(), low)
    for one, other in zip((out, lse, *gradients), (found, found_lse, *again), strict=True):
        assert torch.equal(one, other)


def test_dropout_draws_its_seed_on_the_cpu_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        out = attention(Q, K, V, dropout_p=0.5)
    assert out.device.type == "cpu"
    assert out.isfinite().all()
    tensors = mla_plugin.AttentionTensors(Q, K, V, 1.0, dropout_seed=torch.zeros(1, dtype=torch.int64, device="meta"))
    with pytest.raises(ValueError, match="dropout_seed is on meta"):
        AttentionRequest.of(tensors, dropout_p=0.5)


def test_create_graph_keeps_the_decision_too(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "spy")
    q = Q.clone().requires_grad_()
    out = attention(q, K, V)
    monkeypatch.setenv("MLA_PLUGIN_BACKEND", "sdpa")
    torch.autograd.grad(out.sum(), q, create_graph=True)
    assert spy.passes == ["forward", "backward"]


class Wrong(Spy):
    """Its results are changed before they are returned."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        self.changes = changes

    @mla_plugin.hookimpl
    def forward(self, plan: Plan, tensors: mla_plugin.AttentionTensors) -> AttentionOutput:
        output = sdpa.forward(plan, tensors)
        return AttentionOutput(**vars(output) | {k: v for k, v in self.changes.items() if k in vars(output)})

    @mla_plugin.hookimpl
    def backward(self, plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None) -> Gradients:
        gradients = sdpa.backward(plan, residuals, dout, dlse)
        return Gradients(**vars(gradients) | {k: v for k, v in self.changes.items() if k in vars(gradients)})


@pytest.mark.parametrize("way", WAYS[:2])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("out", [1.0]),
        ("out", torch.zeros(2, 3, 4, 16, device="meta")),
        ("lse", None),
        ("lse", torch.zeros(2, 4, 3, dtype=torch.float64)),
        ("dq", None),
        ("dq", torch.zeros(5, 2, 3, 4, 24)),
        ("dk", torch.zeros(2, 5, 2, 24, dtype=torch.float64)),
        ("dv", torch.zeros(2, 5, 4, 16)),
        ("dbias", None),
        ("dbias", torch.zeros(1, 4, 3, 5)),
    ],
)
def test_a_result_that_does_not_fit_is_the_backends_error(way: str, name: str, value: object) -> None:
    get_manager().register(Wrong(**{name: value}), "wrong")
    try:
        q, bias = Q.clone().requires_grad_(), torch.zeros(3, 5, requires_grad=True)
        with pytest.raises(RuntimeError, match=f"'wrong' returned {name} as"):
            call(
                way,
                *(q, K, V),
                backend="wrong",
                core_attention_bias_type="post_scale_bias",
                core_attention_bias=bias,
            ).sum().backward()
    finally:
        get_manager().unregister("wrong")


@pytest.mark.parametrize("way", WAYS[:2])
def test_gradients_that_share_memory_are_copied(way: str) -> None:
    """A caller may add to one of them in place."""
    shared = torch.ones(2, 5, 2, 24)
    get_manager().register(Wrong(dk=shared, dv=shared), "wrong")
    try:
        q, k, v = (torch.zeros(x.shape).requires_grad_() for x in (Q, K, K))
        out = call(way, q, k, v, backend="wrong")
        _, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        dk.fill_(2.0)
        assert (dv == 1).all()
    finally:
        get_manager().unregister("wrong")


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_a_backend_has_the_cache_of_its_kind(
    way: str, strided: bool, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profiler, torch.compile and rows that are made contiguous are no reason to prepare each call anew."""
    caches = []
    compute_forward = sdpa.forward

    def forward(plan: Plan, tensors: mla_plugin.AttentionTensors) -> AttentionOutput:
        caches.append(tensors.kept)
        return compute_forward(plan, tensors)

    monkeypatch.setattr(sdpa, "forward", forward)
    q = Q.mT.contiguous().mT if strided else Q
    for _ in range(2):
        call(way, q, K, V, backend="spy")
    assert len(caches) == 2
    assert caches[0] is not None
    assert caches[0] is caches[1]


def test_an_input_handed_back_as_the_result_is_copied() -> None:
    v = torch.zeros(2, 3, 4, 24)
    get_manager().register(Wrong(out=v), "wrong")
    try:
        out = attention(Q, Q, v, backend="wrong")
        out.fill_(1.0)
        assert not v.any()
    finally:
        get_manager().unregister("wrong")


def test_a_request_of_one_tensor_of_offsets_is_not_of_two() -> None:
    """Kernels leave masks out where lengths agree."""
    q, offsets = torch.randn(9, 2, 8), torch.tensor([0, 4, 9], dtype=torch.int32)
    one = AttentionTensors(q, q, q, 0.3, cu_seqlens_q=offsets, cu_seqlens_kv=offsets)
    two = AttentionTensors(q, q, q, 0.3, cu_seqlens_q=offsets, cu_seqlens_kv=torch.tensor([0, 2, 9], dtype=torch.int32))
    request = AttentionRequest.of(one, qkv_format="thd", max_seqlen_q=7, max_seqlen_kv=7)
    run(request, one)
    with pytest.raises(ValueError, match=r"is not what AttentionRequest\.of returns for these tensors"):
        run(request, two)
    run(request.replace(lengths_may_differ=True), two)


@pytest.mark.parametrize("backend", ["sdpa", "triton"])
def test_a_packed_batch_of_no_sequences(backend: str) -> None:
    """Rows that belong to none are padding, with grouped heads too."""
    q, k, v = torch.randn(3, 4, 24), torch.randn(3, 2, 24), torch.randn(3, 2, 16)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    empty = torch.zeros(1, dtype=torch.int32)
    lengths = {"cu_seqlens_q": empty, "cu_seqlens_kv": empty, "max_seqlen_q": 4, "max_seqlen_kv": 4}
    out, lse = mla_plugin.attention(
        *tensors, qkv_format="thd", attn_mask_type="padding_causal", **lengths, return_lse=True, backend=backend
    )
    out.sum().backward()
    assert out.shape == (3, 4, 16)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert all(x.grad is not None and not x.grad.any() for x in tensors)
