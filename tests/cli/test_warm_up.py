"""``mla-plugin warm-up`` makes the calls of the model that it is told about."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import mla_plugin
from mla_plugin.cli import main
from mla_plugin.cli.model_shape import ModelShape

MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 32,
    "torch_dtype": "float32",
}
PLAIN = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "dtype": "float16"}


def written(tmp_path: Path, config: object) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_a_configuration_of_latent_attention() -> None:
    assert ModelShape.of_config(MLA) == ModelShape(4, 4, 24, 16, 8, 32, torch.float32)
    assert ModelShape.of_config({"text_config": MLA}) == ModelShape.of_config(MLA)
    assert ModelShape.of_config({**MLA, "num_key_value_heads": 1}).num_kv_heads == 4, "after expansion all heads have K"


def test_a_configuration_of_plain_attention() -> None:
    assert ModelShape.of_config(PLAIN) == ModelShape(4, 2, 16, 16, 16, None, torch.float16)
    assert ModelShape.of_config({**PLAIN, "head_dim": 40}).head_dim_v == 40


def test_heads_of_a_rank() -> None:
    assert ModelShape.of_config(MLA, 2) == ModelShape(2, 2, 24, 16, 8, 32, torch.float32)
    assert ModelShape.of_config({**PLAIN, "num_key_value_heads": 1}, 4).num_kv_heads == 1
    with pytest.raises(ValueError, match="4 heads and 4 key-value heads cannot be divided over 3"):
        ModelShape.of_config(MLA, 3)


def test_the_calls_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[tuple[object, ...]] = Counter()
    attention, decode = mla_plugin.attention, mla_plugin.decode

    def spy_on_attention(q, k, v, **options):
        seen["attention", options["qkv_format"], q.shape[-2:], v.shape[-1], q.requires_grad] += 1
        return attention(q, k, v, **options)

    def spy_on_decode(q_nope_abs, q_rope, cache, **options):
        seen[("decode", *q_nope_abs.shape, cache.shape[-1])] += 1
        return decode(q_nope_abs, q_rope, cache, **options)

    monkeypatch.setattr(mla_plugin, "attention", spy_on_attention)
    monkeypatch.setattr(mla_plugin, "decode", spy_on_decode)
    assert main(["warm-up", "--device", "cpu", "--config", written(tmp_path, MLA)]) == 0
    assert seen["attention", "bshd", (4, 24), 16, True] == 2
    assert seen["attention", "thd", (4, 24), 16, True] == 2
    assert seen["decode", 64, 2, 4, 32, 40] == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("12 of 12 calls are warm")
    seen.clear()
    assert main(["warm-up", "--device", "cpu", "--inference", "--config", written(tmp_path, PLAIN)]) == 0
    assert {name for name, *_ in seen} == {"attention"}
    assert not any(call[-1] for call in seen)


def test_what_no_backend_takes_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warm-up", "--device", "cpu", "--backend", "fa2", "--config", written(tmp_path, MLA)]) == 1
    out = capsys.readouterr().out
    assert "no backend: bshd, length 512, forward and backward: fa2; `mla-plugin explain` says why" in out
    assert out.splitlines()[-1].startswith("0 of 12 calls are warm")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.json"], "nowhere.json"),
        (["--config", "{}"], "the configuration has no num_attention_heads"),
        (["--config", "{mla}", "--heads", "8"], "--config gives the shape"),
        (["--tensor-parallel", "2"], "--tensor-parallel divides the heads of --config"),
        (["--config", "{list}"], "holds a list; expected an object of a model's fields"),
        (["--config", __file__], "test_warm_up.py is not JSON"),
        (["--config", "{heads}"], "num_attention_heads='128' in the configuration; expected an integer of at least 1"),
        (["--heads", "5", "--kv-heads", "3"], "--heads 5 is not a multiple of --kv-heads 3"),
        (["--config", "{fp8}"], "dtype='float8_e4m3fn' in the configuration"),
    ],
)
def test_contradictions_are_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    known: dict[str, object] = {"{mla}": MLA, "{fp8}": {**MLA, "torch_dtype": "float8_e4m3fn"}, "{}": {}}
    known |= {"{list}": [], "{heads}": {**MLA, "num_attention_heads": "128"}}
    given = [written(tmp_path, known[text]) if text in known else text for text in arguments]
    assert main(["warm-up", "--device", "cpu", *given]) == 2
    assert message in capsys.readouterr().err
