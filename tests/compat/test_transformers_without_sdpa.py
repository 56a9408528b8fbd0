"""Models that do not support transformers' sdpa: the ``is_causal`` of their layers may be missing or wrong."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

import mla_plugin
from mla_plugin.compat.transformers import ranks
from mla_plugin.compat.transformers.causality import is_bidirectional_without_mask

S = 11
ENCODER: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
BOTH: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "init_std": 0.2,
}
OTHERS = {"NllbMoe": {"num_experts": 2}, "BigBirdPegasus": {"attention_type": "original_full"}}


def encoder(name: str) -> torch.nn.Module:
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**ENCODER))


def with_decoder(name: str) -> torch.nn.Module:
    config = getattr(transformers, f"{name}Config")(**BOTH, **OTHERS.get(name, {}))
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


@pytest.fixture(autouse=True)
def _registered() -> None:
    mla_plugin.register("transformers")
    torch.manual_seed(0)


MODELS = [
    *((encoder, name) for name in ("ClapText", "AlignText", "Splinter")),
    *((with_decoder, name) for name in ("PegasusX", "NllbMoe", "BigBirdPegasus")),
]


@pytest.mark.parametrize("padded", ["nothing", "right", "left"])
@pytest.mark.parametrize(("make", "name"), MODELS)
def test_as_eager(make: Callable[[str], torch.nn.Module], name: str, padded: str) -> None:
    model = make(name).eval().double()
    assert not model._supports_sdpa
    given: dict[str, torch.Tensor] = {"input_ids": torch.randint(3, 61, (2, S))}
    if padded != "nothing":
        mask = torch.ones(2, S, dtype=torch.long)
        mask[0, 8:] = 0
        given["attention_mask"] = mask if padded == "right" else mask.flip(1)
    if make is with_decoder:
        given["decoder_input_ids"] = torch.randint(3, 61, (2, 7))
    found = {}
    for implementation in ("eager", "mla_plugin"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = model(**given)[0]
    visible = slice(None)
    if make is encoder and padded != "nothing":  # the results of padding are nobody's
        visible = given["attention_mask"].bool()
    torch.testing.assert_close(found["mla_plugin"][visible], found["eager"][visible], atol=1e-5, rtol=1e-5)


def llama() -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    model = transformers.LlamaModel(config).eval()
    model.set_attn_implementation("mla_plugin")
    return model


def test_compiling_warns_of_nothing() -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lru_cache.*")
        torch.compile(llama(), backend="eager", fullgraph=True)(torch.randint(0, 61, (2, S)))


class Unknown(transformers.PretrainedConfig):
    """Of no model."""


class Derived(transformers.SplinterConfig):
    """Of Splinter's models."""


class Wrapper(transformers.PreTrainedModel):
    """It calls no attention function itself, as reward models and heads."""

    config_class = transformers.LlamaConfig


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, False),
        (Unknown(), False),
        (transformers.LlamaConfig(), False),
        (transformers.GptOssConfig(), False),  # no sdpa, as it has sinks, but other attention functions
        (transformers.SplinterConfig(), True),
        (Derived(), True),
    ],
)
def test_where_no_mask_is_bidirectional(config: Any, expected: bool) -> None:
    _imported = transformers.SplinterModel, transformers.LlamaModel, transformers.GptOssModel
    assert is_bidirectional_without_mask(config) is expected


def test_models_defined_later_count(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shared(transformers.PretrainedConfig):
        pass

    class First(transformers.PreTrainedModel):
        config_class, _supports_sdpa = Shared, True

    assert not is_bidirectional_without_mask(Shared())

    class Second(transformers.PreTrainedModel):
        config_class = Shared

    monkeypatch.setattr(sys.modules[__name__], "ALL_ATTENTION_FUNCTIONS", {}, raising=False)
    assert is_bidirectional_without_mask(Shared())


def test_context_parallelism_refuses_them() -> None:
    shared = ranks.Ranks.__new__(ranks.Ranks)  # the group is not asked
    layer, x = torch.nn.Module(), torch.zeros(1, 2, 4, 8)
    _imported = transformers.SplinterModel
    layer.config = transformers.SplinterConfig()
    given = dict.fromkeys(("attention_mask", "indices", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids"))
    with pytest.raises(ValueError, match="SplinterConfig's models support neither sdpa"):
        shared.check_call(layer, x, x, given)


def test_informer_whose_layers_halve_the_length() -> None:
    """No mask, so none of a length that later layers do not have."""
    config = transformers.InformerConfig(
        prediction_length=4,
        context_length=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        lags_sequence=[1, 2],
        attention_type="full",
    )
    model = transformers.InformerModel(config).eval()
    given = {
        "past_values": torch.randn(2, 10),
        "past_time_features": torch.randn(2, 10, config.num_time_features),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, config.num_time_features),
    }
    found = {}
    for implementation in ("eager", "mla_plugin"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            found[implementation] = model(**given).last_hidden_state
    torch.testing.assert_close(found["mla_plugin"], found["eager"], atol=1e-5, rtol=1e-5)


def test_a_model_with_sdpa_still_goes_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, attention = [], mla_plugin.attention
    monkeypatch.setattr(
        mla_plugin,
        "attention",
        lambda *given, **more: (asked.append(more["attn_mask_type"]), attention(*given, **more))[1],
    )
    llama()(torch.randint(0, 61, (2, S)))
    assert asked == ["causal"]
