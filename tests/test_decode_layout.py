"""The key under which decode keeps what it knows of a layout: two calls that differ in one field of it alone.

Each pair of calls is run twice: as it is, where the second call must do as it does in a fresh process, and with the
field left out of the key, where it must not. So a field that nothing needs fails here, and a pair that proves nothing.
"""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mla_plugin
from mla_plugin import DecodeLengths, DecodeOutput, DecodeTensors
from mla_plugin.arguments import decode_layout
from mla_plugin.arguments.decode_layout import TENSOR_ATTRIBUTES, DecodeCall, DecodeLayout, known_of, layout_of
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import get_manager
from mla_plugin.hooks.types import Accepted

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, S_Q, H, R, DR, PAGES, PAGE = 2, 2, 3, 16, 8, 8, 4
Call = dict[str, Any]


class Marked(torch.Tensor):
    """Stands for a DTensor, whose layout is that of the whole tensor, which no process holds."""


class Honest:
    """A backend that looks whether the plan, and what was kept, are for the request that the tensors make."""

    @mla_plugin.hookimpl
    def select_backend(self, request: Any, platform: Any) -> Accepted:
        return Accepted(priority=-1)

    @mla_plugin.hookimpl
    def forward(self, plan: Any, tensors: DecodeTensors) -> DecodeOutput:
        assert plan.request == DecodeRequest.of(tensors, host=plan.request.host)
        q = tensors.q_nope_abs
        aligned = decode_layout.starts_aligned(q, tensors.q_rope)
        assert decode_layout.known_of(tensors).kept.setdefault("aligned", aligned) == aligned
        return DecodeOutput(torch.zeros_like(q), q.new_zeros(B, H, S_Q) if tensors.return_lse else None)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode_layout, "_known", {})
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(DTensor=Marked))
    get_manager().register(Honest(), "honest")
    yield
    get_manager().unregister("honest")


def call(**changes: Any) -> Call:
    """A paged call with all seven tensors, by the kernels."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    def whole(values: list[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    arguments = {
        "q_nope_abs": draw(B, S_Q, H, R),
        "q_rope": draw(B, S_Q, H, DR),
        "c_kv": draw(PAGES, PAGE, R),
        "k_rope": draw(PAGES, PAGE, DR),
        "page_table": whole([[3, 1, 4], [5, 2, 0]]),
        "seqlens_kv": whole([12, 7]),
        "leftpad_kv": whole([1, 0]),
        "softmax_scale": 0.3,
        "causal": True,
        "return_lse": True,
        "backend": "triton",
    }
    return arguments | changes


def tensors_of(arguments: Call) -> DecodeTensors:
    given = {name: x for name, x in arguments.items() if name in DecodeTensors._fields}
    if isinstance(given["seqlens_kv"], DecodeLengths):
        given |= {"lengths": given["seqlens_kv"], "seqlens_kv": given["seqlens_kv"].seqlens_kv}
    return DecodeTensors(**given)


def outcome(arguments: Call) -> Any:
    """The results, or the error."""
    given = dict(arguments)
    kv_cache = (given.pop("c_kv"), given.pop("k_rope"))
    try:
        return mla_plugin.decode(kv_cache=kv_cache, **given)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def by_hand(arguments: Call) -> Any:
    """The kernels' hook without the entry, which takes no other way for what is not a plain tensor."""
    from mla_plugin.plugins import triton

    tensors = tensors_of(arguments)
    try:
        return triton.forward(mla_plugin.resolve(DecodeRequest.of(tensors), backend="triton"), tensors)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


RUNS: dict[str, Callable[[Call], Any]] = dict.fromkeys(
    (*(f"{x}.{y}" for x in DecodeTensors._fields[:4] for y in ("type", "device")), "kv_cache_format"), by_hand
)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(found, str) or isinstance(wanted, str):
        return type(found) is type(wanted) and found == wanted
    found, wanted = ((x,) if isinstance(x, torch.Tensor) else tuple(x) for x in (found, wanted))
    return len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def smaller(x: torch.Tensor) -> torch.Tensor:
    """One less of what no other tensor has less of, in the same memory: queries' heads, a cache's rows, sequences."""
    place = x.dim() - 2 if x.dim() > 2 else 0
    shape = [size - (dimension == place) for dimension, size in enumerate(x.shape)]
    return x.as_strided(shape, x.stride())


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values, elsewhere in memory; read by the strides of x the result is other values, in bounds."""
    if x.dim() > 2:
        first = x.dim() - 3
        return x.transpose(first, first + 1).contiguous().transpose(first, first + 1)
    return torch.stack([x, x], -1).flatten(-2)[..., ::2] if x.dim() == 1 else torch.cat([x, x], -1)[:, : x.shape[1]]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "type": lambda x: x.as_subclass(Marked),
    "shape": smaller,
    "stride": strided,
    "dtype": lambda x: x.double() if x.is_floating_point() else x.long(),
    "device": lambda x: torch.empty_like(x, device="meta"),
}


def off_16_bytes(x: torch.Tensor) -> torch.Tensor:
    memory = torch.empty(x.numel() + 1, device=DEVICE)[1:].view(x.shape)
    return memory.copy_(x)


def columns() -> Call:
    """A cache of one tensor."""
    cache = torch.zeros(PAGES, PAGE, R + DR, device=DEVICE)
    return {"c_kv": cache[..., :R], "k_rope": cache[..., R:]}


def quantised(**changes: Any) -> Call:
    """A cache in bytes."""
    cache = torch.arange(PAGES * PAGE * (R + DR), device=DEVICE).remainder(120).to(torch.uint8).view(PAGES, PAGE, -1)
    scale = {"kv_scale": torch.tensor(0.1, device=DEVICE), "kv_cache_format": "fp8"}
    return call(c_kv=cache[..., :R], k_rope=cache[..., R:], **(scale | changes))


FLAGS: dict[str, tuple[Call, Call]] = {
    "starts_aligned": (call(backend="honest"), call(backend="honest", c_kv=off_16_bytes(call()["c_kv"]))),
    "queries_aligned": (call(backend="honest"), call(backend="honest", q_rope=off_16_bytes(call()["q_rope"]))),
    "is_joined": (
        call(backend="honest", **columns()),
        call(backend="honest", **(columns() | {"k_rope": columns()["k_rope"]})),
    ),
    "causal": (call(), call(causal=False)),
    "return_lse": (call(backend="honest", return_lse=False), call(backend="honest")),
    "kv_cache_format": (quantised(), quantised(kv_cache_format="plain")),
}
HINTS = typing.get_type_hints(DecodeLayout)
FIELDS = [
    *(
        f"{name}.{attribute}"
        for name, kind in HINTS.items()
        if kind not in (bool, str)
        for attribute in TENSOR_ATTRIBUTES
    ),
    *(name for name, kind in HINTS.items() if kind in (bool, str)),
]


def pair(field: str) -> tuple[Call, Call]:
    """Two calls whose layouts differ in the field."""
    if field in FLAGS:
        return FLAGS[field]
    name, attribute = field.split(".")
    return call(), call(**{name: CHANGES[attribute](call()[name])})


def flat(layout: DecodeLayout) -> dict[str, object]:
    """Values by the names in FIELDS."""
    values: dict[str, object] = {}
    for name, value in layout._asdict().items():
        if isinstance(value, tuple):
            values |= {f"{name}.{a}": v for a, v in zip(TENSOR_ATTRIBUTES, value, strict=True)}
        else:
            values[name] = value
    return values


@pytest.mark.parametrize("field", FIELDS)
def test_a_call_that_differs_in_one_field(field: str) -> None:
    first, second = pair(field)
    before, after = (flat(layout_of(tensors_of(arguments))) for arguments in (first, second))
    assert list(before) == FIELDS
    assert [name for name in FIELDS if before[name] != after[name]] == [field]
    run = RUNS.get(field, outcome)
    wanted = run(second)
    decode_layout._known.clear()
    assert not isinstance(run(first), str)
    assert same(run(second), wanted)


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_can_be_left_out(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair(field)
    run = RUNS.get(field, outcome)
    wanted = run(second)
    decode_layout._known.clear()

    def without_the_field(tensors: DecodeTensors) -> Any:
        return tuple((name, value) for name, value in flat(layout_of(tensors)).items() if name != field)

    monkeypatch.setattr(decode_layout, "layout_of", without_the_field)
    assert not isinstance(run(first), str)
    assert not same(run(second), wanted)


def test_the_kernels_entry_has_the_same_key() -> None:
    from mla_plugin.kernels import mla_decode_attention

    given = call()
    out, lse = outcome(given)
    (known,) = decode_layout._known.values()
    kept = dict(known.kept)
    options = {name: given[name] for name in ("softmax_scale", "page_table", "seqlens_kv", "leftpad_kv", "return_lse")}
    found = mla_decode_attention(
        *(given[name] for name in ("q_nope_abs", "q_rope", "c_kv", "k_rope")), is_causal=True, **options
    )
    assert same(found, (out, lse))
    assert list(decode_layout._known.values()) == [known]
    assert known.kept == kept
    assert list(kept) == ["triton"]


def test_the_layout_is_looked_up_once_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[DecodeLayout] = []
    monkeypatch.setattr(decode_layout, "layout_of", lambda x: looked_up.append(layout_of(x)) or looked_up[-1])
    for _ in range(3):
        outcome(call())
    assert len(looked_up) == 3


def test_what_is_known_belongs_to_these_tensors_alone() -> None:
    """A backend that passes other tensors on, with the plan that it got, must not run by the first ones' launches."""
    from mla_plugin.plugins import triton

    first = DecodeCall(*tensors_of(call()))
    known = known_of(first)
    assert first.known is known
    assert known_of(first) is known
    plan = mla_plugin.resolve(DecodeRequest.of(first), backend="triton")
    triton.forward(plan, first)
    other = first._replace(q_nope_abs=strided(first.q_nope_abs)[:, :1], q_rope=strided(first.q_rope)[:, :1])
    assert isinstance(other, DecodeCall)
    assert other.known is None
    found = triton.forward(plan, other)
    alone = call(q_nope_abs=first.q_nope_abs[:, :1], q_rope=first.q_rope[:, :1], causal=False)
    assert same(found, outcome(alone))


def test_hooks_may_be_called_by_hand() -> None:
    """With a plan that was made without tensors, in any order of layouts."""
    from mla_plugin.plugins import triton

    calls = [call(), call(causal=False), call(q_rope=strided(call()["q_rope"])), call(backend="honest")]
    plan = mla_plugin.resolve(DecodeRequest.of(tensors_of(calls[0])), backend="triton")
    for arguments in (*calls, *calls):
        wanted = outcome(arguments | {"backend": "triton"})
        assert same(triton.forward(plan, tensors_of(arguments)), wanted)


@pytest.mark.parametrize("names", [("q_nope_abs",), ("q_rope",), ("q_nope_abs", "q_rope")])
def test_backends_get_queries_whose_last_dimension_is_contiguous(names: tuple[str, ...]) -> None:
    given = call()
    wanted = outcome(given)
    turned = {name: given[name].transpose(2, 3).contiguous().transpose(2, 3) for name in names}
    assert all(x.stride(-1) != 1 for x in turned.values())
    for _ in range(2):
        assert same(outcome(given | turned), wanted)


def deciding(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(host, backend) of each call that a backend ran, by the plan that it got."""
    ran: list[tuple[str, str]] = []

    class Second(Honest):
        @mla_plugin.hookimpl
        def forward(self, plan: Any, tensors: DecodeTensors) -> DecodeOutput:
            ran.append((plan.request.host, plan.forward_backend))
            return super().forward(plan, tensors)

    get_manager().unregister("honest")
    for name in ("honest", "second"):
        get_manager().register(Second(), name)
    return ran


def test_a_decision_is_for_one_host_backend_environment_and_set_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = deciding(monkeypatch)
    try:
        outcome(call(backend="honest"))
        outcome(call(backend="second"))
        outcome(call(backend="honest", host="megatron"))
        assert ran == [("direct", "honest"), ("direct", "second"), ("megatron", "honest")]
        ran.clear()
        monkeypatch.setenv("MLA_PLUGIN_BACKEND", "honest")
        outcome(call(backend=None))
        monkeypatch.setenv("MLA_PLUGIN_BACKEND", "second")
        outcome(call(backend=None))
        assert ran == [("direct", "honest"), ("direct", "second")]
    finally:
        get_manager().unregister("second")
    assert "no backend named 'second'" in outcome(call(backend=None))


def test_known_layouts_keep_no_tensor_alive() -> None:
    import gc
    import weakref

    arguments = call()
    tensors = [weakref.ref(x) for x in arguments.values() if isinstance(x, torch.Tensor)]
    outcome(arguments)
    assert decode_layout._known
    del arguments
    gc.collect()
    assert all(tensor() is None for tensor in tensors)
