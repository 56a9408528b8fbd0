"""What the tests inside one version of TransformerEngine share; a pytest plugin, for its fixtures.

TransformerEngine's unfused attention really runs here, on the CPU; of its other backends the selection runs. Head
dimensions are small and float32, for Triton's interpreter.
"""

from __future__ import annotations

import inspect
import os

import pytest
import torch

import mla_plugin
from mla_plugin.compat import transformer_engine as adapter
from tests.compat import te_host

VERSION = os.environ["TE_VERSION"]
te = te_host.import_transformer_engine(VERSION)
ATTENTION = te.DotProductAttention
ORIGINAL = ATTENTION.forward
PARAMETERS = inspect.signature(ORIGINAL).parameters
H, D_QK, D_V = 2, 24, 16
MASKS = ("causal", "causal_bottom_right", "no_mask")


@pytest.fixture(autouse=True)
def _afresh(_clean_environment: None, monkeypatch: pytest.MonkeyPatch):
    """TransformerEngine without us, its cached selection forgotten; flash-attn is absent, cuDNN is switched off."""
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setattr(te_host.torch.cuda, "get_device_capability", lambda *args: (9, 0))
    te._attention_backends["attention_params"] = None
    yield
    if adapter._registration is not None:
        adapter._registration.uninstall()
    assert ATTENTION.forward is ORIGINAL


@pytest.fixture
def triton_on(monkeypatch: pytest.MonkeyPatch) -> None:
    mla_plugin.register("transformer_engine")
    monkeypatch.setenv("NVTE_MLA_TRITON", "1")


@pytest.fixture
def te_calls():
    """Calls that reach TransformerEngine's own forward, which answers 7; ask for it before the wrapper is installed."""
    calls = []

    def forward(self, *args, **kwargs):
        calls.append((args, kwargs))
        return torch.tensor(7.0)

    forward.__signature__ = inspect.signature(ORIGINAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ATTENTION, "forward", forward)
        yield calls
        if adapter._registration is not None:
            adapter._registration.uninstall()


@pytest.fixture
def te_on_device():
    """TransformerEngine's own forward takes the CPU's tensors for a device's; ask for it before installing ours."""

    def forward(self, *args, **kwargs):
        bound = inspect.signature(ORIGINAL).bind(self, *args, **kwargs)
        for name in ("query_layer", "key_layer", "value_layer"):
            bound.arguments[name] = bound.arguments[name].as_subclass(te_host.OnDevice)
        with te_host.CudaIsCpu():
            return ORIGINAL(*bound.args, **bound.kwargs).as_subclass(torch.Tensor)

    forward.__signature__ = inspect.signature(ORIGINAL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ATTENTION, "forward", forward)
        yield
        if adapter._registration is not None:
            adapter._registration.uninstall()


def attention(cls=ATTENTION, dims=(D_QK, D_V), groups: int = H, **options) -> torch.nn.Module:
    with pytest.MonkeyPatch.context() as patch, te_host.CudaIsCpu():
        patch.setattr(torch.cuda, "is_available", lambda: True)
        return cls(H, dims, num_gqa_groups=groups, **{"qkv_format": "bshd", **options})


def tensors(s_q=5, s_kv=None, qkv_format="bshd", groups=H, dims=(D_QK, D_V), seed=0, kind=torch.Tensor, batch=2):
    """q, k and v; the interpreter's time is that of ``batch``: 1 where a second sequence would show nothing."""
    generator = torch.Generator().manual_seed(seed)
    s_kv = s_q if s_kv is None else s_kv
    made = []
    for length, heads, dim in ((s_q, H, dims[0]), (s_kv, groups, dims[0]), (s_kv, groups, dims[1])):
        shape = {"bshd": (batch, length), "sbhd": (length, batch), "thd": (length,)}[qkv_format]
        made.append(torch.randn(*shape, heads, dim, generator=generator).as_subclass(kind).requires_grad_())
    return made


def with_gradients(run, q, k, v) -> list[torch.Tensor]:
    """Output and gradients, plain tensors."""
    for x in (q, k, v):
        x.grad = None
    out = run(q, k, v)
    (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    return [x.detach().as_subclass(torch.Tensor) for x in (out, q.grad, k.grad, v.grad)]


def direct(attn_mask_type="causal", **options):
    """The same attention through the direct entry."""

    def run(q, k, v):
        return mla_plugin.attention(q, k, v, attn_mask_type=attn_mask_type, backend="triton", **options).flatten(-2)

    return run
