"""What a backend keeps for calls of one kind serves no other kind, and no call's values: each against float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import mla_plugin
from mla_plugin import AttentionRequest, reference
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.operations.attention import known
from tests.plugins.every_backend import BACKENDS, computed_by
from tests.plugins.every_backend import emulated as emulated

FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "given": lambda x: x,
    "odd address": lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),
    "odd strides": lambda x: torch.cat((x, x[..., :4]), -1)[..., : x.shape[-1]],
    "columns of a wider tensor": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "one sequence for all": lambda x: x[:1].expand(x.shape),
    "permuted": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
}


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "triton"])  # tests/kernels has its own
def test_each_call_is_computed_as_if_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed_by(monkeypatch, name)
    generator = torch.Generator().manual_seed(0)
    kinds = [*itertools.product(("bshd", "sbhd", "bhsd"), ("causal", "no_mask"), (0.1, 0.3), FORMS)]
    for index in torch.randperm(2 * len(kinds), generator=generator).tolist():
        layout, mask, scale, form = kinds[index // 2]
        dtype = (torch.bfloat16, torch.float16)[index // 2 // len(FORMS) % 2]
        given = [FORMS[form](torch.randn(4, 4, 4, dim, generator=generator).to(dtype)) for dim in (24, 24, 16)]
        out, lse = mla_plugin.attention(
            *given, qkv_format=layout, attn_mask_type=mask, softmax_scale=scale, return_lse=True
        )
        tensors = AttentionTensors(*given, scale)
        request = AttentionRequest.of(tensors, qkv_format=layout, attn_mask_type=mask)
        exact = reference.attention(request, tensors)
        assert out.is_contiguous()
        torch.testing.assert_close(out.double(), exact.out, atol=3e-2, rtol=3e-2)
        torch.testing.assert_close(lse.double(), exact.lse, atol=3e-2, rtol=3e-2)
    assert len(set(map(id, known._known.values()))) == len(kinds) * 5 // 6  # an odd address is not a separate kind
