"""An in-place change of out or lse before the backward is PyTorch's usual error, whichever backend computed them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mla_plugin
from tests.plugins.every_backend import BACKENDS, computed_by
from tests.plugins.every_backend import emulated as emulated

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.mark.parametrize("qkv_format", ["bshd", "sbhd", "bhsd", "thd"])
@pytest.mark.parametrize("dims", [(192, 128), (64, 64)])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_changed_result_is_pytorchs_usual_error(
    name: str, dims: tuple[int, int], qkv_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, qkv_format) == ("cudnn", "thd"):
        qkv_format = "bshd"  # cudnn refuses thd
    computed_by(monkeypatch, name)
    tokens = {"bshd": (1, 16, 2), "sbhd": (16, 1, 2), "bhsd": (1, 2, 16), "thd": (16, 2)}[qkv_format]
    options: dict[str, Any] = {"qkv_format": qkv_format, "return_lse": True}
    if qkv_format == "thd":
        options |= {"cu_seqlens_q": torch.tensor([0, 9, 16], dtype=torch.int32), "max_seqlen_q": 9, "max_seqlen_kv": 9}
    for changed in (0, 1):
        q, k, v = (torch.randn(*tokens, dim, dtype=torch.bfloat16, requires_grad=True) for dim in (dims[0], *dims))
        results = mla_plugin.attention(q, k, v, **options)
        results[changed].mul_(2)
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            results[0].sum().backward()
