"""Which launches of FlashAttention 4's kernels are repeated without the library, and which stay with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.options import CallOptions
from mla_plugin.hooks.attention import Plan, request_of
from mla_plugin.plugins import fa4
from mla_plugin.plugins.fa4.launch import Repeated
from mla_plugin.reference import attention
from tests.plugins import flash_attention_4 as library
from tests.plugins.flash_libraries import install
from tests.plugins.test_fa4 import H100

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def new_tensors(batch: int = 2) -> Tensors:
    q, k = (torch.randn(batch, 5, 4, 24) for _ in range(2))
    return q, k, torch.randn(batch, 5, 4, 16)


class Kernel:
    """A compiled kernel: counts its calls, and writes what tells the calls apart."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        self.calls += 1
        out.copy_(q[..., :16] + 2 * k[..., :16] + 4 * v)
        lse.copy_(q.sum(-1).transpose(1, 2))


def module(kernel: Kernel, launch: Callable[..., None]) -> SimpleNamespace:
    """A library whose forward calls ``launch`` with its cache, its inputs and its results."""

    def forward() -> None:
        raise NotImplementedError

    forward.compile_cache = {"kind": kernel}  # type: ignore[attr-defined]

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made.runs += 1
        out, lse = torch.empty(*q.shape[:-1], v.shape[-1]), torch.empty(q.shape[0], q.shape[2], q.shape[1])
        launch(forward.compile_cache, q, k, v, out, lse)  # type: ignore[attr-defined]
        return out, lse

    made = SimpleNamespace(_flash_attn_fwd=forward, run=run, runs=0, cache=forward.compile_cache)  # type: ignore[attr-defined]
    return made


def check(run: Callable[..., Any], tensors: Tensors) -> None:
    out, lse = run(*tensors)
    q, k, v = tensors
    assert torch.equal(out, q[..., :16] + 2 * k[..., :16] + 4 * v)
    assert torch.equal(lse, q.sum(-1).transpose(1, 2))


def runs_of(made: Any, calls: int = 3, tensors: Callable[[], Tensors] = new_tensors) -> int:
    """How often the library runs in so many right calls of one kind."""
    repeated = Repeated(made, made.run, NUMBERS)
    for _ in range(calls):
        check(repeated, tensors())
    return made.runs


NUMBERS = (0.1, 7)


def plain(cache: Any, *tensors: torch.Tensor) -> None:
    cache["kind"](*[x.detach() for x in tensors])


def test_a_later_call_goes_to_the_kernel_alone() -> None:
    kernel = Kernel()
    made = module(kernel, plain)
    repeated = Repeated(made, made.run, NUMBERS)
    found = repeated(*new_tensors())
    kept = [x.clone() for x in found]
    for _ in range(3):
        check(repeated, new_tensors())
    assert (made.runs, kernel.calls) == (1, 4)
    assert made._flash_attn_fwd.compile_cache is made.cache
    assert all(map(torch.equal, found, kept)), "a later call wrote into the first one's results"


def test_tensors_that_require_gradients() -> None:
    assert runs_of(module(Kernel(), plain), tensors=lambda: tuple(x.requires_grad_() for x in new_tensors())) == 1


def twice(cache: Any, *tensors: torch.Tensor) -> None:
    cache["kind"](*tensors)
    cache["kind"](*tensors)


def named(cache: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    cache["kind"](q, k, v, out=out, lse=lse)


def parts(cache: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Into memory of its own, as a split of the keys: another kernel combines it."""
    part = torch.empty_like(out)
    cache["kind"](q, k, v, part, lse)
    out.copy_(part)


def view(cache: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Of the same memory, with other strides."""
    cache["kind"](q, k, v, out, lse.transpose(1, 2).contiguous().transpose(1, 2))
    lse.copy_(q.sum(-1).transpose(1, 2))


def filled(cache: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """With memory that the library fills before: the kernel need not write all of it."""
    lse.fill_(-torch.inf)
    cache["kind"](q, k, v, out, lse)


def changed(cache: Any, *tensors: torch.Tensor) -> None:
    """The library changes what the kernel wrote."""
    cache["kind"](*tensors)
    tensors[4].mul_(2.0).div_(2.0)


def read(cache: Any, *tensors: torch.Tensor) -> None:
    """The library decides by values."""
    assert tensors[0].sum().item() is not None
    cache["kind"](*tensors)


@pytest.mark.parametrize("launch", [twice, named, parts, view, filled, changed, read])
def test_what_is_not_one_launch_of_the_call_s_tensors_stays_with_the_library(launch: Callable[..., None]) -> None:
    assert runs_of(module(Kernel(), launch), calls=7) == 7


AUX = library.AuxData((torch.zeros(1),))


@pytest.mark.parametrize(
    ("extra", "is_repeated"),
    [
        (None, True),
        (True, True),
        (0.1, True),
        (7, True),
        (("fwd", (None, 5, True)), True),  # 5 tokens
        (library.AuxData(), True),
        (AUX, False),
        ([torch.zeros(1)], False),
        (torch.zeros(1, dtype=torch.int32), False),
        (object(), False),
        (0.5, False),
        (0x7F0011223344, False),  # such as a pointer or a stream
        ([8], False),
    ],
    ids=(
        *(
            "nothing",
            "bool",
            "scale",
            "window",
            "tuple",
            "no aux",
            "aux",
            "list",
            "tensor",
            "object",
            "float",
            "pointer",
        ),
        "list of a number",
    ),
)
def test_other_arguments_must_be_known_constants(extra: object, is_repeated: bool) -> None:
    kernel = Kernel()

    def launch(cache: Any, *tensors: torch.Tensor) -> None:
        cache["kind"](extra, *tensors)

    made = module(kernel, launch)
    made.cache["kind"] = lambda given, *tensors: kernel(*tensors) if given is extra else pytest.fail("another argument")
    assert runs_of(made) == (1 if is_repeated else 3)


def test_one_tensor_as_two_inputs_is_not_repeated() -> None:
    """Which of both an argument is cannot be told; a later call with two tensors shows it."""
    made = module(Kernel(), plain)
    repeated = Repeated(made, made.run, NUMBERS)
    q, _, v = new_tensors()
    check(repeated, (q, q, v))
    assert made.runs == 1
    for _ in range(3):
        check(repeated, new_tensors())
    assert made.runs == 2
    check(repeated, (q, q, v))
    assert made.runs == 2


def test_a_release_without_the_cache() -> None:
    made = module(Kernel(), plain)
    without = SimpleNamespace(flash_attn_func=made.run)
    repeated = Repeated(without, made.run, NUMBERS)
    for _ in range(3):
        check(repeated, new_tensors())
    assert made.runs == 3


def test_an_error_leaves_the_library_as_it_was() -> None:
    def fails(cache: Any, *tensors: torch.Tensor) -> None:
        cache["kind"](*tensors)
        raise RuntimeError("out of resources")

    made = module(Kernel(), fails)
    repeated = Repeated(made, made.run, NUMBERS)
    for _ in range(7):
        with pytest.raises(RuntimeError, match="out of resources"):
            repeated(*new_tensors())
    assert made._flash_attn_fwd.compile_cache is made.cache


def test_a_launch_that_fails_goes_back_to_the_library() -> None:
    kernel = Kernel()
    made = module(kernel, plain)
    repeated = Repeated(made, made.run, NUMBERS)
    for _ in range(2):
        check(repeated, new_tensors())
    assert made.runs == 1
    with pytest.raises(RuntimeError):  # of the library
        repeated(*(x[:, :3] for x in new_tensors()[:2]), new_tensors()[2][..., :5])
    check(repeated, new_tensors())
    assert made.runs == 3


def test_a_cache_that_somebody_replaces_meanwhile_stays() -> None:
    other = {"kind": Kernel()}

    def launch(cache: Any, *tensors: torch.Tensor) -> None:
        cache["kind"](*tensors)
        made._flash_attn_fwd.compile_cache = other

    made = module(Kernel(), launch)
    check(Repeated(made, made.run, NUMBERS), new_tensors())
    assert made._flash_attn_fwd.compile_cache is other


def test_nobody_waits_while_another_call_is_recorded() -> None:
    """The library compiles for seconds; another kind runs meanwhile, and is recorded later."""
    kernel, other = Kernel(), module(Kernel(), plain)
    of_other = Repeated(other, other.run, NUMBERS)

    def launch(cache: Any, *tensors: torch.Tensor) -> None:
        check(of_other, new_tensors())
        cache["kind"](*tensors)

    made = module(kernel, launch)
    repeated = Repeated(made, made.run, NUMBERS)
    check(repeated, new_tensors())
    assert other.runs == 1
    for _ in range(2):
        check(of_other, new_tensors())
    assert other.runs == 2


def test_another_thread_meanwhile_is_not_recorded() -> None:
    kernel, others = Kernel(), Kernel()

    def launch(cache: Any, *tensors: torch.Tensor) -> None:
        cache["other"] = others
        assert "other" in cache
        thread = threading.Thread(target=lambda: cache["other"](*tensors))
        thread.start()
        thread.join()
        cache["kind"](*tensors)

    made = module(kernel, launch)
    assert runs_of(made, calls=2) == 1
    assert (kernel.calls, others.calls) == (2, 1)
    assert made.cache["other"] is others


def test_the_plugin_repeats_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind by itself; a call whose tensors start off 16 bytes goes to the library."""
    install(monkeypatch, "flash_attn.cute.interface", **library.MEMBERS)
    calls = []
    function = library.flash_attn_func

    def counted(*args: Any, **named: Any) -> Any:
        calls.append(args[0].shape)
        return function(*args, **named)

    install(monkeypatch, "flash_attn.cute.interface", **library.MEMBERS | {"flash_attn_func": counted})
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for batch, scale in ((1, 0.1), (2, 0.1), (1, 0.3)) * 4:
        q, k, v = (torch.randn(batch, 40, 2, dim).bfloat16() for dim in (192, 192, 128))
        tensors = AttentionTensors(q, k, v, scale)
        vars(tensors)["kept"] = kept.setdefault((batch, scale), {})
        request = request_of(tensors, CallOptions().completed(tensors)).replace(device_type="cuda")
        found = fa4.forward(Plan(request, H100, "fa4", "fa4"), tensors)
        exact = attention(request, tensors)
        torch.testing.assert_close(found.out.double(), exact.out, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(found.lse.double(), exact.lse, atol=1e-3, rtol=1e-3)
    assert len(calls) == 6  # the first, and the one that is recorded
