"""The attention function and the mask function of the transformers adapter, tensor by tensor."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version

import mla_plugin
from mla_plugin.compat import transformers as adapter
from mla_plugin.compat.transformers import masks

CAUSAL = SimpleNamespace(is_causal=True)
B, H, D_QK, D_V = 2, 4, 24, 16
BEFORE_5 = Version(transformers.__version__) < Version("5")


def qkv(s_q: int, s_kv: int, num_kv_heads: int = H, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, s_q, D_QK), (B, num_kv_heads, s_kv, D_QK), (B, num_kv_heads, s_kv, D_V))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def reference(q, k, v, visible, scaling=None, s_aux=None):
    """[B, S_q, H, D_V] in float64; ``visible`` broadcasts to [B, H, S_q, S_kv]; a query that sees nothing gives 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * (D_QK**-0.5 if scaling is None else scaling)
    weights = scores.masked_fill(~visible, -1e30).exp().masked_fill(~visible, 0.0)
    total = weights.sum(-1, keepdim=True)
    if s_aux is not None:
        total = total + s_aux.exp().view(1, -1, 1, 1)
    return (weights / total.clamp_min(1e-300) @ v).transpose(1, 2)


def causal(s_q: int, s_kv: int, window: int | None = None) -> torch.Tensor:
    distance = torch.arange(s_kv)[None, :] - torch.arange(s_kv - s_q, s_kv)[:, None]
    visible = distance <= 0 if window is None else (distance <= 0) & (distance > -window)
    return visible[None, None]


def ids_of(lengths: tuple[int, ...], total: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths), output_size=total)


def assert_equal(q, k, v, visible, *, mask=None, module=CAUSAL, compared=None, scaling=None, **arguments):
    """Outputs and gradients of the adapter equal the reference's at the ``compared`` queries [B, S_q]."""
    compared = torch.ones(B, q.shape[2], dtype=torch.bool) if compared is None else compared
    leaves = [q, k, v] + [x for x in (arguments.get("s_aux"),) if x is not None]
    out, weights = adapter.attention_forward(module, q, k, v, mask, scaling=scaling, **arguments)
    expected = reference(q, k, v, visible, scaling, arguments.get("s_aux"))
    assert weights is None
    assert out.shape == expected.shape
    assert out.is_contiguous()
    torch.testing.assert_close(out[compared], expected[compared], rtol=1e-10, atol=1e-12)
    dout = (
        torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(5)) * compared[..., None, None]
    )
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, dout), torch.autograd.grad(expected, leaves, dout), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    return out


@pytest.mark.parametrize(("s_q", "s_kv"), [(1, 1), (7, 7), (1, 7), (3, 7)])
@pytest.mark.parametrize("num_kv_heads", [H, 2, 1])
def test_without_a_mask_the_diagonal_ends_at_the_last_key(s_q, s_kv, num_kv_heads):
    assert_equal(*qkv(s_q, s_kv, num_kv_heads), causal(s_q, s_kv), scaling=0.3)


@pytest.mark.parametrize(
    ("module", "argument"), [(SimpleNamespace(is_causal=False), {}), (CAUSAL, {"is_causal": False})]
)
def test_bidirectional(module, argument):
    assert_equal(*qkv(3, 7), torch.ones(1, 1, 3, 7, dtype=torch.bool), module=module, **argument)


def test_a_module_without_is_causal_is_causal():
    assert_equal(*qkv(5, 5), causal(5, 5), module=SimpleNamespace())


@pytest.mark.parametrize(("s_q", "s_kv"), [(7, 7), (3, 7), (1, 7)])
@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_sliding_window_without_a_mask(s_q, s_kv, window):
    assert_equal(*qkv(s_q, s_kv), causal(s_q, s_kv, window), sliding_window=window)


def test_bidirectional_sliding_window():
    distance = torch.arange(7)[None, :] - torch.arange(7)[:, None]
    visible = (distance.abs() < 3)[None, None]
    assert_equal(*qkv(7, 7), visible, module=SimpleNamespace(is_causal=False), sliding_window=3)


PADDINGS = {
    "left": [[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0]],
    "holes": [[0, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 0, 1, 1]],
    "an empty row": [[0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]],
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("s_q", [7, 3, 1])
@pytest.mark.parametrize("window", [None, 3])
def test_padding(padding, s_q, window):
    tokens = torch.tensor(PADDINGS[padding]).bool()
    if window is not None and padding == "holes":
        window = 6  # a window counts positions, the tokens around holes move closer: no window fits both
        tokens = tokens.sort(dim=1).values
    queries = tokens[:, -s_q:]
    visible = causal(s_q, 7, window) & tokens[:, None, None, :]
    if window is None:  # after the last token of a row, a loss may read what padded queries give
        queries = queries | (tokens.flip(1).cumsum(1).flip(1) == 0)[:, -s_q:] & tokens.any(1, keepdim=True)
    out = assert_equal(*qkv(s_q, 7), visible, mask=tokens, compared=queries, sliding_window=window)
    assert (out[~queries] == 0).all()


def test_rows_that_end_with_tokens_cost_one_call(monkeypatch):
    """``masks`` reads it with what it reads anyway, and says so."""
    calls, attention = [], mla_plugin.attention
    monkeypatch.setattr(mla_plugin, "attention", lambda *x, **y: calls.append(y) or attention(*x, **y))
    tokens = torch.tensor(PADDINGS["left"]).bool()
    tokens.ends_with_tokens = True
    adapter.attention_forward(CAUSAL, *qkv(7, 7), tokens)
    assert len(calls) == 1


def test_a_short_mask_leaves_unused_cache_slots_out():
    q, k, v = qkv(3, 9)
    tokens = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    visible = torch.nn.functional.pad(causal(3, 5) & tokens[:, None, None, :], (0, 4))
    assert_equal(q, k, v, visible, mask=tokens)


@pytest.mark.parametrize("shape", [(B, 1, 5, 7), (1, 1, 5, 7), (B, H, 5, 7)])
@pytest.mark.parametrize("form", ["bool", "lowest", "minus infinity", "float32 lowest"])
def test_dense_masks(shape, form):
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    visible[0, :, 2] = False  # a query that sees nothing
    mask = visible
    if form != "bool":
        dtype = torch.float32 if form == "float32 lowest" else torch.float64
        lowest = -torch.inf if form == "minus infinity" else torch.finfo(dtype).min
        mask = torch.zeros(shape, dtype=dtype).masked_fill(~visible, lowest)
    out = assert_equal(*qkv(5, 7), visible, mask=mask)
    assert (out[0, 2] == 0).all()


def test_an_additive_mask_is_added():
    q, k, v = qkv(5, 7)
    mask = torch.randn(B, 1, 5, 7, dtype=torch.float64)
    expected = ((q @ k.transpose(-1, -2) * 0.2 + mask).softmax(-1) @ v).transpose(1, 2)
    out, _ = adapter.attention_forward(CAUSAL, q, k, v, mask, scaling=0.2)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def test_the_lowest_number_of_either_dtype_means_masked():
    """A wider mask filled with the lowest number of the model's dtype."""
    q, k, v = (x.detach().float() for x in qkv(5, 7))
    mask = torch.full((B, 1, 5, 7), torch.finfo(torch.float32).min, dtype=torch.float64)
    assert (adapter.attention_forward(CAUSAL, q, k, v, mask)[0] == 0).all()


def test_selected_keys_narrow_the_mask():
    indices = torch.stack([torch.randperm(7, generator=torch.Generator().manual_seed(i))[:3] for i in range(10)])
    indices = indices.view(B, 5, 3).int()
    selected = torch.zeros(B, 1, 5, 7, dtype=torch.bool).scatter_(-1, indices.long().unsqueeze(1), True)
    mask = causal(5, 7).expand(B, 1, 5, 7)
    assert_equal(*qkv(5, 7), selected & mask, mask=mask, indices=indices)
    mask.packing = {}  # packed sequences alone would say less than the selection
    assert_equal(*qkv(5, 7), selected & mask, mask=mask, indices=indices)


@pytest.mark.parametrize(("lengths_q", "lengths_kv"), [((3, 0, 5, 4), None), ((1, 7, 2, 2), (4, 7, 3, 2))])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("is_causal", [True, False])
def test_packed_sequences(lengths_q, lengths_kv, window, is_causal):
    """Two rows are one packed batch, as in transformers' FlashAttention; the tokens after the last sequence give 0."""
    alike, lengths_kv = lengths_kv is None, lengths_kv or lengths_q
    q, k, v = qkv(7, 9 if not alike else 7)
    cu_q, cu_kv = (torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32) for n in (lengths_q, lengths_kv))
    packed = {"cu_seq_lens_q": cu_q, "cu_seq_lens_k": cu_q if alike else cu_kv, "max_length_q": 7, "max_length_k": 7}
    out, _ = adapter.attention_forward(CAUSAL, q, k, v, None, is_causal=is_causal, sliding_window=window, **packed)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    for start_q, start_kv, n_q, n_kv in zip(cu_q, cu_kv, lengths_q, lengths_kv, strict=False):
        one = [
            x[start : start + n].transpose(0, 1)[None]
            for x, start, n in zip(flat, (start_q, start_kv, start_kv), (n_q, n_kv, n_kv), strict=True)
        ]
        visible = causal(n_q, n_kv, window)
        if not is_causal:
            distance = torch.arange(n_kv)[None, :] - torch.arange(n_kv - n_q, n_kv)[:, None]
            visible = (distance.abs() < (window or 99))[None, None]
        expected = reference(*one, visible)[0]
        torch.testing.assert_close(out.flatten(0, 1)[start_q : start_q + n_q], expected, rtol=1e-10, atol=1e-12)
    assert (out.flatten(0, 1)[cu_q[-1] :] == 0).all()
    assert out.shape == (B, 7, H, D_V)


def test_a_mask_that_carries_packed_sequences_is_causal():
    cu_seq_lens = torch.tensor([0, 3, 7, 10, 14], dtype=torch.int32)
    ids = ids_of((3, 4, 3, 4), 14).view(B, 7)
    mask = causal(7, 7) & (ids[:, None, :, None] == ids[:, None, None, :])
    mask.packing = masks.packing_arguments(cu_seq_lens, cu_seq_lens, 4, 4)
    assert_equal(*qkv(7, 7), mask, mask=mask, module=SimpleNamespace(is_causal=False))


def test_packed_sequences_narrow_a_dense_mask():
    cu_seq_lens = torch.tensor([0, 3, 7, 10, 14], dtype=torch.int32)
    ids = ids_of((3, 4, 3, 4), 14).view(B, 7)
    mask = (torch.rand(B, 1, 7, 7, generator=torch.Generator().manual_seed(1)) < 0.7) & causal(7, 7)
    visible = mask & (ids[:, None, :, None] == ids[:, None, None, :])
    assert_equal(*qkv(7, 7), visible, mask=mask, cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens)


@pytest.mark.parametrize("mask", [None, "padding", "dense"])
def test_attention_sinks(mask):
    q, k, v = qkv(7, 7, 2)
    s_aux = torch.randn(H, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    tokens = torch.tensor(PADDINGS["left"]).bool()
    visible = causal(7, 7) if mask is None else causal(7, 7) & tokens[:, None, None, :]
    given = {None: None, "padding": tokens, "dense": visible}[mask]
    out = assert_equal(q, k, v, visible, mask=given, s_aux=s_aux, compared=None if mask is None else tokens)
    assert (out[~tokens] == 0).all() or mask is None


def test_sinks_of_packed_sequences():
    q, k, v = qkv(7, 7)
    s_aux = torch.linspace(-1, 1, H, dtype=torch.float64).requires_grad_()
    cu_seq_lens = torch.tensor([0, 3, 7, 10, 14], dtype=torch.int32)
    ids = ids_of((3, 4, 3, 4), 14).view(B, 7)
    visible = causal(7, 7) & (ids[:, None, :, None] == ids[:, None, None, :])
    assert_equal(q, k, v, visible, s_aux=s_aux, cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens)


def test_q_k_and_v_reach_the_backend_without_a_copy(monkeypatch):
    q, k, v = qkv(5, 5)
    seen, hosts = [], []
    monkeypatch.setattr(mla_plugin, "attention", lambda *x, host, **_: seen.extend(x) or hosts.append(host) or x[0])
    adapter.attention_forward(CAUSAL, q, k, v, None)
    assert hosts == ["transformers"]
    assert [x.data_ptr() for x in seen] == [x.data_ptr() for x in (q, k, v)]
    assert [tuple(x.shape) for x in seen] == [(B, 5, H, D_QK), (B, 5, H, D_QK), (B, 5, H, D_V)]


def test_dropout_follows_its_argument():
    q, k, v = (x.detach() for x in qkv(64, 64))

    def run(seed: int, dropout: float) -> torch.Tensor:
        torch.manual_seed(seed)
        return adapter.attention_forward(CAUSAL, q, k, v, None, dropout=dropout)[0]

    assert torch.equal(run(0, 0.0), run(1, 0.0))
    assert torch.equal(run(0, 0.5), run(0, 0.5))
    assert not torch.equal(run(0, 0.5), run(1, 0.5))
    mean = torch.stack([run(seed, 0.5) for seed in range(200)]).mean(0)
    spread = torch.stack([run(seed, 0.5) for seed in range(200)]).std(0) / 200**0.5
    assert ((mean - run(0, 0.0)).abs() < 6 * spread + 1e-9).all()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"softcap": 30.0}, "softcap and does not compute soft-capped scores: use"),
        ({"position_bias": torch.zeros(1)}, "position_bias and does not compute a relative position bias: use"),
        ({"block_indices": torch.zeros(B, 1, 5, 1)}, "block_indices and does not compute blocks of keys that each"),
        ({"head_mask": torch.ones(H)}, "head_mask and does not compute a mask over heads: use"),
        ({"cache": object()}, "a paged cache"),
        ({"output_attentions": True}, "attention weights, which fused kernels never store: use"),
        ({"cu_seq_lens_q": torch.zeros(2, dtype=torch.int32)}, "cu_seq_lens_k is missing: packed sequences need both"),
        ({"cu_seq_lens_k": torch.zeros(2, dtype=torch.int32)}, "cu_seq_lens_q is missing: packed sequences need both"),
        ({"indices": torch.zeros(B, 5, 1)}, "indices narrow a 4-D mask"),
    ],
)
def test_what_no_backend_computes_is_refused(argument, message):
    with pytest.raises(ValueError, match=message):
        adapter.attention_forward(CAUSAL, *qkv(5, 5), None, **argument)


def test_what_asks_for_nothing_is_not_refused():
    nothing = {"softcap": None, "output_attentions": False, "position_ids": torch.arange(5), "use_cache": True}
    assert_equal(*qkv(5, 5), causal(5, 5), **nothing)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(B, 5, dtype=torch.long), r"bool \[B, n\], n between 5 .* and 7 .*; got torch.int64 \[2, 5\]"),
        (torch.ones(B, 4, dtype=torch.bool), r"n between 5 .* and 7 .*; got torch.bool \[2, 4\]"),
        (torch.ones(B, 8, dtype=torch.bool), r"n between 5 .* and 7 .*; got torch.bool \[2, 8\]"),
        (torch.ones(B, 5, 7, dtype=torch.bool), r"4-D, bool .* or floating point .*; got torch.bool \[2, 5, 7\]"),
        (
            torch.ones(B, 1, 5, 7, dtype=torch.long),
            r"4-D, bool .* or floating point .*; got torch.int64 \[2, 1, 5, 7\]",
        ),
        (
            torch.ones(B, 1, 5, 7, dtype=torch.int32),
            r"4-D, bool .* or floating point .*; got torch.int32 \[2, 1, 5, 7\]",
        ),
        (
            torch.ones(1, 1, 5, 7, dtype=torch.int32),
            r"4-D, bool .* or floating point .*; got torch.int32 \[1, 1, 5, 7\]",
        ),
    ],
)
def test_other_masks_are_refused(mask, message):
    with pytest.raises(ValueError, match=message):
        adapter.attention_forward(CAUSAL, *qkv(5, 7), mask)


PACKED = torch.tensor([0, 2, 7, 10], dtype=torch.int32)


def test_keys_selected_across_packed_sequences_are_refused():
    """The layer chose among keys of other sequences, and would be left with too few of its own."""
    q, k, v = qkv(5, 5)
    indices, everything = torch.zeros(B, 5, 2, dtype=torch.int32), causal(5, 5)
    lengths = {"cu_seq_lens_q": PACKED, "cu_seq_lens_k": PACKED}
    for mask in (everything, torch.zeros(everything.shape).masked_fill(~everything, torch.finfo(torch.float32).min)):
        with pytest.raises(ValueError, match="packed sequences: the mask that SimpleNamespace selected keys by shows"):
            adapter.attention_forward(CAUSAL, q, k, v, mask.expand(B, 1, 5, 5), indices=indices, **lengths)
    ids = ids_of((2, 5, 3), 10).view(B, 1, 5, 1)
    own = everything & (ids == ids.transpose(-1, -2))
    adapter.attention_forward(CAUSAL, q, k, v, own, indices=indices, **lengths)


def test_packed_sequences_beside_linear_attention_are_refused():
    config = SimpleNamespace(kv_lora_rank=4, model_type="hybrid", layer_types=["linear_attention", "full_attention"])
    module = SimpleNamespace(is_causal=True, config=config)
    with pytest.raises(ValueError, match="the linear-attention layers of hybrid run across their borders"):
        adapter.attention_forward(module, *qkv(5, 5), None, cu_seq_lens_q=PACKED, cu_seq_lens_k=PACKED)


def test_lengths_and_padding_are_refused_together():
    cu_seq_lens = torch.tensor([0, 5, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seq_lens_q and padding together: give either"):
        adapter.attention_forward(
            CAUSAL, *qkv(5, 5), torch.ones(B, 5).bool(), cu_seq_lens_q=cu_seq_lens, cu_seq_lens_k=cu_seq_lens
        )


@pytest.mark.parametrize("mask", ["none", "padding", "dense"])
def test_one_graph_under_torch_compile(mask):
    torch.compiler.reset()
    q, k, v = (x.detach() for x in qkv(7, 7))
    tokens = torch.tensor(PADDINGS["left"]).bool()
    given = {"none": None, "padding": tokens, "dense": causal(7, 7) & tokens[:, None, None, :]}[mask]

    def layer(q, k, v, given):
        return adapter.attention_forward(CAUSAL, q, k, v, given)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v, given), layer(q, k, v, given))
