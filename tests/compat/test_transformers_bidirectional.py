"""Bidirectional attention: encoders with padded rows, and image towers, whose images lie side by side."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers
from packaging.version import Version

import mla_plugin
from mla_plugin.compat.transformers.attention import attention_forward

B, H, D, S = 3, 2, 8, 10
ENCODER = SimpleNamespace(is_causal=False)
LENGTHS = (4, 1, 5)


@pytest.fixture
def asked(monkeypatch):
    """The mask type and layout of every call of attention."""
    found, attention = [], mla_plugin.attention

    def spy(*tensors, **arguments):
        found.append((arguments["attn_mask_type"], arguments.get("qkv_format", "bshd")))
        return attention(*tensors, **arguments)

    monkeypatch.setattr(mla_plugin, "attention", spy)
    return found


def tensors(batch_size: int = B, s_kv: int = S) -> list[torch.Tensor]:
    return [
        torch.randn(batch_size, H, length, D, dtype=torch.float64, requires_grad=True) for length in (S, s_kv, s_kv)
    ]


def check(mask: torch.Tensor, batch_size: int = B, s_kv: int = S) -> None:
    """Output and gradients against plain PyTorch, in float64; ``mask`` has no row without keys."""
    given = tensors(batch_size, s_kv)
    out = attention_forward(ENCODER, *given, mask)[0]
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), given)
    q, k, v = given
    scores = q @ k.transpose(-1, -2) * D**-0.5
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    expected = (scores.softmax(-1) @ v).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad((expected * weight).sum(), given))


@pytest.mark.parametrize("s_kv", [S, S + 3])
@pytest.mark.parametrize("heads", [1, H])
def test_padded_keys_run_by_lengths(s_kv, heads, asked):
    tokens = torch.rand(B, s_kv) < 0.6
    tokens[:, 3] = True
    check(tokens[:, None, None].expand(B, heads, S, s_kv), s_kv=s_kv)
    check(tokens[:1, None, None], s_kv=s_kv)
    assert asked == [("padding", "bshd")] * 2


def test_a_row_without_tokens_gives_zeros():
    tokens = torch.ones(B, S, dtype=torch.bool)
    tokens[1] = False
    out = attention_forward(ENCODER, *tensors(), tokens[:, None, None].expand(B, 1, S, S))[0]
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].abs().min() > 0


def blocks(*lengths: int) -> torch.Tensor:
    return torch.block_diag(*(torch.ones(n, n) for n in lengths)).bool()


def form(mask: torch.Tensor, kind: str) -> torch.Tensor:
    lowest = torch.finfo(torch.float64).min
    return mask if kind == "bool" else torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, lowest)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([LENGTHS], ("padding", "thd")),
        ([LENGTHS, (S,), (1,) * S], ("padding", "thd")),
        ([(S,), (S,)], ("no_mask", "bshd")),
    ],
)
def test_sequences_side_by_side_run_packed(rows, expected, kind, asked):
    mask = form(torch.stack([blocks(*lengths) for lengths in rows])[:, None].contiguous(), kind)
    check(mask, len(rows))
    assert asked == [expected]


def scattered() -> torch.Tensor:
    """Two sequences, the first of which lies on both sides of the second."""
    number = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 0])
    return number[:, None] == number


def changed(row: int, key: int) -> torch.Tensor:
    mask = blocks(*LENGTHS)
    mask[row, key] = ~mask[row, key]
    return mask


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize(
    "mask", [scattered(), changed(0, 3), changed(3, 0), changed(9, 0), changed(0, 9), torch.ones(S, S).tril().bool()]
)
def test_other_patterns_stay_dense(mask, kind, asked):
    check(form(mask[None, None], kind), 1)
    assert asked == [("arbitrary", "bshd")]


def test_a_bias_stays_a_bias(asked):
    mask = form(blocks(*LENGTHS)[None, None], "additive")
    mask[0, 0, 0, 1] = 0.5
    check(mask, 1)
    assert asked == [("arbitrary", "bshd")]


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_mask_that_changes_is_read_again(is_inference, asked):
    q, k, v = (x.detach() for x in tensors(1))
    with torch.inference_mode(is_inference):
        mask = blocks(*LENGTHS)[None, None].clone()
        for key in (0, 5):
            found = attention_forward(ENCODER, q, k, v, mask)[0]
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
            torch.testing.assert_close(found, expected)
            mask[0, 0, :, key] = True
    assert [mask_type for mask_type, _ in asked] == ["padding", "arbitrary"]


def test_a_mask_is_read_once_for_all_layers(monkeypatch):
    reads, given = [], [x.detach() for x in tensors(1)]
    mask = blocks(*LENGTHS)[None, None]
    attention_forward(ENCODER, *given, mask)
    monkeypatch.setattr("mla_plugin.compat.transformers.bidirectional._sequences", lambda *a: reads.append(a))
    attention_forward(ENCODER, *given, mask)
    assert reads == []


def test_causal_layers_read_no_mask(asked):
    attention_forward(SimpleNamespace(is_causal=True), *tensors(1), blocks(*LENGTHS)[None, None])
    assert asked == [("arbitrary", "bshd")]


def test_an_image_tower(asked):
    config = transformers.PixtralVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14
    )
    torch.manual_seed(0)
    eager = transformers.PixtralVisionModel(config).eval()
    eager.set_attn_implementation("eager")
    model = copy.deepcopy(eager)
    model.set_attn_implementation("mla_plugin")
    pixels = torch.rand(2, 3, 56, 56)
    sizes = torch.tensor([[56, 28], [42, 56]])
    found, expected = (each(pixels, image_sizes=sizes).last_hidden_state for each in (model, eager))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert asked == [("padding", "thd")] * 2
    model(pixels[:1])
    assert asked[2:] == [("no_mask", "bshd")] * 2


if Version(transformers.__version__) >= Version("5"):  # older ones keep their own attention

    def test_an_encoder_of_texts(asked):
        config = transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        torch.manual_seed(0)
        eager = transformers.BertModel(config, add_pooling_layer=False).eval()
        eager.set_attn_implementation("eager")
        model = copy.deepcopy(eager)
        model.set_attn_implementation("mla_plugin")
        ids, mask = torch.randint(50, (3, 9)), torch.ones(3, 9, dtype=torch.long)
        mask[0, 5:], mask[1, :2], mask[1, 7] = 0, 0, 0
        found, expected = (each(ids, attention_mask=mask).last_hidden_state for each in (model, eager))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert asked == [("padding", "bshd")] * 2
        model(ids, attention_mask=torch.ones_like(mask))
        assert asked[2:] == [("no_mask", "bshd")] * 2

    @pytest.mark.parametrize("ones", [False, True])
    def test_a_causal_mask_of_layers_that_deny_it(ones):
        """As PaliGemma's text layers do, whose prompts without token types are causal; so their mask is dense."""
        config = transformers.GemmaConfig(
            vocab_size=50,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=32,
            initializer_range=0.3,
            use_bidirectional_attention=True,
        )
        torch.manual_seed(0)
        eager = transformers.GemmaModel(config).eval()
        eager.set_attn_implementation("eager")
        model = copy.deepcopy(eager)
        model.set_attn_implementation("mla_plugin")
        ids = torch.randint(3, 50, (3, 9))
        mask = {"attention_mask": torch.ones_like(ids)} if ones else {}
        found, expected = (each(ids, **mask).last_hidden_state for each in (model, eager))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
