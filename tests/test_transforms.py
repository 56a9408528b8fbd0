"""Decode under transforms, traces and tensors without memory: right through its operator, or a clear error."""

from __future__ import annotations

import pytest
import torch

import mla_plugin
from mla_plugin.kernels import mla_attention

Q_NOPE_ABS, Q_ROPE = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 4, 8)
C_KV, K_ROPE = torch.randn(2, 9, 16), torch.randn(2, 9, 8)


def decode(q_nope_abs: torch.Tensor = Q_NOPE_ABS, c_kv: torch.Tensor = C_KV) -> torch.Tensor:
    return mla_plugin.decode(q_nope_abs, Q_ROPE, (c_kv, K_ROPE), softmax_scale=0.2)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_over_the_cache_is_a_loop() -> None:
    caches = torch.stack([C_KV, -C_KV])
    expected = torch.stack([decode(c_kv=c_kv) for c_kv in caches])
    torch.testing.assert_close(torch.vmap(lambda c_kv: decode(c_kv=c_kv))(caches), expected)


@pytest.mark.parametrize("argument", ["q_nope_abs", "c_kv"])
def test_a_transformed_derivative_is_a_clear_error(argument: str) -> None:
    x = {"q_nope_abs": Q_NOPE_ABS, "c_kv": C_KV}[argument]
    with pytest.raises(NotImplementedError, match="decode has no derivative"):
        torch.func.grad(lambda x: decode(**{argument: x}).sum())(x)
    with pytest.raises(NotImplementedError, match="decode has no derivative"):
        torch.func.jvp(lambda x: decode(**{argument: x}), (x,), (x,))


@pytest.mark.filterwarnings("ignore")
def test_a_trace_holds_the_operator() -> None:
    traced = torch.jit.trace(decode, (Q_NOPE_ABS,), check_trace=False)
    assert "mla_plugin::decode" in str(traced.graph)


def test_meta_tensors_give_shapes() -> None:
    meta = [x.to("meta") for x in (Q_NOPE_ABS, Q_ROPE, C_KV, K_ROPE)]
    out, lse = mla_plugin.decode(*meta[:2], (meta[2], meta[3]), softmax_scale=0.2, return_lse=True)
    assert (out.shape, out.device.type, lse.shape) == ((2, 1, 4, 16), "meta", (2, 4, 1))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"is_causal": "no"}, TypeError, "is_causal='no'; expected True or False"),
        ({"qkv_format": ["bshd"]}, ValueError, r"qkv_format=\['bshd'\]; expected"),
        ({"q": [1.0]}, TypeError, "q is list; expected a torch.Tensor"),
        ({"q": torch.zeros(1, 4, 2, 584), "k": torch.zeros(1, 4, 2, 584)}, ValueError, "head_dim_qk=584"),
        ({"v": torch.zeros(1, 4, 2, 0)}, ValueError, "head_dim_v=0"),
    ],
)
def test_wrong_arguments_of_the_kernels_own_function(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    x = torch.randn(1, 4, 2, 16)
    with pytest.raises(error, match=words):
        mla_attention(**{"q": x, "k": x, "v": x, **changes})


def test_forward_mode_through_the_kernels_own_function_is_a_clear_error() -> None:
    x = torch.randn(1, 4, 2, 16)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            mla_attention(dual, x, x)


@pytest.mark.parametrize("compiled", [False, True])
def test_inference_mode_records_nothing_although_gradients_are_enabled(compiled: bool) -> None:
    """As PyTorch's own operators: a result without a graph."""
    q, latents = torch.randn(1, 4, 2, 12, requires_grad=True), torch.randn(1, 4, 16, requires_grad=True)
    weights = torch.randn(2, 8, 16)

    def run() -> list[torch.Tensor]:
        return [
            mla_plugin.attention(q, q, q),
            mla_plugin.latent_attention(q, latents, torch.ones(1, 4, 4), weights, weights),
            decode(Q_NOPE_ABS.clone().requires_grad_()),
        ]

    if compiled:
        run = torch.compile(run, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(), torch.enable_grad():
        assert not any(x.requires_grad for x in run())
    if not compiled:
        assert mla_plugin.attention(q, q, q).requires_grad
        with pytest.raises(NotImplementedError, match="requires grad"):
            run()
