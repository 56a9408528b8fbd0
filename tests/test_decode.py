"""The decode entry: arguments, alignment, tracing, what it keeps between calls."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

import mla_plugin
from mla_plugin import DecodeLengths, DecodeOutput, DecodeTensors, reference
from mla_plugin.arguments import decode_layout
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import Accepted
from mla_plugin.operations.decode import api as decode_api
from mla_plugin.operations.decode import operator as decode_ops

SCALE = 0.3
B, S_Q, H, R, DR, S_KV, PAGE = 3, 2, 5, 16, 8, 11, 4


def call(**changes: Any) -> dict[str, Any]:
    """Arguments of a contiguous call."""
    arguments = {
        "q_nope_abs": torch.randn(B, S_Q, H, R),
        "q_rope": torch.randn(B, S_Q, H, DR),
        "kv_cache": (torch.randn(B, S_KV, R), torch.randn(B, S_KV, DR)),
        "softmax_scale": SCALE,
    }
    return arguments | changes


def paged_call(**changes: Any) -> dict[str, Any]:
    """Arguments of a paged call, the cache one tensor."""
    return call(
        kv_cache=torch.randn(20, PAGE, R + DR),
        page_table=torch.randperm(20)[: B * 4].view(B, 4).int(),
        seqlens_kv=torch.tensor([11, 1, 16], dtype=torch.int32),
        **changes,
    )


def exact(arguments: dict[str, Any]) -> DecodeOutput:
    """The oracle's answer."""
    given = dict(arguments)
    cache, q_nope_abs = given.pop("kv_cache"), given.pop("q_nope_abs")
    c_kv, k_rope = cache if isinstance(cache, tuple) else (cache[..., :R], cache[..., R:])
    causal = given.pop("causal", True)
    given = {name: given[name] for name in given if name in DecodeTensors._fields}
    return reference.decode(DecodeTensors(q_nope_abs, given.pop("q_rope"), c_kv, k_rope, causal=causal, **given))


def check(arguments: dict[str, Any]) -> None:
    out, lse = mla_plugin.decode(**arguments, return_lse=True)
    wanted = exact(arguments)
    assert out.dtype == arguments["q_nope_abs"].dtype
    torch.testing.assert_close(out.double(), wanted.out, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse.double(), wanted.lse, atol=2e-6, rtol=2e-6)
    assert torch.equal(mla_plugin.decode(**arguments), out)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("make", [call, paged_call])
def test_the_last_query_is_the_last_key(make: Any, causal: bool) -> None:
    check(make(causal=causal))


def test_one_tensor_holds_both_caches() -> None:
    check(call(kv_cache=torch.randn(B, S_KV, R + DR)))
    pages = torch.randn(20, PAGE, R + DR)
    check(paged_call() | {"kv_cache": (pages[..., :R], pages[..., R:])})


def test_no_rope() -> None:
    check(call(q_rope=torch.randn(B, S_Q, H, 0), kv_cache=torch.randn(B, S_KV, R)))


@pytest.mark.parametrize("make", [call, paged_call])
def test_keys_before_leftpad_are_not_seen(make: Any) -> None:
    leftpad_kv = torch.tensor([3, 0, 16], dtype=torch.int32)
    arguments = make(leftpad_kv=leftpad_kv)
    check(arguments)
    out, lse = mla_plugin.decode(**arguments, return_lse=True)
    assert not out[2].any()
    assert (lse[2] == -math.inf).all()


def test_lengths_on_the_host_change_nothing() -> None:
    arguments = paged_call()
    out = mla_plugin.decode(**arguments)
    lengths = DecodeLengths([11, 1, 16], seqlens_kv=arguments["seqlens_kv"])
    assert torch.equal(mla_plugin.decode(**arguments | {"seqlens_kv": lengths}), out)


@pytest.mark.parametrize("scale", [Fraction(1, 4), 2**70])
def test_a_scale_is_any_real_number(scale: Any) -> None:
    arguments = call(softmax_scale=scale)
    expected = mla_plugin.decode(**arguments | {"softmax_scale": float(scale)})
    assert torch.equal(mla_plugin.decode(**arguments), expected)


def test_queries_of_any_strides() -> None:
    arguments = call()
    transposed = arguments["q_nope_abs"].permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0)
    assert transposed.stride(-1) != 1
    check(arguments | {"q_nope_abs": transposed})
    half = torch.randn(B, S_Q, 2 * H, R + DR)[:, :, ::2]
    check(arguments | {"q_nope_abs": half[..., :R], "q_rope": half[..., R:]})


@pytest.mark.parametrize(
    "changes",
    [
        {
            "q_nope_abs": torch.randn(0, S_Q, H, R),
            "q_rope": torch.randn(0, S_Q, H, DR),
            "kv_cache": torch.randn(0, 7, R + DR),
        },
        {"kv_cache": torch.randn(B, 0, R + DR)},
        {"q_nope_abs": torch.randn(B, 0, H, R), "q_rope": torch.randn(B, 0, H, DR)},
    ],
)
def test_nothing_to_compute(changes: dict[str, Any]) -> None:
    arguments = call(**changes)
    out, lse = mla_plugin.decode(**arguments, return_lse=True)
    assert out.shape == arguments["q_nope_abs"].shape
    assert not out.any()
    assert lse.shape == (out.shape[0], H, out.shape[1])
    assert (lse == -math.inf).all()


def test_a_length_in_a_cache_without_room() -> None:
    arguments = call(kv_cache=torch.randn(B, 0, R + DR), seqlens_kv=torch.tensor([0, 2, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"seqlens_kv=\[0, 2, 0\]; the cache has room for 0 to 0 keys"):
        mla_plugin.decode(**arguments)


def test_autocast_changes_nothing() -> None:
    arguments = call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(arguments)
        out = mla_plugin.decode(**arguments)
    assert torch.equal(out, mla_plugin.decode(**arguments))


def test_float64_stays_float64() -> None:
    arguments = call(
        q_nope_abs=torch.randn(B, S_Q, H, R).double(),
        q_rope=torch.randn(B, S_Q, H, DR).double(),
        kv_cache=torch.randn(B, S_KV, R + DR).double(),
    )
    out, lse = mla_plugin.decode(**arguments, return_lse=True)
    assert lse.dtype == torch.float64
    torch.testing.assert_close(out, exact(arguments).out, atol=1e-14, rtol=1e-14)


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"softmax_scale": "0.3"}, "softmax_scale=.* is str; expected a positive number"),
    ({"softmax_scale": None}, "softmax_scale=.* is NoneType; expected a positive number"),
    ({"softmax_scale": True}, "softmax_scale=.* is bool; expected a positive number"),
    ({"softmax_scale": torch.tensor(0.3)}, r"softmax_scale is a torch.Tensor.*pass float\(softmax_scale\)"),
    ({"softmax_scale": torch.tensor(0.3, requires_grad=True)}, "it gets no gradient"),
    ({"causal": 1}, "causal=1 is int; expected True or False"),
    ({"causal": torch.tensor(True)}, r"causal=tensor\(True\) is Tensor; expected True or False"),
    ({"return_lse": None}, "return_lse=None is NoneType; expected True or False"),
    ({"backend": 5}, "backend=5 is int; expected a backend's name or None"),
    ({"backend": ["sdpa"]}, r"backend=\['sdpa'\] is list; expected a backend's name"),
    (
        {"q_nope_abs": torch.zeros(B, S_Q, H, R).numpy()},
        r"q_nope_abs is ndarray; expected a torch\.Tensor \[B, S_q, H, R\]",
    ),
    ({"q_rope": torch.zeros(B, S_Q, H, DR).numpy()}, r"q_rope is ndarray; expected a torch\.Tensor \[B, S_q, H, Dr\]"),
    ({"seqlens_kv": [1, 2, 3]}, r"seqlens_kv is list; expected a torch\.Tensor \[B\]"),
    ({"leftpad_kv": [1, 2, 3]}, r"leftpad_kv is list; expected a torch\.Tensor \[B\]"),
    (
        {"page_table": [[1], [2], [3]], "seqlens_kv": torch.ones(B, dtype=torch.int32)},
        r"page_table is list; expected a torch\.Tensor \[B, n\]",
    ),
    (
        {"kv_cache": torch.zeros(B, S_KV, R + DR).to_sparse()},
        "kv_cache has the memory layout torch.sparse_coo",
    ),
    (
        {"q_rope": torch.zeros(B, S_Q, H, DR).to_sparse()},
        "q_rope has the memory layout torch.sparse_coo; expected torch.strided",
    ),
    ({"q_nope_abs": torch.zeros(B, S_Q, H, R).to_sparse()}, "q_nope_abs has the memory layout torch.sparse_coo"),
    *(
        ({name: torch.nested.nested_tensor(list(torch.zeros(B, *size)), layout=layout)}, f"{name} is a nested tensor")
        for layout in (torch.strided, torch.jagged)
        for name, size in (("q_nope_abs", (S_Q, H, R)), ("q_rope", (S_Q, H, DR)), ("kv_cache", (S_KV, R + DR)))
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q_nope_abs": None}, TypeError, "q_nope_abs is NoneType"),
        ({"q_rope": 3}, TypeError, r"q_rope is int; expected a torch\.Tensor \[B, S_q, H, Dr\]"),
        ({"q_nope_abs": torch.randn(B, H, R)}, ValueError, r"q_nope_abs has shape \[3, 5, 16\], 3 dimensions"),
        ({"q_rope": torch.randn(B, S_Q, H + 1, DR)}, ValueError, r"differ in \[B, S_q, H\]"),
        ({"kv_cache": torch.randn(B, S_KV, 1, R + DR)}, ValueError, "Remove a head dimension of 1 with squeeze"),
        ({"kv_cache": 7}, TypeError, r"kv_cache is int; expected a tensor or a pair"),
        ({"kv_cache": (torch.randn(B, S_KV, R),)}, TypeError, "a pair"),
        ({"kv_cache": (torch.tensor(1.0), torch.randn(B, S_KV, DR))}, ValueError, r"c_kv has shape \[\], 0 dimensions"),
        (
            {"kv_cache": (torch.randn(B, S_KV, R), torch.tensor(1.0))},
            ValueError,
            r"k_rope has shape \[\], 0 dimensions",
        ),
        ({"kv_cache": (torch.randn(B, S_KV, R + 1), torch.randn(B, S_KV, DR))}, ValueError, "multiply q_nope by W_UK"),
        ({"kv_cache": (torch.randn(B, S_KV, R), torch.randn(B, S_KV, 4))}, ValueError, "Dr=8, k_rope has Dr=4"),
        ({"kv_cache": (torch.randn(B, S_KV, R), torch.randn(B, 3, DR))}, ValueError, "hold one row per token"),
        ({"kv_cache": torch.randn(B + 1, S_KV, R + DR)}, ValueError, "has 4 sequences"),
        ({"kv_cache": torch.randn(B, S_KV, R + DR).half()}, TypeError, r"c_kv torch\.float16.*cast them"),
        ({"kv_cache": torch.randn(R + DR, B, S_KV).permute(1, 2, 0)}, ValueError, "last dimension of c_kv has stride"),
        ({"softmax_scale": 0.0}, ValueError, r"softmax_scale=0\.0; expected a positive, finite number"),
        ({"softmax_scale": math.nan}, ValueError, "softmax_scale=nan"),
        ({"softmax_scale": 10**400}, ValueError, "softmax_scale=inf; expected a positive, finite number"),
        ({"batch_invariant": 1}, TypeError, "batch_invariant=1 is int; expected True or False"),
        ({"host": "nowhere"}, ValueError, "host='nowhere'; expected one of direct"),
        ({"backend": "fa9"}, ValueError, "no backend named 'fa9'"),
        ({"seqlens_kv": torch.tensor([1, 2, 3])}, TypeError, r"seqlens_kv has dtype torch\.int64; it must be int32"),
        ({"seqlens_kv": torch.tensor([1, 2], dtype=torch.int32)}, ValueError, "its first dimension must be B=3"),
        ({"seqlens_kv": torch.tensor([1, 2, 12], dtype=torch.int32)}, ValueError, "room for 0 to 11 keys"),
        ({"leftpad_kv": torch.zeros(B)}, TypeError, "leftpad_kv has dtype"),
        (
            {name: torch.tensor([0, 1, at], dtype=torch.int32) for name, at in (("seqlens_kv", 2), ("leftpad_kv", -1))},
            ValueError,
            r"leftpad_kv=\[0, 1, -1\]; expected at least 0",
        ),
        ({"leftpad_kv": torch.tensor([0, 1, -1], dtype=torch.int32)}, ValueError, "expected at least 0"),
        ({"cp_interleave": 0}, ValueError, "cp_interleave=0; expected at least 1"),
        *(
            ({"cp_interleave": given}, TypeError, "cp_interleave=.*; expected a positive int")
            for given in ("page", True, 1.0, int, torch.tensor([1, 2]))
        ),
        ({"page_table": torch.zeros(B, 2, dtype=torch.int32)}, ValueError, "page_table without seqlens_kv"),
        *((changes, TypeError, message) for changes, message in WRONG_TYPES),
        ({"softmax_scale": math.inf}, ValueError, "softmax_scale=inf; expected a positive, finite number"),
        ({"q_nope_abs": torch.randn(B, S_Q, 0, R), "q_rope": torch.randn(B, S_Q, 0, DR)}, ValueError, "num_heads=0"),
        ({"q_nope_abs": torch.randn(B, S_Q, H, 0)}, ValueError, "at least 1: multiply q_nope by W_UK"),
        ({"kv_cache": torch.randn(B, 0, R + DR), "backend": "fa9"}, ValueError, "no backend named 'fa9'"),
        (
            {"q_nope_abs": torch.randn(B, 0, H, R), "q_rope": torch.randn(B, 0, H, DR), "backend": "fa9"},
            ValueError,
            "no backend named 'fa9'",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mla_plugin.decode(**call(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seqlens_kv": torch.tensor([11, 1, 17], dtype=torch.int32)}, "room for 0 to 16 keys"),
        ({"page_table": torch.full((B, 4), 20, dtype=torch.int32)}, r"page_table\[0\] .*has pages 0 to 19"),
        # the last page of a sequence, of which three rows of four are used
        (
            {"page_table": torch.tensor([[0, 1, 20, 3]] * B, dtype=torch.int32)},
            r"page_table\[0\] begins with \[0, 1, 20\]",
        ),
        ({"kv_cache": torch.randn(20, 0, R + DR)}, "page_size 0"),
    ],
)
def test_pages_that_are_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mla_plugin.decode(**paged_call() | changes)


@pytest.mark.parametrize("place", ["q_nope_abs", "q_rope", "kv_cache"])
def test_there_is_no_gradient(place: str) -> None:
    arguments = call(kv_cache=torch.randn(B, S_KV, R + DR))
    arguments[place].requires_grad_()
    with pytest.raises(NotImplementedError, match=r"under torch\.no_grad\(\)"):
        mla_plugin.decode(**arguments)
    with torch.no_grad():
        assert not mla_plugin.decode(**arguments).requires_grad


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("make", [call, paged_call])
def test_it_is_traced_whole(make: Any, return_lse: bool) -> None:
    arguments = make(return_lse=return_lse)
    compiled = torch.compile(mla_plugin.decode, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(**arguments), mla_plugin.decode(**arguments)
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)


def test_lengths_on_the_host_are_traced_too() -> None:
    arguments = paged_call()
    wanted = mla_plugin.decode(**arguments)
    arguments["seqlens_kv"] = DecodeLengths([11, 1, 16], seqlens_kv=arguments["seqlens_kv"])
    compiled = torch.compile(mla_plugin.decode, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments), wanted)


@pytest.mark.parametrize("return_lse", [True, False])
def test_the_operator_keeps_its_word(return_lse: bool) -> None:
    arguments = paged_call()
    cache = arguments["kv_cache"]
    torch.library.opcheck(
        decode_ops.decode_operator,
        (
            *(arguments["q_nope_abs"], arguments["q_rope"], cache[..., :R], cache[..., R:], SCALE, True, return_lse),
            *(arguments["page_table"], arguments["seqlens_kv"], None, None, "plain", "direct", None, False),
        ),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One process is a group too."""
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.device_mesh.init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("place", ["q_nope_abs", "q_rope", "kv_cache", "seqlens_kv"])
def test_a_distributed_tensor_is_told_how_to_come(mesh: Any, place: str) -> None:
    """Also after a plain call of the same layout."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    arguments = call(kv_cache=torch.randn(B, S_KV, R + DR), seqlens_kv=torch.tensor([1, 2, 3], dtype=torch.int32))
    mla_plugin.decode(**arguments)
    arguments[place] = distribute_tensor(arguments[place], mesh, [Replicate()])
    with pytest.raises(TypeError, match=r"is a DTensor.*torch\.distributed\.tensor.*local_map.*to_local\(\)"):
        mla_plugin.decode(**arguments)
    arguments[place] = arguments[place].to_local()
    check(arguments)


def test_the_operators_arguments() -> None:
    """They are made of the fields of DecodeTensors; traced programs that were kept hold them in this order."""
    assert str(decode_ops.decode_operator._schema) == (
        "mla_plugin::decode(Tensor q_nope_abs, Tensor q_rope, Tensor c_kv, Tensor k_rope, float softmax_scale, "
        "bool causal, bool return_lse, Tensor? page_table, Tensor? seqlens_kv, Tensor? leftpad_kv, "
        "Tensor? kv_scale, str kv_cache_format, str host, str? backend, bool batch_invariant) "
        "-> (Tensor out, Tensor lse)"
    )


class Other:
    """A backend that gives what it is told to give."""

    def __init__(self, output: Any) -> None:
        self.output = output
        self.asked = 0
        self.ran: list[tuple[Any, DecodeTensors]] = []

    @mla_plugin.hookimpl
    def select_backend(self, request: Any, platform: Any) -> Accepted:
        self.asked += 1
        return Accepted(priority=1)

    @mla_plugin.hookimpl
    def forward(self, plan: Any, tensors: Any) -> Any:
        self.ran.append((plan, tensors))
        return self.output


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Any:
    plugin = Other(getattr(request, "param", None))
    get_manager().register(plugin, "other")
    yield plugin
    get_manager().unregister("other")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "returned NoneType, not DecodeOutput"),
        (DecodeOutput(torch.zeros(1), None), r"returned out as \(1,\)"),
        (DecodeOutput(torch.zeros(B, S_Q, H, R), None), "lse as None"),
        (DecodeOutput(torch.zeros(B, S_Q, H, R), torch.zeros(B, S_Q, H)), r"lse as \(3, 2, 5\)"),
        (DecodeOutput(None, None), "returned out as NoneType"),  # type: ignore[arg-type]
        (DecodeOutput(torch.zeros(B, S_Q, H, R), "lse"), "lse as str"),  # type: ignore[arg-type]
        (DecodeOutput(torch.zeros(B, S_Q, H, R), torch.zeros(B, H, S_Q).half()), r"lse as \(3, 5, 2\) torch\.float16"),
        (DecodeOutput(torch.zeros(B, S_Q, H, R, device="meta"), torch.zeros(B, H, S_Q)), r"float32 on meta .*on cpu"),
    ],
    indirect=["other"],
)
def test_a_backend_that_breaks_the_contract_is_named(other: Other, message: str) -> None:
    with pytest.raises((TypeError, RuntimeError), match=rf"'other'.*{message}"):
        mla_plugin.decode(**call(), return_lse=True)


@pytest.mark.parametrize("empty", ["queries", "cache", "pages"])
def test_no_backend_is_called_where_there_is_nothing_to_compute(other: Other, empty: str) -> None:
    arguments = {
        "queries": call(q_nope_abs=torch.randn(B, 0, H, R), q_rope=torch.randn(B, 0, H, DR)),
        "cache": call(kv_cache=torch.randn(B, 0, R + DR)),
        "pages": call(
            kv_cache=torch.randn(0, PAGE, R + DR),
            page_table=torch.zeros(B, 2, dtype=torch.int32),
            seqlens_kv=torch.zeros(B, dtype=torch.int32),
        ),
    }[empty]
    other.output = "nothing that a backend may return"
    out = mla_plugin.decode(**arguments)
    assert other.asked == 1
    assert out.shape == arguments["q_nope_abs"].shape
    assert not out.any()


def test_a_layout_is_decided_on_once_and_a_variable_takes_effect(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    other.output = DecodeOutput(torch.ones(B, S_Q, H, R), None)
    for _ in range(3):
        assert mla_plugin.decode(**call()).eq(1).all()
    assert other.asked == 1
    monkeypatch.setenv("MLA_PLUGIN_BLOCK", "other")
    check(call())
    monkeypatch.delenv("MLA_PLUGIN_BLOCK")
    assert mla_plugin.decode(**call()).eq(1).all()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_batch_invariance_reaches_the_plan(other: Other, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    other.output = DecodeOutput(torch.ones(B, S_Q, H, R), None)
    decode = mla_plugin.decode
    if is_compiled:
        decode = torch.compile(mla_plugin.decode, backend="eager", fullgraph=True)
    decode(**call())
    decode(**call(), batch_invariant=True)
    monkeypatch.setenv("MLA_PLUGIN_BATCH_INVARIANT", "1")
    decode(**call())
    assert [plan.request.batch_invariant for plan, _ in other.ran] == [False, True, True]


def test_lengths_of_another_kind_are_decided_again(other: Other) -> None:
    """And those that round to the same are not."""
    other.output = DecodeOutput(torch.ones(B, S_Q, H, R), None)
    for lengths in ([8, 8, 8], [9, 9, 9], [1, 1, 11], [1, 1, 10]):
        mla_plugin.decode(**call(seqlens_kv=DecodeLengths(lengths, device="cpu")))
    assert [tuple(plan.request.profile) for plan, _ in other.ran] == [(8, 1), (8, 1), (4, 2), (4, 2)]
    assert other.asked == 2
    mla_plugin.decode(**call())
    assert other.ran[-1][0].request.profile == (8, 1)
    mla_plugin.decode(**call(seqlens_kv=torch.tensor([8, 8, 8], dtype=torch.int32)))
    assert other.ran[-1][0].request.profile is None


def test_batch_invariance_over_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_api, "_group_name", lambda group: "0")
    with pytest.raises(ValueError, match="batch_invariant=True with cp_group"):
        mla_plugin.decode(**paged_call(), cp_group="group", batch_invariant=True)


@pytest.mark.parametrize(("seqlen_q", "causal", "wanted"), [(1, True, False), (2, True, True), (2, False, False)])
def test_a_single_query_sees_every_key(other: Other, seqlen_q: int, causal: bool, wanted: bool) -> None:
    """It is no causal request, which fewer backends take."""
    other.output = DecodeOutput(torch.ones(B, seqlen_q, H, R), None)
    queries = {"q_nope_abs": torch.randn(B, seqlen_q, H, R), "q_rope": torch.randn(B, seqlen_q, H, DR)}
    mla_plugin.decode(**call(**queries, causal=causal))
    ((plan, tensors),) = other.ran
    assert plan.request.causal is tensors.causal is wanted


def test_where_rows_start_is_part_of_the_request() -> None:
    memory = torch.zeros(B * S_KV * (R + DR) + 1)
    straight, shifted = (x.view(B, S_KV, R + DR) for x in (memory[:-1], memory[1:]))
    wide = torch.zeros(B, S_KV, R + DR + 1)[..., : R + DR]
    assert wide.stride(1) % 4
    for cache, wanted in ((straight, True), (shifted, False), (wide, False)):
        tensors = DecodeTensors(
            torch.zeros(B, 1, H, R), torch.zeros(B, 1, H, DR), cache[..., :R], cache[..., R:], SCALE
        )
        assert DecodeRequest.of(tensors).has_aligned_rows == wanted


def test_a_cache_that_moves_off_16_bytes_is_decided_again(other: Other) -> None:
    other.output = DecodeOutput(torch.ones(B, S_Q, H, R), None)
    memory = torch.randn(B * S_KV * (R + DR) + 1)
    for cache in (memory[:-1], memory[1:], memory[:-1]):
        mla_plugin.decode(**call(kv_cache=cache.view(B, S_KV, R + DR)))
    assert other.asked == 2


def test_a_growing_cache_is_decided_on_rarely(other: Other) -> None:
    other.output = DecodeOutput(torch.ones(B, S_Q, H, R), None)
    for length in range(100, 140):
        mla_plugin.decode(**call(kv_cache=torch.zeros(B, length, R + DR)))
    assert other.asked == 2  # up to 128 keys, and beyond


def test_the_memory_of_layouts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_layout, "_MAX_LAYOUTS", 5)
    decode_layout._known.clear()
    for length in range(1, 20):
        mla_plugin.decode(**call(kv_cache=torch.zeros(B, length, R + DR)))
        assert len(decode_layout._known) <= 5
