"""FlashAttention 2: both providers emulated, conformance over each, refusals on hypothetical platforms."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_plugin import Platform, reference
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.conformance import Case
from mla_plugin.hooks.attention import Plan, Residuals
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.kernels.prefill import padding
from mla_plugin.plugins import fa2
from mla_plugin.plugins.fa2 import providers
from tests.plugins import flash_attention_2 as library
from tests.plugins.flash_libraries import install
from tests.plugins.flash_on_cpu import REFUSES, FlashConformance, manager_on, write_gaps
from tests.plugins.test_sdpa import NanPadding
from tests.requests import mla_request


def cuda_platform(capability: tuple[int, int], version: str | None = None) -> Platform:
    packages = () if version is None else (("flash-attn", version),)
    return Platform("cuda", capability, packages, (9, 13, 0), "13.0")


A100, PACKAGE = cuda_platform((8, 0)), cuda_platform((8, 0), "2.8.3")
PADDED = {
    "pad_between_seqs": "pad_between_seqs=True",
    "bshd padding_masks": "qkv_format='bshd'",
    "sbhd padding_masks": "qkv_format='sbhd'",
    "bhsd padding_masks": "qkv_format='bhsd'",
}
WIDE = {"head_dims=64/512": "head_dim_v=512"}
LSE_COLUMNS = {f"head_dims={dims} return_lse training": "padded to 264" for dims in ("256/256", "192/256")}
NOT_DETERMINISTIC = {"deterministic training": "deterministic=True"}


class TestFlashAttn(FlashConformance):
    backend = "fa2"
    may_refuse = REFUSES | PADDED | WIDE | LSE_COLUMNS
    manager = manager_on("fa2", fa2, PACKAGE)

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install(monkeypatch, "flash_attn.flash_attn_interface", **library.MEMBERS)


class TestFlashAttnWithNanPadding(NanPadding, TestFlashAttn):
    """Its kernels clear what they load after a sequence: nothing is copied for that."""

    quick = True


class TestPyTorchs(TestFlashAttn):
    may_refuse = REFUSES | PADDED | WIDE | LSE_COLUMNS | NOT_DETERMINISTIC
    manager = manager_on("fa2", fa2, A100)
    quick = True

    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(providers, "aten_forward", library.aten_forward)
        monkeypatch.setattr(providers, "aten_backward", library.aten_backward)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_the_stand_in_has_the_operators_arguments(name: str) -> None:
    """Of the PyTorch that runs: names by position differ between releases, their number and the keywords do not."""
    schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
    parameters = inspect.signature(getattr(library, f"aten_{name}")).parameters.values()
    positional = [x for x in schema.arguments if not x.kwarg_only]
    assert len(positional) == sum(x.kind is x.POSITIONAL_OR_KEYWORD for x in parameters)
    keywords = {x.name for x in schema.arguments if x.kwarg_only}
    assert {x.name for x in parameters if x.kind is x.KEYWORD_ONLY} <= keywords
    assert str(positional[3].type) == ("Optional[Tensor]" if name == "forward" else "Tensor")


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_operators_take_our_arguments(is_packed: bool) -> None:
    """PyTorch parses them before it finds that the CPU has no such kernel."""
    q = torch.zeros(2, 4, 2, 64, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 4, 8], dtype=torch.int32) if is_packed else None
    q = q.flatten(0, 1) if is_packed else q
    options = providers.Options(0.1, True, (-1, 0), 4, 4, offsets, offsets)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        providers.PyTorch().forward_with(options)(q, q, q)
    with pytest.raises(NotImplementedError, match="'CPU' backend"):
        providers.PyTorch().backward(q, q, q, q, q, torch.zeros(2, 8), options)


@pytest.mark.parametrize(
    ("platform", "name"),
    [
        (cuda_platform((8, 0)), "PyTorch's own FlashAttention 2"),
        (cuda_platform((8, 0), "2.6.3"), "PyTorch's own FlashAttention 2"),
        (cuda_platform((8, 0), "2.7.0"), "flash-attn 2.7.0"),
        (cuda_platform((9, 0), "2.8.3.post1"), "flash-attn 2.8.3.post1"),
        (cuda_platform((9, 0), "2.8.4"), "PyTorch's own FlashAttention 2"),
        (cuda_platform((10, 0), "2.7.2"), "PyTorch's own FlashAttention 2"),
        (cuda_platform((10, 0), "2.7.3"), "flash-attn 2.7.3"),
    ],
)
def test_providers(platform: Platform, name: str) -> None:
    assert providers.find(platform).name == name


THD = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
TRAINING = {"is_training": True}


@pytest.mark.parametrize(
    ("platform", "changes", "reasons"),
    [
        (A100, {}, []),
        (A100, THD | TRAINING, []),
        (PACKAGE, TRAINING | {"deterministic": True}, []),
        (A100, {"deterministic": True}, []),
        (cuda_platform((12, 1)), {}, []),
        (A100, {"head_dim_qk": 128, "head_dim_v": 256} | TRAINING, []),
        (cuda_platform((12, 0)), {"head_dim_qk": 256, "head_dim_v": 256}, []),
        (cuda_platform((12, 0), "2.8.3"), {"head_dim_qk": 256, "head_dim_v": 256} | TRAINING, []),
        (A100, {"head_dim_qk": 100, "head_dim_v": 104}, []),
        (A100, {"window_size": (64, 64), "attn_mask_type": "no_mask"}, []),
        (A100, {"batch_size": 341} | TRAINING, []),
        (A100, {"batch_size": 342}, []),
        (A100, THD | {"batch_size": 342} | TRAINING, []),
        (PACKAGE, {"batch_size": 342} | TRAINING, ["addresses 2151677952 elements with 32 bits"]),
        (
            A100,
            {"batch_size": 5462, "max_seqlen_q": 63, "max_seqlen_kv": 63} | TRAINING,
            ["max_seqlen_q=63, num_heads=16 in"],
        ),
        (A100, TRAINING | {"deterministic": True}, ["flash-attn from 2.7.0 below 2.8.4 does"]),
        (Platform(), {"device_type": "cpu"}, ["device_type='cpu', expected 'cuda'"]),
        (Platform(), {}, ["device_type='cpu', expected 'cuda'"]),
        (Platform("cuda", (8, 0)), {}, ["cuda_version=None"]),
        (cuda_platform((7, 5)), {}, ["compute_capability=(7, 5) < (8, 0)"]),
        (A100, {"head_dim_qk": 100, "head_dim_v": 64}, ["head_dim_qk=100, head_dim_v=64, expected a multiple of 8"]),
        (A100, {"batch_size": 65_536}, ["batch_size=65536 > 65535"]),
        (A100, {"num_heads": 65_600, "num_kv_heads": 65_600}, ["num_heads=65600 > 65535"]),
        (A100, {"head_dim_qk": 576, "head_dim_v": 512}, ["head_dim_v=512 padded to 576 > 256"]),
        (
            A100,
            {"head_dim_qk": 256, "head_dim_v": 256, "return_lse": True} | TRAINING,
            ["padded to 264 to carry the gradient of lse > 256"],
        ),
        (cuda_platform((8, 6)), {"head_dim_qk": 256}, ["padded to 256 > 192 on compute_capability=(8, 6)"]),
        (cuda_platform((10, 3)), {"head_dim_qk": 256}, ["padded to 256 > 192 on compute_capability=(10, 3)"]),
        (
            cuda_platform((12, 0)),
            {"head_dim_qk": 256} | TRAINING,
            ["> 192 in training on compute_capability=(12, 0) [PyTorch]"],
        ),
        (A100, THD | {"pad_between_seqs": True}, ["pad_between_seqs=True, expected False"]),
        (A100, {"attn_mask_type": "padding_causal"}, ["expected qkv_format='thd'"]),
        (A100, {"dropout_p": 0.1}, ["dropout_p=0.1"]),
        (A100, {"max_seqlen_kv": 4096}, ["FlashAttention aligns bottom-right"]),
        (A100, THD | {"lengths_may_differ": True}, ["lengths_may_differ=True"]),
        (
            A100,
            {
                "attn_mask_type": "no_mask",
                "bottom_right_diagonal": True,
                "max_seqlen_q": 71,
                "max_seqlen_kv": 37,
                "window_size": (5, 40),
            },
            ["window_size=(5, 40) with max_seqlen_q=71 > max_seqlen_kv=37"],
        ),
    ],
)
def test_refusals(platform: Platform, changes: dict[str, Any], reasons: list[str]) -> None:
    decision = fa2.select_backend(mla_request(**changes), platform)
    found = decision.reasons if isinstance(decision, Refused) else ()
    assert len(found) == len(reasons), found
    assert all(expected in reason for reason, expected in zip(found, reasons, strict=True)), found


@pytest.mark.parametrize(("longest_q", "longest_kv"), [(7, 3), (5, 4), (4, 5)])
def test_a_window_that_is_accepted_is_the_callers(
    longest_q: int, longest_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every window up to beyond the lengths; the kernel changes sides that it takes for unlimited."""
    monkeypatch.setattr(providers, "aten_forward", library.aten_forward)
    request = mla_request(
        batch_size=1, num_heads=1, num_kv_heads=1, head_dim_qk=8, head_dim_v=8, attn_mask_type="no_mask"
    ).replace(max_seqlen_q=longest_q, max_seqlen_kv=longest_kv, bottom_right_diagonal=True)
    q, k, v = (torch.randn(1, n, 1, 8, dtype=torch.bfloat16) for n in (longest_q, longest_kv, longest_kv))
    tensors, refused = AttentionTensors(q, k, v, 1.0), set()
    for window in itertools.product(range(-1, 9), repeat=2):
        call = request.replace(window_size=window)
        if isinstance(fa2.select_backend(call, A100), Refused):
            refused.add(window)
            continue
        found = fa2.forward(Plan(call, A100, "fa2", "fa2"), tensors).lse
        expected = reference.attention(call, tensors).lse
        # of sums in float32: a log-sum-exp near 0 is exact to an absolute error alone
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, msg=str(window))
    assert bool(refused) == (longest_q > longest_kv + 1)
    assert (-1, -1) not in refused


def test_what_runs_is_shown() -> None:
    decision = fa2.select_backend(mla_request(), A100)
    assert decision == Accepted(notes=("PyTorch's own FlashAttention 2", "head_dim_v padded from 128 to 192"))
    training = mla_request(head_dim_qk=128, is_training=True, return_lse=True)
    decision = fa2.select_backend(training, PACKAGE)
    assert isinstance(decision, Accepted)
    assert decision.notes[1:] == ("head_dim_qk padded from 128 to 136", "head_dim_v padded from 128 to 136")


def test_nothing_is_copied_that_has_the_kernels_width() -> None:
    """Only V of 192/128 is, in the forward."""
    seen: list[torch.Tensor] = []

    class Library:
        @staticmethod
        def forward_with(options: Any) -> Callable[..., tuple[torch.Tensor, ...]]:
            def forward(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
                seen.extend(given)
                return torch.zeros_like(given[0]), torch.zeros(2, 2, 8)

            return forward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "find", lambda platform: Library)
        request = mla_request(num_heads=2, num_kv_heads=2, max_seqlen_q=8, max_seqlen_kv=8, qkv_format="sbhd")
        q, k, v = (torch.randn(8, 2, 2, dim, dtype=torch.bfloat16) for dim in (192, 192, 128))
        fa2.forward(Plan(request, A100, "fa2", "fa2"), AttentionTensors(q, k, v, 0.1))
    assert [x.data_ptr() for x in seen[:2]] == [q.data_ptr(), k.data_ptr()]
    assert seen[2].shape == (2, 8, 2, 192)
    assert torch.equal(seen[2][..., :128], v.transpose(0, 1))
    assert not seen[2][..., 128:].any()


@pytest.mark.parametrize("mask", ["padding", "padding_causal"])
def test_a_tail_that_padded_offsets_count_to_the_last_sequence(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pad_between_seqs=False: neither its keys nor its queries' gradients reach the last sequence."""
    monkeypatch.setattr(providers, "aten_forward", library.aten_forward)
    monkeypatch.setattr(providers, "aten_backward", library.aten_backward)
    monkeypatch.setattr(padding, "write_gaps", write_gaps)
    lengths = (5, 9)
    case = Case("", "thd", torch.bfloat16, lengths, lengths, tail=7, num_heads=4, num_kv_heads=2, attn_mask_type=mask)
    request, given, (dout, _) = case.request(), case.tensors(), case.cotangents()
    places = torch.tensor([0, 5, 21], dtype=torch.int32)
    padded = replace(given, cu_seqlens_q_padded=places, cu_seqlens_kv_padded=places)
    assert isinstance(fa2.select_backend(request.replace(device_type="cuda"), A100), Accepted)
    plan, results = Plan(request, A100, "fa2", "fa2"), []
    for tensors in (given, padded):
        output = fa2.forward(plan, tensors)
        gradients = fa2.backward(plan, Residuals(tensors, output.out, output.lse), dout, None)
        results.append((output.out, output.lse, gradients.dq, gradients.dk, gradients.dv))
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("heads", [(4, 1), (2, 2)])
def test_one_query_a_sequence(heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With grouped heads the packed kernel would take the rows of the batch for one query each, tail included."""
    monkeypatch.setattr(providers, "aten_forward", library.aten_forward)
    request = mla_request(
        qkv_format="thd", attn_mask_type="padding", window_size=(-1, -1), max_seqlen_q=1, max_seqlen_kv=4
    ).replace(num_heads=heads[0], num_kv_heads=heads[1], batch_size=3)
    q, k, v = (
        torch.randn(tokens, h, dim, dtype=torch.bfloat16)
        for tokens, h, dim in ((5, heads[0], 192), (7, heads[1], 192), (7, heads[1], 128))
    )
    offsets = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 1, 2], [0, 4, 5, 7])]
    output = fa2.forward(Plan(request, A100, "fa2", "fa2"), AttentionTensors(q, k, v, 0.1, *offsets))
    assert output.out.shape == (5, heads[0], 128)
    assert not output.out[2:].any()
    assert output.lse[:, 2:].isneginf().all()


def test_a_package_that_does_not_import() -> None:
    request = mla_request(num_heads=2, num_kv_heads=2)
    q, k, v = (torch.randn(2, 8, 2, dim, dtype=torch.bfloat16) for dim in (192, 192, 128))
    tensors, plan = AttentionTensors(q, k, v, 0.1), Plan(request, PACKAGE, "fa2", "fa2")
    with pytest.raises(RuntimeError, match=r"flash-attn 2\.8\.3 is installed, but .* uninstall it"):
        fa2.forward(plan, tensors)
    with pytest.raises(RuntimeError, match="cannot be imported"):
        fa2.backward(plan, Residuals(tensors, v, torch.zeros(2, 2, 8)), v, None)


@pytest.mark.parametrize("most", [0, fa2.MOST_ZEROS])
@pytest.mark.parametrize("shape", [(2, 5, 3, 128), (7, 3, 128), (1, 1, 1, 128), (2, 1, 4, 128)])
def test_added_columns_are_zero(most: int, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa2, "MOST_ZEROS", most)
    x = torch.randn(*shape[:-1], 200)[..., 8:136]
    wide = fa2._widened(x, 192)
    assert wide.is_contiguous()
    assert torch.equal(wide[..., :128], x)
    assert not wide[..., 128:].any()
    assert fa2._widened(wide, 192) is wide
    if most:
        kept = fa2._zeros((*shape[:-1], 64), x.dtype, x.device)  # what a GPU concatenates
        assert torch.equal(torch.cat((x, kept), -1), wide)
