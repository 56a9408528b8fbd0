"""``mla_plugin.explain`` of a call: exactly the request that ``attention`` would make, and nothing is computed."""

from __future__ import annotations

import contextlib
import functools
import re

import pytest
import torch

import mla_plugin
from mla_plugin.arguments.decode import Profile
from mla_plugin.operations.attention import known
from mla_plugin.operations.attention.api import request_of_call
from mla_plugin.operations.explain import requests_of_latent_attention
from mla_plugin.operations.latent import expansion
from tests.requests import H100, mla_request

LENGTHS = torch.tensor([0, 3, 8], dtype=torch.int32)


def tensors(*shape: int, dtype=torch.float32, grad=False, device="cpu", kv_heads=4, dim_v=16) -> list[torch.Tensor]:
    options = {"dtype": dtype, "device": device, "requires_grad": grad}
    *tokens, heads = shape
    sizes = ((heads, 24), (kv_heads, 24), (kv_heads, dim_v))
    return [torch.zeros(*tokens, *size, **options) for size in sizes]


CALLS = {
    "defaults": (tensors(2, 8, 4), {}),
    "training": (tensors(2, 8, 4, grad=True), {}),
    "grouped": (tensors(2, 8, 4, kv_heads=2), {"attn_mask_type": "no_mask"}),
    "window": (tensors(2, 8, 4), {"window_size": [3, 0], "deterministic": True, "return_lse": True}),
    "sbhd": (tensors(8, 2, 4), {"qkv_format": "sbhd", "host": "megatron"}),
    "dropout": (tensors(2, 8, 4), {"dropout_p": 0.5}),
    "packed": (tensors(8, 4), {"qkv_format": "thd", "cu_seqlens_q": LENGTHS, "max_seqlen_q": 5}),
    "packed, two offsets": (
        tensors(8, 4, grad=True),
        {"qkv_format": "thd", "cu_seqlens_q": LENGTHS, "cu_seqlens_kv": LENGTHS.clone(), "max_seqlen_q": 5},
    ),
    "padded": (
        tensors(8, 4),
        {"qkv_format": "thd", "cu_seqlens_q": LENGTHS, "cu_seqlens_q_padded": LENGTHS.clone(), "max_seqlen_q": 5},
    ),
    "bias": (
        tensors(2, 8, 4),
        {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.zeros(1, 4, 8, 8).requires_grad_(),
        },
    ),
    "mask": (
        tensors(2, 8, 4),
        {"attn_mask_type": "arbitrary", "attention_mask": torch.zeros(2, 1, 8, 8, dtype=torch.bool)},
    ),
}


@pytest.fixture
def resolved(monkeypatch):
    """The requests that calls of attention make."""
    found = []
    resolve = known.resolve
    monkeypatch.setattr(known, "resolve", lambda request, **rest: found.append(request) or resolve(request, **rest))
    known._known.clear()
    yield found
    known._known.clear()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_the_request_is_the_one_that_attention_makes(name, grad, autocast, resolved):
    given, arguments = CALLS[name]
    context = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.set_grad_enabled(grad), context:
        explained = mla_plugin.explain(*given, **arguments)
        request, backend = request_of_call(*given, **arguments)
        mla_plugin.attention(*given, **arguments)
    assert resolved == [request]
    assert backend is None
    assert explained == mla_plugin.explain(request)
    assert request.dtype == (torch.bfloat16 if autocast else torch.float32)


def test_meta_tensors_ask_about_this_machine():
    q, k, v = tensors(2, 1 << 20, 128, device="meta", kv_heads=128, grad=True)
    text = mla_plugin.explain(q, k, v)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert f"lengths 1048576 x 1048576, 128 heads, head dims 24/16, causal, training  on {device}" in text


def test_meta_offsets_are_told_apart_by_their_identity():
    offsets = torch.zeros(3, dtype=torch.int32, device="meta")
    call = {"qkv_format": "thd", "cu_seqlens_q": offsets, "max_seqlen_q": 5}
    q, k, v = tensors(8, 4, device="meta")
    assert not request_of_call(q, k, v, **call)[0].lengths_may_differ
    assert request_of_call(q, k, v, **call, cu_seqlens_kv=offsets.clone())[0].lengths_may_differ


def test_a_platform_takes_the_place_of_the_device():
    text = mla_plugin.explain(*tensors(2, 8, 4, dtype=torch.bfloat16), platform=H100)
    assert "on cuda sm90" in text
    assert "device_type" not in text


def test_tensors_by_name_and_a_backend_by_name():
    q, k, v = tensors(2, 8, 4)
    text = mla_plugin.explain(q=q, k=k, v=v, backend="cudnn")
    assert "backend 'cudnn' was requested by name" in text
    assert text.endswith("=> no backend")


def test_nothing_is_drawn_or_allocated():
    state = torch.get_rng_state()
    q = torch.zeros(1).expand(2, 1 << 17, 128, 192)  # 24 GiB were it cast
    with torch.autocast("cpu", torch.bfloat16):
        text = mla_plugin.explain(q, q, q[..., :128], dropout_p=0.25)
    assert "bfloat16, batch 2, lengths 131072 x 131072, 128 heads" in text
    assert torch.equal(torch.get_rng_state(), state)


def test_a_call_without_queries_asks_no_backend():
    q, k, v = tensors(2, 0, 4)
    text = "=> no backend: the call has no queries or no keys, so there is nothing to compute"
    assert mla_plugin.explain(q, k, v) == text


def test_a_call_without_queries_is_checked():
    x = torch.zeros(0)
    with pytest.raises(ValueError, match=r"q has shape \(0,\)"):
        mla_plugin.explain(x, x, x)
    given, options = latents(tokens=0)
    given[1] = given[1].flatten(1)
    with pytest.raises(ValueError, match="c_kv has shape"):
        mla_plugin.explain(mla_plugin.latent_attention, *given, **options)


@pytest.mark.parametrize("name", ["attention", "latent_attention", "decode"])
def test_a_call_without_queries_still_knows_the_backends(name):
    given = {
        "attention": (tensors(2, 0, 4), {}),
        "latent_attention": latents(tokens=0),
        "decode": ([torch.zeros(0, 1, 4, 16), torch.zeros(0, 1, 4, 8), torch.zeros(0, 9, 24)], {"softmax_scale": 0.1}),
    }[name]
    call = functools.partial(mla_plugin.explain, getattr(mla_plugin, name), *given[0], **given[1])
    assert call(backend="sdpa").startswith("=> no backend: the call has no queries or no keys")
    with pytest.raises(ValueError, match=r"no backend named 'fa9' is registered; registered: triton"):
        call(backend="fa9")
    with pytest.raises(TypeError, match=r"platform='cuda'; expected a mla_plugin\.Platform"):
        call(platform="cuda")


def test_requests_are_explained_as_before():
    request = mla_request()
    assert mla_plugin.explain(request, platform=H100) == mla_plugin.explain(request=request, platform=H100)
    assert "=> decode: sdpa" in mla_plugin.explain(
        mla_plugin.DecodeRequest(torch.float32, "cpu", 1, 1, 4, 16, 8, max_seqlen_kv=64)
    )


@pytest.mark.parametrize(
    ("subject", "arguments", "error", "message"),
    [
        ((), {}, TypeError, "explain() got nothing; expected an AttentionRequest, a DecodeRequest, the tensors"),
        ((3,), {}, TypeError, "explain() got builtins.int; expected"),
        (tensors(2, 8, 4)[:2], {}, TypeError, "missing a required argument: 'v'; expected the arguments of"),
        (
            tensors(2, 8, 4),
            {"mask": "causal"},
            TypeError,
            "got an unexpected keyword argument 'mask'; expected the",
        ),
        (tensors(2, 8, 4), {"attn_mask_type": "diagonal"}, ValueError, "attn_mask_type='diagonal'"),
        (tensors(2, 8, 4), {"dropout_p": 1.5}, ValueError, "dropout_p=1.5"),
        (tensors(2, 8, 4), {"backend": 3}, TypeError, "backend=3; the name of a backend"),
        (
            (mla_request(),),
            {"batch_size": 2},
            TypeError,
            "unexpected keyword argument 'batch_size'; expected backend",
        ),
        ((mla_request(),), {"platform": "cuda"}, TypeError, "platform='cuda'; expected a mla_plugin.Platform"),
        ((mla_request(),), {"environ": ["NVTE_FLASH_ATTN=0"]}, TypeError, "expected names and values as in os.environ"),
        (tensors(2, 8, 4), {"environ": {"NVTE_FLASH_ATTN": 0}}, TypeError, "environ={'NVTE_FLASH_ATTN': 0}; expected"),
        (([[0.0]], *tensors(2, 8, 4)[1:]), {}, TypeError, "q is list; expected a torch.Tensor"),
        (tensors(2, 8, 4), {"cp_comm_type": "ring"}, ValueError, "cp_comm_type='ring'; expected one of"),
    ],
)
def test_errors_say_what_is_accepted(subject, arguments, error, message):
    with pytest.raises(error) as caught:
        mla_plugin.explain(*subject, **arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": "4"}, "num_heads='4'; expected an int"),
        ({"page_size": 0}, "page_size=0; expected at least 1"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'; expected a torch.dtype"),
        ({"causal": 1}, "causal=1; expected True or False"),
        ({"host": "jax"}, "host='jax'; expected one of direct"),
        ({"device_type": torch.device("cpu")}, r"device_type=device\(type='cpu'\); expected a string"),
        ({"profile": (64, 1)}, r"profile=\(64, 1\); expected a Profile"),
        ({"profile": Profile(64, 0)}, "profile.spread=0; expected at least 1"),
    ],
)
def test_a_decode_request_is_checked(changes, message):
    request = mla_plugin.DecodeRequest(torch.float32, "cpu", 1, 1, 4, 16, 8, max_seqlen_kv=64)
    with pytest.raises((TypeError, ValueError), match=message):
        request.replace(**changes)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"compute_capability": "9.0"}, r"compute_capability='9.0'; expected 2 ints such as \(9, 0\)"),
        ({"compute_capability": 9}, "compute_capability=9; expected 2 ints"),
        ({"cudnn_version": (9, 8)}, r"cudnn_version=\(9, 8\); expected 3 ints such as \(9, 8, 0\)"),
        ({"packages": {"torch": "2.11"}}, "packages={'torch': '2.11'}; expected pairs such as"),
        ({"tools": ["nvcc"]}, r"tools=\['nvcc'\]; expected a frozenset"),
    ],
)
def test_a_platform_is_checked(attributes, message):
    with pytest.raises(TypeError, match=message):
        mla_plugin.Platform("cuda", **attributes)


@pytest.mark.parametrize("request_", [None, "attention"])
def test_resolve_takes_requests(request_):
    with pytest.raises(TypeError, match="expected an AttentionRequest or a DecodeRequest"):
        mla_plugin.resolve(request_)


def latents(layout="bshd", *, tokens=9, device="cpu", grad=False, **arguments):
    lead = (tokens, 5) if layout == "thd" else (2, tokens, 5)
    options = {"device": device, "requires_grad": grad}
    given = [torch.zeros(*lead, 24, **options)]
    given += [torch.zeros(*lead[:-1], width, **options) for width in (20, 8)]
    given += [torch.zeros(5, width, 20, **options) for width in (16, 12)]
    return given, {"qkv_format": layout, **arguments}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "call",
    [
        latents(),
        latents(grad=True),
        latents("thd", tokens=8, cu_seqlens_q=LENGTHS, max_seqlen_q=5),
        latents(backend="sdpa"),
    ],
)
def test_groups_of_heads_that_latent_attention_asks_for(call, grad, resolved, monkeypatch):
    monkeypatch.setattr(expansion, "MAX_EXPANDED_BYTES", 18 * 36 * 4 * 2)
    given, arguments = call
    with torch.set_grad_enabled(grad):
        found = requests_of_latent_attention(*given, **arguments)
        text = mla_plugin.explain(mla_plugin.latent_attention, *given, **arguments)
        mla_plugin.latent_attention(*given, **arguments)
    assert sorted(resolved, key=hash) == sorted(found.requests, key=hash)
    assert text == "\n\n".join(mla_plugin.explain(request, backend=found.backend) for request in found.requests)


def test_latents_and_caches_of_the_meta_device():
    given, arguments = latents(tokens=1 << 20, device="meta", grad=True)
    text = mla_plugin.explain(mla_plugin.latent_attention, *given, **arguments)
    assert "lengths 1048576 x 1048576, 2 heads, head dims 24/12, causal, training" in text  # of 5, for 1.25 GiB
    queries = [torch.zeros(2, 3, 5, width, device="meta") for width in (16, 8)]
    cache = torch.zeros(2, 1 << 20, 24, device="meta")
    text = mla_plugin.explain(mla_plugin.decode, *queries, cache, softmax_scale=0.1)
    assert "lengths 3 x 1048576, 5 heads, kv_lora_rank 16, rope 8, contiguous cache, causal" in text
    assert "apart" not in text
    pair = (cache[..., :16], torch.zeros(2, 1 << 20, 24, device="meta")[..., :8])
    assert "c_kv and k_rope in separate tensors" in mla_plugin.explain(
        mla_plugin.decode, *queries, pair, softmax_scale=0.1
    )


def test_nothing_to_compute():
    given, _ = latents(tokens=0)
    assert mla_plugin.explain(mla_plugin.latent_attention, *given).startswith("=> no backend: the call has no queries")


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "text"),
    [
        (mla_plugin.latent_attention, {"cp_grp": None}, TypeError, "expected the arguments of mla_plugin.latent"),
        (mla_plugin.decode, {"scale": 1.0}, TypeError, "expected the arguments of mla_plugin.decode"),
        (mla_plugin.latent_attention, {"qkv_format": "shbd"}, ValueError, "qkv_format='shbd'; expected one of "),
        (print, {}, TypeError, "explain() got builtins.builtin_function_or_method; expected"),
    ],
)
def test_errors_of_calls(function, arguments, kind, text):
    given, _ = latents()
    with pytest.raises(kind, match=re.escape(text)):
        mla_plugin.explain(function, *given, **arguments)
