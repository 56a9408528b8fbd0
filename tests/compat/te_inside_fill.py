"""``MLA_PLUGIN_TE=fill`` inside one version of TransformerEngine; run as ``te_inside`` is."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

import mla_plugin
from mla_plugin import AttentionRequest, device
from mla_plugin.compat.transformer_engine import wrapper as wrapper_module
from mla_plugin.context_parallel import api as context_parallel
from mla_plugin.hooks.attention import AttentionOutput
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import Platform
from mla_plugin.operations.attention import compute
from mla_plugin.operations.attention.run import run
from mla_plugin.resolver import asking
from tests.compat import te_host
from tests.compat.te_parts import D_QK, D_V, ORIGINAL, PARAMETERS, VERSION, attention, te, tensors, with_gradients


def packed(lengths=(4, 5), slots=None, **options) -> dict:
    """Arguments for packed self-attention."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    arguments = {"qkv_format": "thd", "attn_mask_type": "padding_causal", "max_seqlen_q": 5, "max_seqlen_kv": 5}
    arguments |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    if slots is not None:
        offsets = torch.tensor([0, *slots]).cumsum(0, dtype=torch.int32)
        arguments |= {"cu_seqlens_q_padded": offsets, "cu_seqlens_kv_padded": offsets}
    return {**arguments, **options}


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> None:
    mla_plugin.register("transformer_engine")
    monkeypatch.setenv("MLA_PLUGIN_TE", "fill")


def release() -> tuple[int, int]:
    return tuple(map(int, VERSION.split(".")[:2]))


@pytest.mark.parametrize("mask", ["padding_causal", "causal,padding"])
def test_fills_packed_causal_self_attention(te_calls, fill, monkeypatch, mask) -> None:
    q, k, v = tensors(9, qkv_format="thd")
    arguments = packed(attn_mask_type=mask)
    found = with_gradients(lambda *t: attention()(*t, **arguments), q, k, v)
    expected = with_gradients(lambda *t: mla_plugin.attention(*t, backend="sdpa", **arguments).flatten(-2), q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not te_calls
    monkeypatch.delenv("MLA_PLUGIN_TE")
    assert attention()(q, k, v, **arguments) == 7.0


def test_a_group_of_one_rank_is_filled_as_none(te_calls, fill, monkeypatch) -> None:
    module = attention()
    module.set_context_parallel_group(Mock(size=1), [0], Mock(), "p2p")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size)
    module(*tensors(12, qkv_format="thd"), **packed((4, 5), (5, 7)), pad_between_seqs=True)
    assert not te_calls


@pytest.fixture
def over_ranks(te_calls, fill, monkeypatch: pytest.MonkeyPatch):
    """A module of rank 1 of 2; what would run through our context parallelism is kept instead, and answered by 1."""
    group = Mock(spec=torch.distributed.ProcessGroup)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda given: 2)
    ran = []

    def answer(tensors, options, backend, given, comm_type):
        ran.append((options, comm_type))
        assert given is group
        assert backend is None
        return AttentionOutput(torch.ones(*tensors.q.shape[:-1], D_V), torch.zeros(1))

    monkeypatch.setattr(context_parallel, "attention", answer)

    def module(comm_type: str = "p2p", groups: int = 2, **options) -> torch.nn.Module:
        made = attention(groups=groups, **options)
        made.set_context_parallel_group(group, [0, 1], Mock(), comm_type)
        return made

    module.ran = ran
    return module


@pytest.mark.parametrize("comm_type", ["p2p", "all_gather", "a2a"])
@pytest.mark.parametrize("groups", [1, 2])
def test_mla_over_ranks_where_it_fails(over_ranks, te_calls, comm_type, groups) -> None:
    """Whatever is selected: p2p fails for grouped heads (issue 2868), the others for all, up to 2.14."""
    is_gap = release() < (2, 15) and (comm_type != "p2p" or groups == 1)
    is_ours = is_gap and not (comm_type == "a2a" and groups == 1)  # 1 head over 2 ranks, which is neither's
    out = over_ranks(comm_type, groups)(*tensors(6, groups=groups))
    assert bool(te_calls) is not is_ours
    if is_ours:
        assert out.shape == (2, 6, 2 * D_V)
        ((options, ran),) = over_ranks.ran
        assert (ran, options.qkv_format, options.attn_mask_type) == (comm_type, "bshd", "causal")


@pytest.mark.parametrize("is_selected", [False, True])
def test_padding_between_sequences_over_ranks(over_ranks, te_calls, monkeypatch, is_selected) -> None:
    """Rank 1 has half of each padded sequence; lengths are those of whole sequences."""
    asked = []

    def select(params):
        asked.append(params)
        return False, None, is_selected, 1, False, []

    monkeypatch.setattr(te.dpa_utils, "get_attention_backend", select)
    arguments = packed((7, 9), (8, 12), max_seqlen_q=12, max_seqlen_kv=12)
    over_ranks()(*tensors(10, qkv_format="thd", dims=(D_QK, D_V)), **arguments)
    assert bool(te_calls) is is_selected
    assert asked[0].context_parallel
    assert asked[0].max_seqlen_q == 12
    if not is_selected:
        ((options, _),) = over_ranks.ran
        assert (options.max_seqlen_q, options.pad_between_seqs) == (12, True)


@pytest.mark.parametrize("how", ["two levels", "odd", "strict", "unset"])
def test_calls_over_ranks_that_stay(over_ranks, te_calls, monkeypatch, how) -> None:
    module = over_ranks("p2p", groups=1)
    if how == "two levels":
        module.cp_comm_type, module.cp_group = "a2a+p2p", [module.cp_group] * 2
    if how in ("strict", "unset"):
        monkeypatch.delenv("MLA_PLUGIN_TE")
    if how == "strict":
        monkeypatch.setenv("NVTE_MLA_TRITON", "1")
    module(*tensors(5 if how == "odd" else 6, groups=1))
    assert te_calls
    assert not over_ranks.ran


def test_the_selection_over_ranks_is_asked_as_transformer_engine_asks_it(over_ranks, te_calls, monkeypatch) -> None:
    """Every field of its AttentionParams, by TransformerEngine's own forward and by us."""
    asked = []

    def select(params):
        asked.append({name: value for name, value in vars(params).items() if name not in ("fp8_meta", "qkv_type")})
        return False, None, False, None, False, []

    monkeypatch.setattr(te.dpa_utils, "get_attention_backend", select)
    module, t = over_ranks(), tensors(10, qkv_format="thd", kind=te_host.OnDevice)
    arguments = packed((7, 9), (8, 12), max_seqlen_q=12, max_seqlen_kv=12)
    module(*t, **arguments)
    monkeypatch.setattr(te, "get_distributed_world_size", lambda given: 2)
    with te_host.CudaIsCpu(), pytest.raises(ValueError, match="No dot product attention backend"):
        ORIGINAL(module, *t, **arguments)
    ours, its_own = asked
    assert ours == its_own


def test_the_filled_gap_equals_transformer_engines_unfused_attention(fill, monkeypatch) -> None:
    q, k, v = tensors(9, qkv_format="thd", kind=te_host.OnDevice)
    plain = [x.detach().as_subclass(torch.Tensor).requires_grad_() for x in (q, k, v)]
    found = with_gradients(lambda *t: attention()(*t, **packed()), *plain)
    monkeypatch.delenv("MLA_PLUGIN_TE")
    with te_host.CudaIsCpu():
        if release() < (2, 11):  # before that, its unfused attention takes no packed sequences
            with pytest.raises(ValueError, match="No dot product attention backend"):
                attention()(q, k, v, **packed())
            return
        expected = with_gradients(lambda *t: attention()(*t, **packed()), q, k, v)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


CAPABILITIES = [(8, 0), (9, 0), (10, 0), (12, 0)]


@pytest.fixture(params=CAPABILITIES, ids=str)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The compute capability that PyTorch and TransformerEngine see."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: request.param)
    monkeypatch.setattr(te.dpa_utils, "get_device_compute_capability", lambda: request.param)
    return request.param


def test_padding_between_sequences_without_us(capability) -> None:
    """What ``gaps`` says of each release: 2.11 to 2.15 answer wrongly, the others raise, whatever the device."""
    q, k, v = tensors(12, qkv_format="thd", kind=te_host.OnDevice)
    arguments = packed(slots=(6, 6))
    right = mla_plugin.attention(*(x.as_subclass(torch.Tensor) for x in (q, k, v)), backend="sdpa", **arguments)
    with te_host.CudaIsCpu():
        if not (2, 11) <= release() < (2, 16):
            with pytest.raises(ValueError, match="No dot product attention backend"):
                attention()(q, k, v, **arguments)
            return
        out = attention()(q, k, v, **arguments).as_subclass(torch.Tensor)
    assert len(out) == 9  # of 12
    torch.testing.assert_close(out[:4], right.flatten(-2)[:4], rtol=1e-4, atol=1e-4)
    assert (out[6:] - right.flatten(-2)[6:9]).abs().max() > 0.1


@pytest.mark.parametrize("backend", ["triton", None])  # what a GPU would choose, and what the CPU does
def test_fills_padding_between_sequences(te_calls, fill, capability, monkeypatch, backend) -> None:
    if backend is not None:
        monkeypatch.setenv("MLA_PLUGIN_BACKEND", backend)
    q, k, v = tensors(12, qkv_format="thd")
    arguments = packed(slots=(6, 6))
    found = with_gradients(lambda *t: attention()(*t, **arguments), q, k, v)
    expected = with_gradients(
        lambda *t: mla_plugin.attention(*t, backend=backend or "sdpa", **arguments).flatten(-2), q, k, v
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not te_calls


def test_fills_padding_between_sequences_that_end_together(te_calls, fill) -> None:
    """Bottom-right, with a longest sequence of queries above that of keys; the first rows then see no key."""
    q, k, v = tensors(12, qkv_format="thd")
    arguments = packed(slots=(6, 6), attn_mask_type="padding_causal_bottom_right", max_seqlen_kv=4)
    arguments["cu_seqlens_kv"] = torch.tensor([0, 4, 8], dtype=torch.int32)
    found = attention()(q, k, v, **arguments)
    assert torch.equal(found, mla_plugin.attention(q, k, v, backend="sdpa", **arguments).flatten(-2))
    assert not found[6].any()


def test_autocast_is_off_where_our_backends_run(te_calls, fill, monkeypatch) -> None:
    """They compute in the dtype of q, k and v, as TransformerEngine does, whatever operations they are made of."""
    seen = []
    monkeypatch.setattr(
        wrapper_module,
        "run",
        lambda *args, **options: seen.append(torch.is_autocast_enabled("cpu")) or run(*args, **options),
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention()(*tensors(9, qkv_format="thd"), **packed()).dtype == torch.float32
    assert seen == [False]


def test_padding_between_sequences_that_transformer_engine_runs_is_its_own(te_calls, fill, monkeypatch) -> None:
    """cuDNN takes it from compute capability 9.0 on, and FlashAttention 3 from 2.16 on."""
    monkeypatch.setattr(te.dpa_utils, "get_attention_backend", lambda params: (False, None, True, 1, False, []))
    assert attention()(*tensors(12, qkv_format="thd"), **packed(slots=(6, 6))) == 7.0


def test_tensors_on_no_cuda_device_are_transformer_engines(te_calls, fill, monkeypatch) -> None:
    def refuse(device):
        raise ValueError(f"Expected a cuda device, but got: {device}")  # PyTorch's words

    monkeypatch.setattr(torch.cuda, "get_device_capability", refuse)
    assert attention()(*tensors(12, qkv_format="thd"), **packed(slots=(6, 6))) == 7.0


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch):
    """Pretends a backend that the CPU lacks; the test sees which one would have run."""

    def pretend(backend: str | None) -> None:
        monkeypatch.setattr(wrapper_module, "_chosen", lambda request, circumstances: backend)
        monkeypatch.setattr(wrapper_module, "_attend", lambda call, backend: torch.tensor(ord(backend[-1])))

    return pretend


@pytest.mark.parametrize(("backend", "is_filled"), [("fa3", True), ("triton", True), ("fa2", False), (None, False)])
def test_padding_between_sequences_runs_on_named_backends_alone(te_calls, fill, chosen, backend, is_filled) -> None:
    chosen(backend)
    out = attention()(*tensors(12, qkv_format="thd"), **packed(slots=(6, 6)))
    assert out == (ord(backend[-1]) if is_filled else 7.0)


@pytest.mark.parametrize("qkv_format", ["bshd", "thd"])
def test_fills_flash_attention_2_with_padded_v_before_2_17(te_calls, fill, chosen, qkv_format) -> None:
    chosen("fa2")
    arguments = packed(attn_mask_type="padding") if qkv_format == "thd" else {}
    out = attention()(*tensors(9, qkv_format=qkv_format), **arguments)
    assert out == (ord("2") if release() < (2, 17) else 7.0)


def test_fills_nothing_that_transformer_engine_runs_fused(te_calls, fill, monkeypatch) -> None:
    asked = []

    def select(params):
        asked.append(params)
        return True, None, False, None, False, [True, False, True]

    monkeypatch.setattr(te.dpa_utils, "get_attention_backend", select)
    module = attention()
    for _ in range(2):
        assert module(*tensors(9, qkv_format="thd"), **packed()) == 7.0
    assert len(asked) == 1  # kept for the next call of the kind
    assert asked[0].head_dim_v == D_V


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"slots": (6, 6)},
        {"max_seqlen_q": None, "max_seqlen_kv": None},
        {"slots": (6, 6), "max_seqlen_q": None, "max_seqlen_kv": None},
        {"slots": (4, 5), "pad_between_seqs": True},
        {"slots": (6, 6), "attn_mask_type": "padding"},
        {"slots": (6, 6), "attn_mask_type": "padding", "bottom_right_diagonal": False},
    ],
    ids=str,
)
def test_the_selection_is_asked_as_transformer_engine_asks_it(fill, monkeypatch, options) -> None:
    """Every field of its AttentionParams, by TransformerEngine's own forward and by us."""
    if "bottom_right_diagonal" not in PARAMETERS:
        options = {name: value for name, value in options.items() if name != "bottom_right_diagonal"}
    asked = []

    def select(params):
        asked.append({name: value for name, value in vars(params).items() if name not in ("fp8_meta", "qkv_type")})
        return True, None, False, None, False, [True, False, True]

    monkeypatch.setattr(te.dpa_utils, "get_attention_backend", select)
    monkeypatch.setattr(te.FlashAttention, "forward", lambda self, *args, **kwargs: torch.tensor(7.0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    monkeypatch.setattr(wrapper_module, "_chosen", lambda request, circumstances: "triton")
    module, t = attention(), tensors(12, qkv_format="thd", kind=te_host.OnDevice)
    with te_host.CudaIsCpu():
        assert module(*t, **packed(**options)) == 7.0
    ours, its_own = asked
    assert ours == its_own


@pytest.mark.parametrize("attention_type", ["self", "cross"])
def test_fills_packed_self_attention_alone(te_calls, fill, attention_type) -> None:
    out = attention(attention_type=attention_type)(*tensors(9, qkv_format="thd"), **packed())
    assert (out.dim() == 2) == (attention_type == "self")


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": torch.tensor([0, 9], dtype=torch.int64)},
        {"attn_mask_type": "causal"},
        {"max_seqlen_q": 4},
        {"window_size": (2, 0)},
    ],
    ids=str,
)
def test_fills_no_other_packed_call(te_calls, fill, options) -> None:
    assert attention()(*tensors(9, qkv_format="thd"), **packed(**options)) == 7.0


def test_padding_between_sequences_is_found_as_this_version_finds_it(te_calls, fill, monkeypatch) -> None:
    """Up to 2.17 by value, later by which tensors were given."""
    found = []
    monkeypatch.setattr(wrapper_module, "run", lambda request, t, backend: found.append(request) or run(request, t))
    arguments = packed()
    one, other = arguments["cu_seqlens_q"], packed()["cu_seqlens_q"]
    t = tensors(9, qkv_format="thd")
    expected = mla_plugin.attention(*t, backend="sdpa", **arguments).flatten(-2)
    for q_padded, kv_padded in ((one, one), (other, other), (one, other)):
        out = attention()(*t, **arguments, cu_seqlens_q_padded=q_padded, cu_seqlens_kv_padded=kv_padded)
        torch.testing.assert_close(out, expected)
    is_by_value = release() < (2, 18)
    assert [request.pad_between_seqs for request in found] == [False, not is_by_value, not is_by_value]
    assert not te_calls


@pytest.mark.parametrize(
    "options",
    [
        {"pad_between_seqs": False},
        {"window_size": [-1, -1]},
        {"window_size": [2, 0]},
        {"window_size": 5},
        {"attention_mask": torch.zeros(2, 1, 1, 5, dtype=torch.bool)},
        {"cu_seqlens_kv_padded": None},
        {"max_seqlen_q": 5.0},
        {"max_seqlen_q": torch.tensor([5, 5])},
        {"qkv_format": ""},
        {"attn_mask_type": ""},
        {"attn_mask_type": "causal_padding_bottom_right"},
        {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32), "cu_seqlens_kv": torch.zeros(1, dtype=torch.int32)},
        {"cu_seqlens_q": [0, 4, 9]},
        {"cu_seqlens_kv": None},
    ],
    ids=str,
)
def test_padded_calls_that_are_transformer_engines_to_judge(te_calls, fill, options) -> None:
    assert attention()(*tensors(12, qkv_format="thd"), **packed(slots=(6, 6), **options)) == 7.0


def test_rows_that_do_not_lie_in_memory_one_by_one_are_transformer_engines_error(fill) -> None:
    q, k, v = tensors(9, qkv_format="thd", kind=te_host.OnDevice)
    v = v.detach().mT.contiguous().mT
    with te_host.CudaIsCpu(), pytest.raises(AssertionError, match="stride 1"):
        attention()(q, k, v, **packed())


@pytest.mark.parametrize("module_mask", ["causal", "padding"])
def test_unpadded_offsets_may_be_given_twice(te_calls, fill, module_mask) -> None:
    """pad_between_seqs=False with the very same tensors contradicts nothing."""
    arguments = packed(pad_between_seqs=False)
    arguments |= {f"{name}_padded": arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    q, k, v = tensors(9, qkv_format="thd")
    expected = mla_plugin.attention(q, k, v, backend="sdpa", **packed()).flatten(-2)
    assert torch.equal(attention(attn_mask_type=module_mask)(q, k, v, **arguments), expected)


@pytest.fixture(params=["2.8.3", None], ids=["flash-attn", "no flash-attn"])
def flash_attn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Our backends answer as on an A100 with this version of flash-attn."""
    packages = (("triton", "3.5.0"), *((("flash-attn", request.param),) if request.param else ()))
    a100 = Platform("cuda", (8, 0), packages, None, "12.8", shared_memory_per_block=166912, multi_processor_count=108)
    answer, generation = asking.ask, get_manager().generation
    monkeypatch.setattr(get_manager(), "generation", f"{generation} on an A100 with {packages}")  # no kept decisions
    monkeypatch.setattr(device, "platform", lambda *args: a100)

    def ask(name: str, select_backend: object, request: AttentionRequest, *rest: object) -> object:
        return answer(name, select_backend, request.replace(device_type="cuda"), *rest)

    monkeypatch.setattr(asking, "ask", ask)
    return request.param


@pytest.mark.parametrize("is_one_tensor", [True, False], ids=["one tensor", "two tensors"])
@pytest.mark.parametrize("mask", ["padding_causal", "padding"])
def test_what_is_decided_is_what_runs(te_calls, fill, monkeypatch, flash_attn, is_one_tensor, mask) -> None:
    """Offsets for queries and keys that are two tensors may differ, which FlashAttention 2 cannot align."""
    ran = []

    def forward(known, tensors):
        ran.append((known.plan.request, known.plan.forward_backend))
        return get_manager().caller("forward", "sdpa")(plan=known.plan, tensors=tensors)

    monkeypatch.setattr(compute, "forward", forward)
    arguments = packed(attn_mask_type=mask)
    if not is_one_tensor:
        arguments["cu_seqlens_kv"] = arguments["cu_seqlens_q"].clone()
    q, k, v = (x.detach().half() for x in tensors(9, qkv_format="thd", dims=(192, 128)))
    out = attention(dims=(192, 128))(q, k, v, **arguments)
    if release() >= (2, 17) and mask == "padding":  # no gap
        assert out == 7.0
        return
    ((request, backend),) = ran
    assert backend == "triton"  # before Hopper it goes before FlashAttention 2 with V padded
    assert request.lengths_may_differ != is_one_tensor
    expected = mla_plugin.attention(q, k, v, backend="sdpa", **packed(attn_mask_type=mask)).flatten(-2)
    torch.testing.assert_close(out, expected)


def test_what_is_asked_of_the_module_reaches_the_request(te_calls, fill, monkeypatch) -> None:
    """Determinism is read when the module is made, as in TransformerEngine, and so is its scale."""
    seen = []
    monkeypatch.setattr(wrapper_module, "run", lambda request, t, backend: seen.append((request, t)) or run(request, t))
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    strict = attention(softmax_scale=0.3)
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
    for module in (strict, attention()):
        module(*tensors(9, qkv_format="thd"), **packed())
    assert [request.deterministic for request, _ in seen] == [True, False]
    assert [t.softmax_scale for _, t in seen] == pytest.approx([0.3, D_QK**-0.5])


def test_the_selection_is_asked_again_where_it_may_answer_otherwise(te_calls, fill, monkeypatch) -> None:
    from transformer_engine.pytorch import graph

    asked = []

    def select(params):
        asked.append(params)
        return True, None, False, None, False, [True, False, True]

    monkeypatch.setattr(te.dpa_utils, "get_attention_backend", select)
    module, t = attention(), tensors(9, qkv_format="thd")

    def number_of_questions() -> int:
        assert module(*t, **packed()) == 7.0
        return len(asked)

    assert number_of_questions() == number_of_questions() == 1
    assert module.eval() is module
    assert number_of_questions() == 2
    module.deterministic = True
    assert number_of_questions() == 3
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert number_of_questions() == 4
    graph.set_capture_start()
    try:
        assert number_of_questions() == 5
    finally:
        graph.set_capture_end()


def test_lengths_may_come_as_tensors(te_calls, fill) -> None:
    q, k, v = tensors(9, qkv_format="thd")
    longest = {"max_seqlen_q": torch.tensor(5), "max_seqlen_kv": torch.tensor(5)}
    expected = mla_plugin.attention(q, k, v, backend="sdpa", **packed()).flatten(-2)
    assert torch.equal(attention()(q, k, v, **packed(**longest)), expected)


def test_the_longest_sequence_is_found_when_left_out(te_calls, fill) -> None:
    arguments = packed(max_seqlen_q=None, max_seqlen_kv=None)
    q, k, v = tensors(9, qkv_format="thd")
    expected = mla_plugin.attention(q, k, v, backend="sdpa", **packed()).flatten(-2)
    assert torch.equal(attention()(q, k, v, **arguments), expected)
    assert not te_calls
