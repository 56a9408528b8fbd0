"""Our calls bind to the functions of every recorded release of FlashAttention, FlashInfer and FlashMLA.

They are kept in data/signatures.json.

A function of the recorded signature replaces the library's, so Python itself checks whether a call fits it, and the
test whether each argument arrived under its name. data/record_signatures.py says how the file is made.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from mla_plugin import Platform
from mla_plugin.conformance import Case, DecodeCase
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.types import Refused
from mla_plugin.plugins import fa4, flashinfer
from mla_plugin.plugins.fa2 import providers as fa2
from mla_plugin.plugins.fa3 import providers as fa3
from mla_plugin.plugins.flashinfer import plan as planning
from mla_plugin.plugins.flashmla import providers as flashmla
from mla_plugin.plugins.shared.flash_family import Options, below_dispatcher
from tests.plugins import flash_attention_2, flash_attention_3, flash_attention_4
from tests.plugins.data import record_flash_mla
from tests.plugins.data.record_signatures import LIBRARIES
from tests.plugins.flash_libraries import install
from tests.plugins.flashinfer_emulation import hopper

RECORDED = json.loads((Path(__file__).parent / "data/signatures.json").read_text())
NEUTRAL = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}
"""What switches off an argument that has no default."""


def releases(library: str) -> list[str]:
    """Every recorded one."""
    found = {release for kinds in RECORDED[library].values() for each in kinds.values() for release in each}
    return sorted(found)


def stand_ins(library: str, release: str, answer: Callable[[str, dict[str, Any]], Any]) -> dict[str, Any]:
    """Functions of the signatures that the release has; ``answer`` is given the function's name and its arguments."""
    functions = {}
    for name, signatures in RECORDED[library].items():
        if "::" in name:
            continue
        for text in [text for text, having in signatures.items() if release in having]:
            scope: dict[str, Any] = {"answer": answer}
            exec(f"def function{text}:\n    return answer({name!r}, locals())", scope)
            functions[name] = scope["function"]
    return functions


def default_of(library: str, release: str, function: str, argument: str) -> Any:
    (text,) = [text for text, having in RECORDED[library][function].items() if release in having]
    scope: dict[str, Any] = {}
    exec(f"def function{text}: pass", scope)
    code, given = scope["function"].__code__, scope["function"].__defaults__ or ()
    named = dict(zip(code.co_varnames[code.co_argcount - len(given) : code.co_argcount], given, strict=True))
    return (named | (scope["function"].__kwdefaults__ or {}) | NEUTRAL).get(argument)


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.shape == wanted.shape and torch.equal(found, wanted)
    return type(found) is type(wanted) and found == wanted


class Calls:
    """What the stand-ins of one release were called with."""

    def __init__(self, library: str, release: str) -> None:
        self.library, self.release = library, release
        self.made: list[tuple[str, dict[str, Any]]] = []
        self.functions = stand_ins(library, release, self._answer)

    def _answer(self, name: str, given: dict[str, Any]) -> Any:
        self.made.append((name, given))
        if "bwd" in name or "backward" in name:
            return tuple(torch.zeros_like(given[x]) for x in "qkv")
        rows = given["q"].shape[:-1]
        lse = torch.zeros(rows[1], rows[0]) if len(rows) == 2 else torch.zeros(rows[0], rows[2], rows[1])
        return torch.zeros(*rows, given["v"].shape[-1], dtype=given["q"].dtype), lse

    def check(self, function: str, wanted: Mapping[str, Any]) -> None:
        """One call, of this function: what is wanted arrived under its name, and everything else is at its default."""
        ((name, given),) = self.made
        self.made.clear()
        assert name == function
        missing = {"q", "k", "v", "softmax_scale"} - set(given)
        assert not missing
        for argument, found in given.items():
            value = wanted[argument] if argument in wanted else default_of(self.library, self.release, name, argument)
            assert same(found, value), f"{name}: {argument} is {found}, not {value}"


def packed_options() -> Options:
    offsets = [torch.tensor(x, dtype=torch.int32) for x in ([0, 7, 12], [0, 9, 13])]
    used = [torch.tensor(x, dtype=torch.int32) for x in ([6, 5], [9, 2])]
    return Options(0.37, False, (5, 3), 7, 9, *offsets, *used, deterministic=True)


DENSE = Options(0.37, True, (5, 0), 7, 9, deterministic=True)


def drawn(options: Options) -> tuple[torch.Tensor, ...]:
    """q, k, v, out, dout and lse, of different values."""
    rows = [(12,), (13,)] if options.cu_seqlens_q is not None else [(2, 7), (2, 9)]
    shapes = [(*rows[0], 4, 64), *[(*rows[1], 2, 64)] * 2, *[(*rows[0], 4, 64)] * 2]
    lse = torch.randn(4, 12) if len(rows[0]) == 1 else torch.randn(2, 4, 7)
    return *(torch.randn(shape, dtype=torch.bfloat16) for shape in shapes), lse


def wanted(options: Options, tensors: tuple[torch.Tensor, ...], *, is_backward: bool) -> dict[str, Any]:
    """Every spelling of every argument that we give a value."""
    q, k, v, out, dout, lse = tensors
    found: dict[str, Any] = {"q": q, "k": k, "v": v, "softmax_scale": options.softmax_scale}
    found |= {"causal": options.causal, "is_causal": options.causal, "window_size": options.window_size}
    if options.cu_seqlens_q is not None:
        found |= options.offsets
    if is_backward:
        left, right = options.window_size
        found |= {"out": out, "dout": dout, "lse": lse, "softmax_lse": lse, "deterministic": options.deterministic}
        found |= {"window_size_left": left, "window_size_right": right}
    return found


def sides(options: Options) -> dict[str, int]:
    """The window as functions below the public ones take it."""
    return dict(zip(("window_size_left", "window_size_right"), options.window_size, strict=True))


BOTH = pytest.mark.parametrize("options", [DENSE, packed_options()], ids=["dense", "packed"])


@BOTH
@pytest.mark.parametrize("has_inner", [False, True])
@pytest.mark.parametrize("release", releases("fa2"))
def test_flash_attn(release: str, has_inner: bool, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function below autograd, and by the public one where a release should not have that."""
    assert fa2.find(Platform("cuda", (8, 0), (("flash-attn", release),))).name == f"flash-attn {release}"
    calls, tensors = Calls("fa2", release), drawn(options)
    place = "varlen_" if options.cu_seqlens_q is not None else ""
    inner, given = f"_flash_attn_{place}forward", wanted(options, tensors, is_backward=False)
    if not has_inner:
        del calls.functions[inner]
    install(monkeypatch, "flash_attn.flash_attn_interface", **calls.functions)
    library = fa2.FlashAttn(release)
    library.forward_with(options)(*tensors[:3])
    if has_inner:
        calls.check(inner, given | sides(options) | {"return_softmax": False})
    else:
        calls.check(f"flash_attn_{place}func", given | {"return_attn_probs": True})
    q, k, v, out, dout, lse = tensors
    gradients = library.backward(dout, q, k, v, out, lse, options)
    given = wanted(options, tensors, is_backward=True)
    written = [calls.made[0][1][name] for name in ("dq", "dk", "dv")]
    assert [x.data_ptr() for x in written] == [x.data_ptr() for x in gradients]
    calls.made[0][1].update(dict.fromkeys(("dq", "dk", "dv")))
    calls.check(f"_flash_attn_{place}backward", given)


@BOTH
@pytest.mark.parametrize("release", releases("fa3"))
def test_flash_attn_3(release: str, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, tensors = Calls("fa3", release), drawn(options)
    install(monkeypatch, "flash_attn_interface", **calls.functions)
    library = next(x for x in fa3.PROVIDERS if x.distribution == "flash-attn-3")
    is_packed = options.cu_seqlens_q is not None
    lengths = {} if not is_packed else options.named("seqused_q", "seqused_k")
    given = wanted(options, tensors, is_backward=False) | lengths | {"return_attn_probs": True}
    library.forward(*tensors[:3], options)
    calls.check(f"flash_attn_{'varlen_' if is_packed else ''}func", given)
    q, k, v, out, dout, lse = tensors
    gradients = dict(zip(("dq", "dk", "dv"), (torch.randn_like(x) for x in (q, k, v)), strict=True))
    library.backward(dout, q, k, v, out, lse, tuple(gradients.values()), options)  # type: ignore[arg-type]
    given = wanted(options, tensors, is_backward=True) | gradients
    given |= {"sequed_q": options.seqused_q, "sequed_k": options.seqused_k}  # so it is spelt there
    given |= options.named("max_seqlen_q", "max_seqlen_k")
    calls.check("_flash_attn_backward", given)


def test_what_an_operator_runs_is_called_without_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    made = torch.library.custom_op("mla_plugin_test::below", mutates_args=())(function)
    assert below_dispatcher(made) is below_dispatcher(function) is function


class Schema:
    """Stands in for an operator of a recorded schema: it keeps what it is called with, by name."""

    def __init__(self, name: str, text: str, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.default, self.made = self, list[dict[str, Any]]()
        self._schema, self._answer = torch._C.parse_schema(name + text), answer

    def __call__(self, *values: Any) -> Any:
        given = dict(zip((x.name for x in self._schema.arguments), values, strict=True))
        self.made.append(given)
        return self._answer(given)

    def check(self, wanted: Mapping[str, Any]) -> None:
        """One call: what is wanted arrived under its name, and everything else changes nothing."""
        (given,) = self.made
        missing = wanted.keys() - given.keys()
        assert not missing
        neutral = {x.name: x.default_value if x.has_default_value() else None for x in self._schema.arguments}
        for argument, found in given.items():
            value = wanted.get(argument, neutral[argument])
            assert same(found, value), f"{argument} is {found}, not {value}"


@BOTH
@pytest.mark.parametrize("forward", RECORDED["fa3"]["flash_attn_3::fwd"])
@pytest.mark.parametrize("backward", RECORDED["fa3"]["flash_attn_3::bwd"])
def test_flash_attn_3s_operators(
    forward: str, backward: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, out, dout, lse = drawn(options)
    operators = Schema("fwd", forward, lambda _: (out, lse, None, None)), Schema("bwd", backward, lambda _: ())
    namespace = SimpleNamespace(**dict(zip(("fwd", "bwd"), operators, strict=True)))
    monkeypatch.setattr(torch.ops, "flash_attn_3", namespace, raising=False)
    install(monkeypatch, "flash_attn_interface")
    library = next(x for x in fa3.PROVIDERS if x.distribution == "flash-attn-3")
    packed = {} if options.cu_seqlens_q is None else options.offsets | options.named("seqused_q", "seqused_k")
    common = packed | sides(options) | {"softmax_scale": options.softmax_scale, "is_causal": options.causal}
    results = library.forward(q, k, v, options)
    assert results[0] is out
    assert results[1] is lse
    operators[0].check(common | {"q": q, "k": k, "v": v, "num_splits": 1})
    gradients = dict(zip(("dq", "dk", "dv"), (torch.randn_like(x) for x in (q, k, v)), strict=True))
    library.backward(dout, q, k, v, out, lse, tuple(gradients.values()), options)  # type: ignore[arg-type]
    given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "deterministic": True}
    operators[1].check(common | gradients | given)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("release", releases("fa4"))
def test_flash_attn_4(release: str, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls("fa4", release)
    install(monkeypatch, "flash_attn.cute.interface", **calls.functions)
    lengths: dict[str, Any] = {"seqlens_q": (7, 5), "seqlens_kv": (9, 4)} if is_packed else {"seqlens_q": (7, 7)}
    lengths |= {} if is_packed else {"seqlens_kv": (9, 9)}
    case = Case("", "thd" if is_packed else "bshd", torch.bfloat16, **lengths, head_dim_qk=64, head_dim_v=64)
    mask = {"attn_mask_type": "padding"} if is_packed else {}
    case = Case(**(vars(case) | mask | {"window_size": (5, 3), "deterministic": True, "softmax_scale": 0.37}))
    platform = Platform("cuda", (9, 0), (("flash-attn-4", release),), (9, 13, 0), "13.0")
    request, tensors, (dout, _) = case.request(), case.tensors(), case.cotangents()
    assert not isinstance(fa4.select_backend(request.replace(device_type="cuda"), platform), Refused)
    plan = Plan(request, platform, "fa4", "fa4")
    output = fa4.forward(plan, tensors)
    options = Options(0.37, False, (5, 3), 7, 9, tensors.cu_seqlens_q, tensors.cu_seqlens_kv, deterministic=True)
    if not is_packed:
        options = Options(0.37, False, (5, 3), 7, 9, deterministic=True)
    results = (tensors.q, tensors.k, tensors.v, output.out, dout, output.lse)
    given = wanted(options, results, is_backward=False)
    calls.check(f"flash_attn_{'varlen_' if is_packed else ''}func", given | {"return_lse": True})
    fa4.backward(plan, Residuals(tensors, output.out, output.lse), dout, None)
    calls.check("_flash_attn_bwd", wanted(options, results, is_backward=True))


@pytest.mark.parametrize("release", releases("flashinfer"))
def test_flashinfer(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, dict[str, Any]] = {}

    def answer(name: str, given: dict[str, Any]) -> Any:
        made[name] = given
        if name == "MLAPlanMetadata.csr":
            return [given[x] for x in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")]
        return (given["out"], torch.zeros(8, 16)) if name.endswith("run") else None

    functions = stand_ins("flashinfer", release, answer)
    members: dict[str, dict[str, Any]] = {}
    for name, function in functions.items():
        of, _, method = name.partition(".")
        members.setdefault(of, {})[method] = classmethod(function) if method == "csr" else function
    install(monkeypatch, "flashinfer.mla", **{name: type(name, (), given) for name, given in members.items()})
    monkeypatch.setattr(planning, "_idle", planning.defaultdict(list))
    case = DecodeCase("", torch.bfloat16, (9, 5), 4, 16, 512, 64, page_size=64, has_host_lengths=True)
    tensors = case.tensors("cpu", torch.Generator().manual_seed(0), 1.0)
    assert not isinstance(
        flashinfer.select_backend(case.request("cpu").replace(device_type="cuda"), hopper(release)), Refused
    )
    planning.run("fa3", tensors)
    first, plan, run = (made[f"BatchMLAPagedAttentionWrapper.{name}"] for name in ("__init__", "plan", "run"))
    assert first["backend"] == "fa3"
    assert first["use_cuda_graph"] is True
    assert first["kv_len_arr"].shape == (2,)
    assert (plan["num_heads"], plan["head_dim_ckv"], plan["head_dim_kpe"], plan["page_size"]) == (16, 512, 64, 64)
    assert (plan["causal"], plan["sm_scale"]) == (True, case.softmax_scale)
    assert plan["q_data_type"] == plan["kv_data_type"] == torch.bfloat16
    is_new = Version(release) >= Version("0.7")
    metadata = plan["metadata"] if is_new else [plan[x] for x in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")]
    assert [x.tolist() for x in metadata[:2]] == [[0, 4, 8], [0, 1, 2]]
    assert metadata[3].tolist() == [9, 5]
    query, cache = (run["query"], run["kv_cache"]) if is_new else (None, None)
    query = query or (run["q_nope"], run["q_pe"])
    cache = cache or (run["ckv_cache"], run["kpe_cache"])
    flat = [tensors.q_nope_abs.flatten(0, 1), tensors.q_rope.flatten(0, 1), tensors.c_kv, tensors.k_rope]
    assert all(torch.equal(x, y) for x, y in zip((*query, *cache), flat, strict=True))
    assert run["return_lse"] is run["return_lse_base_on_e"] is True
    assert is_new == (plan.get("lse_mode") == "basee")
    assert is_new == (plan.get("query_layout") == plan.get("kv_cache_layout") == "split")


@pytest.mark.parametrize("release", releases("flashmla"))
def test_flash_mla(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release is a day of DeepSeek's repository, or a package that has a copy and its version."""
    made: dict[str, dict[str, Any]] = {}
    splits = torch.zeros(3, dtype=torch.int32)

    def answer(name: str, given: dict[str, Any]) -> Any:
        made[name] = given
        if name == "flash_mla_with_kvcache":
            return torch.zeros(2, 4, 16, 512), torch.zeros(2, 16, 4)
        return ("tiles", splits) if given.get("cache_seqlens") is not None else ("filled later", None)

    name, _, _ = release.replace("_", "-").partition(" ")
    (provider,) = [x for x in flashmla.PROVIDERS if x.distribution == (name if " " in release else "flash-mla")]
    install(monkeypatch, provider.module, **stand_ins("flashmla", release, answer))
    q, cache = torch.randn(2, 4, 16, 576), torch.randn(3, 64, 1, 576)
    page_table, seqlens_kv = (torch.tensor(x, dtype=torch.int32) for x in ([[2], [0]], [9, 5]))
    schedule = provider.schedule(seqlens_kv, 64)
    out, lse = provider.decode(q, cache, page_table, seqlens_kv, schedule, 0.37, True)
    assert out.shape == (2, 4, 16, 512)
    assert lse.shape == (2, 16, 4)
    is_earlier = schedule.tiles == "tiles"
    assert is_earlier == (release < "2026" or name in ("sgl-kernel", "sglang-kernel"))
    if is_earlier:
        assert list(made["get_mla_metadata"].values())[1:3] == [64, 1]
    wanted = {"q": q, "k_cache": cache, "block_table": page_table, "cache_seqlens": seqlens_kv, "head_dim_v": 512}
    wanted |= {"tile_scheduler_metadata": schedule.tiles, "softmax_scale": 0.37, "causal": True}
    wanted |= {"num_splits": splits if is_earlier else None}
    wanted |= {"use_legacy": True} if name == "sgl-flash-mla" else {}
    for argument, found in made["flash_mla_with_kvcache"].items():
        default = default_of("flashmla", release, "flash_mla_with_kvcache", argument)
        assert same(found, wanted.pop(argument) if argument in wanted else default), argument
    assert not wanted


@pytest.mark.parametrize(
    ("library", "members"),
    [("fa2", flash_attention_2.MEMBERS), ("fa3", flash_attention_3.NEWER), ("fa4", flash_attention_4.MEMBERS)],
)
def test_the_emulations_have_the_newest_signatures(library: str, members: dict[str, Any]) -> None:
    """FlashAttention 4's omits what is never passed to its backward."""
    for name in RECORDED[library].keys() & members.keys():
        recorded = stand_ins(library, list(RECORDED[library][name].values())[-1][-1], print)[name]
        has, wanted = (inspect.signature(function).parameters for function in (members[name], recorded))
        shown = {argument: (found.kind, found.default) for argument, found in has.items()}
        if name in ("_flash_attn_bwd", "_validate_head_dims"):
            wanted = {argument: found for argument, found in wanted.items() if argument in shown}
        assert shown == {argument: (found.kind, found.default) for argument, found in wanted.items()}, name


def test_every_function_is_recorded_for_every_release() -> None:
    days = {x for x in releases("fa3") if x > "2025-05"}  # before it had no operators; the archives lack their source
    for name in ("fwd", "bwd"):
        having = {release for each in RECORDED["fa3"][f"flash_attn_3::{name}"].values() for release in each}
        assert having == days
    for library, (_, _, functions) in LIBRARIES.items():
        for function in functions:
            having = {release for each in RECORDED[library][function].values() for release in each}
            wanted = {x for x in releases(library) if function != "MLAPlanMetadata.csr" or Version(x) >= Version("0.7")}
            assert having == wanted, function
    assert all(len(releases(library)) > 10 for library in RECORDED)
    for function in record_flash_mla.FUNCTIONS:
        assert {x for each in RECORDED["flashmla"][function].values() for x in each} == set(releases("flashmla"))


def test_a_call_that_does_not_fit_is_seen() -> None:
    calls = Calls("fa2", releases("fa2")[0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        calls.functions["flash_attn_func"](*[None] * 3, window=(1, 2))
    tensors = drawn(DENSE)
    calls.functions["flash_attn_func"](*tensors[:3], softmax_scale=0.37, causal=True, window_size=(5, 0), softcap=1.0)
    with pytest.raises(AssertionError, match=r"softcap is 1\.0"):
        calls.check("flash_attn_func", wanted(DENSE, tensors, is_backward=False) | {"return_attn_probs": False})


def test_the_oldest_release_that_an_adapter_takes_is_recorded() -> None:
    assert Version(releases("fa2")[0]).release[:2] == Version(fa2.FIRST_VERSION).release[:2]
    assert fa4.FIRST_VERSION in releases("fa4")
    assert str(flashinfer.MIN_VERSION) in releases("flashinfer")
