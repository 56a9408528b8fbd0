"""The FlashAttention backends over the real libraries: what is installed, and on a Hopper GPU what ``peers`` finds.

Of those, FlashAttention 3 and flash-attn 2 run their forward, FlashAttention 4 and PyTorch's own FlashAttention 2 both
passes.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch

import mla_plugin
from mla_plugin import Platform
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import BackendConformance, Case
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.manager import BackendManager
from mla_plugin.plugins import fa2, fa3, fa4, sdpa
from mla_plugin.reference import attention, attention_with_gradients
from tests.gpu.peers import BINARIES
from tests.plugins import peers
from tests.plugins.flash_cases import packed_cases
from tests.plugins.flash_on_cpu import REFUSES, FittingRefusals, OnPlatform
from tests.plugins.test_fa2 import LSE_COLUMNS, NOT_DETERMINISTIC, PADDED, WIDE
from tests.plugins.test_fa3 import DIMS, NO_BACKWARD, NO_WINDOWS, VLLM
from tests.plugins.test_fa4 import DIMS as FA4_DIMS
from tests.plugins.test_fa4 import GROUPED
from tests.plugins.test_sdpa import NanPadding

pytestmark = pytest.mark.gpu
HOPPER = pytest.mark.peer("a Hopper GPU")
FA2_OF_VLLM, FA3_OF_VLLM, UNPACKED_FA4 = (pytest.mark.peer(name) for name in BINARIES)

HALF = (torch.bfloat16, torch.float16)
MIMO = tuple(packed_cases((64, 4), HALF))
PYTORCH = Platform("cuda", (9, 0), (), (9, 13, 0), "13.0")
PACKAGE = replace(PYTORCH, packages=(("flash-attn", "2.8.3"),))
FA4 = replace(PYTORCH, packages=(("flash-attn-4", "4.0.0b36"),))


def on_device(name: str, plugin: ModuleType, platform: Platform) -> BackendManager:
    """The plugin as if its library were installed, and the real fallback."""
    manager = BackendManager(builtins={}, load_entry_points=False)
    manager.register(OnPlatform(plugin, platform), name)
    manager.register(sdpa, "sdpa")
    return manager


class _Installed(BackendConformance):
    """On whatever device there is: every refusal with reasons passes."""

    device = "cuda"
    refuses = None


@pytest.mark.peer("FlashAttention 2")
class TestInstalledFlashAttention2(_Installed):
    backend = "fa2"


@pytest.mark.peer("FlashAttention 3")
class TestInstalledFlashAttention3(_Installed):
    backend = "fa3"


@pytest.mark.peer("FlashAttention 4")
class TestInstalledFlashAttention4(_Installed):
    """A selection: each kind of kernel compiles for about ten seconds."""

    backend = "fa4"
    quick = True


@HOPPER
class _OnDevice(FittingRefusals):
    device = "cuda"

    def cases(self) -> tuple[Case, ...]:
        return (*super().cases(), *MIMO)


@FA3_OF_VLLM
class TestFlashAttention3(_OnDevice):
    backend = "fa3"
    may_refuse = REFUSES | DIMS | NO_BACKWARD | NO_WINDOWS
    manager = on_device("fa3", fa3, VLLM)

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers.use_flash_attention_3(monkeypatch)


class TestFlashAttention3WithNanPadding(NanPadding, TestFlashAttention3):
    pass


class TestPyTorchsFlashAttention2(_OnDevice):
    backend = "fa2"
    may_refuse = REFUSES | PADDED | WIDE | LSE_COLUMNS | NOT_DETERMINISTIC
    manager = on_device("fa2", fa2, PYTORCH)


class TestPyTorchsFlashAttention2WithNanPadding(NanPadding, TestPyTorchsFlashAttention2):
    """Its kernels clear what they load after a sequence, in both passes."""


@FA2_OF_VLLM
class TestFlashAttn2Package(_OnDevice):
    """Its forward; there is no binary with the backward."""

    backend = "fa2"
    may_refuse = REFUSES | PADDED | WIDE | LSE_COLUMNS
    manager = on_device("fa2", fa2, PACKAGE)
    test_backward = None

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        peers.use_flash_attention_2(monkeypatch)


FA4_NAMES = (
    "bshd-causal-bf16",
    "bshd-causal-fp16",
    "sbhd-no_mask-bf16",
    "bhsd-causal_bottom_right-bf16",
    "deterministic-causal-bf16",
    "large-192_128",
    "large-thd",
)
FA4_PAIRS = 6


@UNPACKED_FA4
class TestFlashAttention4(_OnDevice):
    """Few kinds of kernels: each compiles for about ten seconds. What is refused costs nothing."""

    backend = "fa4"
    may_refuse = REFUSES | PADDED | WIDE | GROUPED | FA4_DIMS
    manager = on_device("fa4", fa4, FA4)

    def cases(self) -> tuple[Case, ...]:
        """Some pairs of 192/128, and the batches, with grouped heads and without, so that they train."""
        every = super().cases()
        plain = [case for case in every if {"bf16", "head_dims=192/128"} <= case.tags and case.num_heads < 16]
        pairs = [case for case in plain if case.name.startswith("pairs") and "without" not in case.name]
        named = [case for case in every if case.name in FA4_NAMES]
        batches = [case for case in MIMO if case.dtype == torch.bfloat16]
        return (*named, *pairs[:FA4_PAIRS], *batches, *packed_cases((4, 4), (torch.bfloat16,)))

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        peers.use_flash_attention_4()


class TestFlashAttention4WithNanPadding(NanPadding, TestFlashAttention4):
    pass


BATCH = Case(
    "",
    "thd",
    torch.bfloat16,
    (131, 64, 97),
    (131, 64, 97),
    (192, 64, 128),
    (192, 64, 128),
    num_heads=8,
    num_kv_heads=8,
    attn_mask_type="padding_causal",
)
PADDED_BATCHES = [BATCH, replace(BATCH, seqlens_q=(0, 64, 1), seqlens_kv=(0, 64, 1))]
WHOLE = replace(BATCH, rows_q=None, rows_kv=None)
WHOLE_BATCHES = [WHOLE, replace(WHOLE, seqlens_q=(3, 131, 100), seqlens_kv=(3, 131, 100), tail=58)]


@HOPPER
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("fa3", marks=FA3_OF_VLLM),
        "fa2_pytorch",
        pytest.param("fa2_package", marks=FA2_OF_VLLM),
        pytest.param("fa4", marks=UNPACKED_FA4),
    ],
)
def test_a_captured_graph_follows_offsets_and_lengths(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay with others in the same memory gives what the oracle gives; both passes where there are two."""
    plugin, platform, trains, batches = {
        "fa3": (fa3, VLLM, False, PADDED_BATCHES),
        "fa2_pytorch": (fa2, PYTORCH, True, WHOLE_BATCHES),
        "fa2_package": (fa2, PACKAGE, False, WHOLE_BATCHES),
        "fa4": (fa4, FA4, True, WHOLE_BATCHES),
    }[name]
    if name == "fa3":
        peers.use_flash_attention_3(monkeypatch)
    elif name == "fa2_package":
        peers.use_flash_attention_2(monkeypatch)
    elif name == "fa4":
        peers.use_flash_attention_4()
    first, second = batches
    request = first.request("cuda", is_training=trains)
    plan = Plan(request, platform, "", "")
    given, (dout, _) = first.tensors("cuda"), first.cotangents("cuda")

    def run() -> list[torch.Tensor]:
        output = plugin.forward(plan, given)
        results = [output.out, output.lse]
        if trains:
            gradients = plugin.backward(plan, Residuals(given, output.out, output.lse), dout, None)
            results += [gradients.dq, gradients.dk, gradients.dv]
        return results

    with torch.no_grad():
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = run()
        other, (other_dout, _) = second.tensors("cuda"), second.cotangents("cuda")
        for x, new in zip(_tensors(given, dout), _tensors(other, other_dout), strict=True):
            x.copy_(new)
        graph.replay()
    call = second.request("cuda", is_training=trains)
    exact, gradients = attention_with_gradients(call, other, other_dout)
    low = attention(call, other, compute_dtype=torch.bfloat16)
    wanted = [exact.out, exact.lse, gradients.dq, gradients.dk, gradients.dv]
    limit = 4 * (low.out.double() - exact.out).abs().max().item()
    for found, value in zip(results, wanted, strict=False):
        assert torch.equal(found.isneginf(), value.isneginf())
        error = (found.double() - value).masked_fill(value.isneginf(), 0).abs().max().item()
        assert error <= limit * max(1.0, value.masked_fill(value.isneginf(), 0).abs().max().item())
    padding = second.is_padding("q").to("cuda").expand_as(results[0])
    assert not results[0][padding].any()


def _tensors(given: AttentionTensors, dout: torch.Tensor) -> list[torch.Tensor]:
    return [*(x for x in vars(given).values() if isinstance(x, torch.Tensor)), dout]


@pytest.mark.parametrize("grouped", [False, True])
def test_attention_by_name_through_autograd(grouped: bool) -> None:
    """PyTorch's own FlashAttention 2 needs nothing to be installed."""
    heads = 2 if grouped else 8
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(256, h, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for h, dim in ((8, 192), (heads, 192), (heads, 128))
    )
    offsets = torch.tensor([0, 100, 228, 256], dtype=torch.int32, device="cuda")
    options = {"qkv_format": "thd", "cu_seqlens_q": offsets, "max_seqlen_q": 128, "max_seqlen_kv": 128}
    results = []
    for backend in ("fa2", "sdpa"):
        out, lse = mla_plugin.attention(q, k, v, backend=backend, return_lse=True, **options)
        grads = torch.autograd.grad((out.float().square().sum() + lse.sum()), (q, k, v))
        results.append((out, lse, *grads))
    for found, expected in zip(*results, strict=True):
        assert (found.double() - expected.double()).norm() <= 2**-6 * expected.double().norm()


def test_bad_offsets_are_found_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded offsets that leave a sequence too little room; without the check no synchronisation is spent on them."""
    q, k, v = (torch.randn(64, 2, dim, device="cuda", dtype=torch.bfloat16) for dim in (192, 192, 128))
    lengths, places = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 40, 60], [0, 32, 64]))
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "1")
    with pytest.raises(ValueError, match="do not fit slots"):
        mla_plugin.attention(
            q,
            k,
            v,
            qkv_format="thd",
            cu_seqlens_q=lengths,
            cu_seqlens_q_padded=places,
            max_seqlen_q=40,
            max_seqlen_kv=40,
        )
