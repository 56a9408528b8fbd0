"""Every MLA family of transformers, tiny and with random weights, gives what it gives with eager attention.

Tolerance: eager attention in float32 has an error too, measured against the same model in float64 with PyTorch's
attention, or with the plugin's own where that does not run; eager must be near it in any case. The plugin may have
twice that error, plus a floor for values whose eager error happens to be near zero: 1e-6 of the norm of logits (eight
roundings of 1.2e-7) and 5e-5 of the norm of a gradient, because some are sums that nearly cancel. A wrong mask shows as
1e-2 or more.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache, StaticCache

import mla_plugin
import mla_plugin.compat.transformers  # registers attn_implementation="mla_plugin"

LOGITS_FLOOR = 1e-6
GRADIENT_FLOOR = 5e-5
VOCABULARY = 61
VERSION = Version(transformers.__version__)

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_MOE = {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_LOCAL_MOE = {**_MOE, "num_local_experts": 4}
_LONGCAT = {"num_layers": 1, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2}
_SPARSE = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "head_dim": 8}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_LINEAR = {"linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 3}
_GLM5 = {**_HYBRID, **_LINEAR, "qk_rope_head_dim": 0, "index_kpool": 2, "indexer_types": ["full", "full"]}
_DOTS3 = {"layer_types": ["indexed_attention", "sliding_attention"], "sliding_window": 5}
_PIXTRAL = {"model_type": "pixtral", "num_attention_heads": 2, "num_hidden_layers": 1}
_GLM_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "projection_intermediate_size": 16}


@dataclass(frozen=True)
class Family:
    """One model family: what its tiny configuration adds to ``_BASE``, what it is, and where it is tested from."""

    name: str
    config: dict[str, Any]
    since: str = "5.15"
    is_sparse: bool = False
    is_hybrid: bool = False
    vision: dict[str, Any] | None = None


FAMILIES = {
    family.name: family
    for family in (
        Family("DeepseekV2", {**_MOE, "first_k_dense_replace": 1}, since="4.57"),
        Family("DeepseekV3", {**_MOE, "first_k_dense_replace": 1}, since="4.57"),
        Family("LongcatFlash", {**_MOE, **_LONGCAT, "head_dim": 8}, since="4.57"),
        Family("AXK1", _MOE),
        Family("Glm4MoeLite", _MOE),
        Family("MiniCPM3", {}),
        Family("Mistral4", {**_MOE, "first_k_dense_replace": 1}),
        Family("Youtu", {}),
        Family(
            "BailingHybrid", {**_LOCAL_MOE, **_HYBRID, "num_mtp_layers": 0, "head_dim": 8}, since="5.23", is_hybrid=True
        ),
        Family("KimiLinear", {**_LOCAL_MOE, **_HYBRID, **_LINEAR}, since="5.23", is_hybrid=True),
        Family("AXK2", {**_MOE, **_SPARSE, "gated_norm_rank": 4}, is_sparse=True),
        Family("DeepseekV32", {**_MOE, **_SPARSE, "first_k_dense_replace": 1}, is_sparse=True),
        Family("Dots3Note", {**_MOE, **_SPARSE, **_DOTS3}, since="5.23", is_sparse=True),
        Family("GlmMoeDsa", {**_MOE, **_SPARSE, "first_k_dense_replace": 1}, is_sparse=True),
        Family("HYV4", {**_MOE, **_SPARSE, "head_dim": 24}, since="5.23", is_sparse=True),
        Family("MistralLarge4", {**_MOE, **_SPARSE}, since="5.23", is_sparse=True, vision=_PIXTRAL),
        Family(
            "Glm5Next", {**_MOE, **_SPARSE, **_GLM5}, since="5.23", is_sparse=True, is_hybrid=True, vision=_GLM_VISION
        ),
        Family("Llama", {"num_key_value_heads": 2}, since="4.57"),
        Family("Mistral", {"num_key_value_heads": 2, "sliding_window": 5, "head_dim": 8}, since="4.57"),
        Family("GptOss", {"num_key_value_heads": 2, "sliding_window": 5, "head_dim": 8, **_LOCAL_MOE}, since="4.57"),
    )
    if Version(family.since) <= VERSION
}
PLAIN = [name for name, family in FAMILIES.items() if not family.is_sparse and not family.is_hybrid]
SPARSE = [name for name, family in FAMILIES.items() if family.is_sparse and not family.is_hybrid]
since_5_23 = pytest.mark.skipif(Version("5.23") > VERSION, reason="not in older releases of transformers")
every_family = pytest.mark.parametrize("name", list(FAMILIES))
every_cache = pytest.mark.parametrize(
    ("name", "cache"),
    [(name, "dynamic") for name in FAMILIES]
    # A static cache of 4.57 has one head dimension for K and V, so MLA does not fit.
    + [(name, "static") for name in FAMILIES if Version("5") <= VERSION or name in ("Llama", "Mistral", "GptOss")],
)


@dataclass(frozen=True)
class Trio:
    """The same weights three times: with the plugin and with eager attention in float32, and the reference."""

    plugin: torch.nn.Module
    eager: torch.nn.Module
    exact: torch.nn.Module

    def __iter__(self):
        return iter((self.plugin, self.eager, self.exact))


def _config(family: Family) -> transformers.PretrainedConfig:
    values = {**_BASE, **family.config}
    if family.vision is None:
        text_config = getattr(transformers, f"{family.name}TextConfig", None)
        return (text_config or getattr(transformers, f"{family.name}Config"))(**values)
    vision = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14, **family.vision}
    return getattr(transformers, f"{family.name}Config")(text_config=values, vision_config=vision)


@functools.cache
def trio(name: str) -> Trio:
    family = FAMILIES[name]
    task = "ForCausalLM" if family.vision is None else "ForConditionalGeneration"
    torch.manual_seed(list(FAMILIES).index(name))
    eager = getattr(transformers, f"{name}{task}")(_config(family)).eval()
    for parameter in eager.parameters():
        if parameter.ndim == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    eager.set_attn_implementation("eager")
    if Version("5") <= VERSION:
        eager.set_experts_implementation("eager")  # the grouped product has no float64
    plugin = copy.deepcopy(eager)
    plugin.set_attn_implementation("mla_plugin")
    exact = copy.deepcopy(eager)
    if Version("5") <= VERSION or name not in ("DeepseekV3", "LongcatFlash"):  # whose experts are float32 in 4.57
        exact.double()
    # The softmax of eager attention is float32, where float64's mask overflows to minus infinity; and with "sdpa",
    # sparse models of 5.15 add a bool mask to their indexer's scores.
    independent = exact._supports_sdpa and not (family.is_sparse and Version("5.23") > VERSION)
    exact.set_attn_implementation("sdpa" if independent else "mla_plugin")
    return Trio(plugin, eager, exact)


def for_each(names: list[str]) -> Callable[[Callable[..., None]], Callable[..., None] | None]:
    """Parametrizes a test by ``name``; without names there is no test: older versions have fewer families."""
    return pytest.mark.parametrize("name", names) if names else lambda test: None


def assert_as_good_as_eager(
    plugin: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str, floor: float = LOGITS_FLOOR
) -> None:
    error, of_eager = (plugin - exact).norm(), (eager - exact).norm()
    budget = 2 * of_eager + floor * exact.norm()
    assert of_eager <= 1e-3 * exact.norm(), f"{what}: the reference is off: {of_eager:.2e} of {exact.norm():.2e}"
    assert error <= budget, f"{what}: error {error:.2e}, allowed {budget:.2e}, norm {exact.norm():.2e}"


def tokens_of(padding: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids [3, 9] and their mask; the rows have different lengths."""
    mask = torch.ones(3, 9, dtype=torch.long)
    if padding == "left":
        mask[0, :4], mask[1, :1] = 0, 0
    elif padding == "right":
        mask[0, 5:], mask[1, 8:] = 0, 0
    elif padding == "holes":
        mask[0, 3:5], mask[1, 0], mask[1, 4] = 0, 0, 0
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=torch.Generator().manual_seed(7))
    return ids, mask


def labels_of(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """No loss at padding, nor at the prediction that padding makes of the next token."""
    previous = torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return ids.masked_fill((mask & previous) == 0, -100)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(models: Trio) -> None:
    plugin, eager, exact = (gradients(model) for model in models)
    assert plugin.keys() == eager.keys()
    assert len(eager) > 5
    for name in eager:
        assert_as_good_as_eager(plugin[name], eager[name], exact[name], f"gradient of {name}", GRADIENT_FLOOR)


@every_family
@pytest.mark.parametrize("padding", ["none", "left", "right", "holes"])
def test_logits_loss_and_gradients(name, padding):
    ids, mask = tokens_of(padding)
    if padding == "holes" and FAMILIES[name].is_hybrid:
        mask[:] = 1  # linear attention has no masked token in the middle of a sequence
    models = trio(name)
    outputs = []
    for model in models:
        # after the tokens of a row a loss may read padding too, as with labels that are the inputs
        labels = ids if padding == "right" and not FAMILIES[name].is_hybrid else labels_of(ids, mask)
        outputs.append(model(input_ids=ids, attention_mask=mask, labels=labels))
        outputs[-1].loss.backward()
    assert outputs[0].logits.isfinite().all()
    read = mask.bool() | (padding == "right" and not FAMILIES[name].is_hybrid)
    assert_as_good_as_eager(*(o.logits[read] for o in outputs), what="logits")
    assert_as_good_as_eager(*(o.loss for o in outputs), what="loss")
    assert_same_gradients(models)


@every_cache
def test_generate_from_a_left_padded_batch(name, cache):
    ids, mask = tokens_of("left")
    results = [
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=5,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            cache_implementation=None if cache == "dynamic" else cache,
        )
        for model in trio(name)
    ]
    assert results[0].sequences.shape == (3, 14)
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert_as_good_as_eager(*(torch.stack(r.logits) for r in results), what="logits of each step")


@every_cache
@pytest.mark.parametrize("padding", ["none", "left"])
def test_prefill_in_chunks(name, padding, cache):
    ids, mask = tokens_of(padding)
    outputs = []
    for model in trio(name):
        config = model.config.get_text_config()
        past = DynamicCache(config=config) if cache == "dynamic" else StaticCache(config=config, max_cache_len=12)
        logits, start = [], 0
        for end in (4, 7, 8, 9):
            chunk = {"input_ids": ids[:, start:end], "past_key_values": past, "use_cache": True}
            if padding == "left" or FAMILIES[name].is_sparse:
                chunk["attention_mask"] = mask[:, :end]
            positions = torch.arange(start, end)
            with torch.no_grad():
                logits.append(model(**chunk, cache_position=positions, position_ids=positions[None]).logits)
            start = end
        outputs.append(torch.cat(logits, dim=1)[mask.bool()])
    assert_as_good_as_eager(*outputs, what="logits")


LENGTHS = (5, 1, 7)


def packed(**extra: Any) -> dict[str, Any]:
    ids = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(8))
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    return {"input_ids": ids, "position_ids": position_ids, "use_cache": False, **extra}


def flash_attention_kwargs() -> dict[str, Any]:
    cu_seq_lens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    return {
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
    }


def one_by_one(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)], dim=1)


def packed_cases() -> list[tuple[str, str]]:
    cases = [(name, "cu_seq_lens and position_ids") for name in PLAIN + SPARSE]
    cases += [(name, "cu_seq_lens and a mask of ones") for name in PLAIN]
    cases += [(name, "position_ids") for name in PLAIN + SPARSE if name != "GptOss"]  # whose masks ignore them
    return cases


@pytest.mark.parametrize(("name", "form"), packed_cases())
def test_packed_sequences_equal_each_sequence_alone(name, form):
    inputs = packed(**(flash_attention_kwargs() if "cu_seq_lens" in form else {}))
    if "mask" in form:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    models = trio(name)
    weights = torch.randn(1, sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(9))
    logits = [models.plugin(**inputs).logits]
    for model in (models.eager, models.exact):
        # The ties of an indexer fall differently for a sequence alone, so sparse models are compared packed.
        logits.append(one_by_one(model, inputs["input_ids"]) if name in PLAIN else model(**packed()).logits)
    assert_as_good_as_eager(*logits, what="logits")
    for one in logits:
        (one * weights).sum().backward()
    assert_same_gradients(models)


@for_each(["MiniCPM3"] if "MiniCPM3" in FAMILIES else [])  # it has no experts
@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_compiled_model_trains_by_the_same_forms(name, padding, monkeypatch):
    """One graph, no dense mask: what a mask says is not read while tracing.

    Without a mask transformers, which cannot read positions then, describes the batch as packed.
    """
    seen, attention = set(), mla_plugin.attention

    def spy(*tensors, **arguments):
        seen.add(arguments["attn_mask_type"])
        return attention(*tensors, **arguments)

    monkeypatch.setattr(mla_plugin, "attention", spy)
    torch.compiler.reset()
    models, (ids, mask) = trio(name), tokens_of(padding)
    compiled = torch.compile(models.plugin, fullgraph=True, backend="aot_eager")
    outputs = [
        model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for model in (compiled, models.eager, models.exact)
    ]
    read = mask.bool() | (padding == "right")
    assert_as_good_as_eager(*(x[read] for x in outputs), what="logits")
    for x in outputs:
        x[read].square().sum().backward()
    assert_same_gradients(models)
    assert seen == {"padding_causal", "padding"}


@for_each(SPARSE)
def test_keys_selected_across_packed_sequences_are_refused(name):
    """Lengths together with a mask of ones: the indexer sees one sequence, which the lengths then cut."""
    inputs = packed(**flash_attention_kwargs())
    with pytest.raises(ValueError, match=r"packed sequences: the mask that .* selected keys by"):
        trio(name).plugin(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))


@for_each([name for name, family in FAMILIES.items() if family.is_hybrid])
@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens and position_ids"])
def test_packed_hybrids_are_refused(name, form):
    if (name, form) == ("Glm5Next", "position_ids"):
        form = "cu_seq_lens"  # it asks for no mask, and position_ids never reach the attention function
    with pytest.raises(ValueError, match="packed sequences: the linear-attention layers of"):
        trio(name).plugin(**packed(**(flash_attention_kwargs() if "cu_seq_lens" in form else {})))


@pytest.mark.parametrize("name", ["DeepseekV2", "DeepseekV3", "GptOss"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_:FutureWarning")  # its new name is not in 4.57
def test_gradient_checkpointing(name, use_reentrant):
    ids, mask = tokens_of("left")
    models = copy.deepcopy(trio(name))  # 5.15 leaves a hook, for inputs to require gradients
    losses = []
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model.train()
        losses.append(model(input_ids=ids, attention_mask=mask, labels=labels_of(ids, mask), use_cache=False).loss)
        losses[-1].backward()
    assert_as_good_as_eager(*losses, what="loss")
    assert_same_gradients(models)


@pytest.mark.parametrize("name", ["DeepseekV3", "Llama"])
@pytest.mark.parametrize("kind", ["bool", "additive", "minus infinity"])
def test_a_4d_mask_of_the_caller_is_the_whole_pattern(name, kind):
    ids, _ = tokens_of("none")
    attend = torch.rand(3, 1, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.6
    attend[..., 0] = True
    outputs = []
    for model in trio(name):
        mask = attend
        if kind != "bool" or model.config._attn_implementation == "eager":
            lowest = -torch.inf if kind == "minus infinity" else torch.finfo(model.dtype).min
            mask = torch.zeros(attend.shape, dtype=model.dtype).masked_fill(~attend, lowest)
        outputs.append(model(input_ids=ids, attention_mask=mask).logits)
    assert_as_good_as_eager(*outputs, what="logits")


@pytest.mark.parametrize("name", ["DeepseekV2", "Llama"])
def test_autocast(name):
    ids, mask = tokens_of("left")
    models = trio(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plugin, eager = (model(input_ids=ids, attention_mask=mask).logits for model in (models.plugin, models.eager))
    exact = models.exact(input_ids=ids, attention_mask=mask).logits
    plugin, eager, exact = (logits[mask.bool()] for logits in (plugin, eager, exact))
    assert plugin.dtype == eager.dtype == torch.bfloat16
    assert (plugin - exact).norm() <= 2 * (eager - exact).norm()
    assert (eager - exact).norm() <= 0.1 * exact.norm()


@pytest.mark.parametrize("name", ["DeepseekV3", "Llama"])
def test_beam_search(name):
    ids, mask = tokens_of("left")
    plugin, eager = (
        model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=3, do_sample=False)
        for model in (trio(name).plugin, trio(name).eager)
    )
    assert torch.equal(plugin, eager)


@pytest.mark.parametrize("name", [name for name in PLAIN if "sliding_window" not in FAMILIES[name].config])
def test_the_form_of_the_mask_lets_fused_backends_run(name, monkeypatch):
    seen, attention, decode = set(), mla_plugin.attention, mla_plugin.decode

    def spy(*tensors, **arguments):
        seen.add((arguments.get("qkv_format", "bshd"), arguments["attn_mask_type"]))
        return attention(*tensors, **arguments)

    def spy_on_decode(*tensors, **arguments):
        seen.add(("latent", *(name for name in ("leftpad_kv", "seqlens_kv") if name in arguments)))
        return decode(*tensors, **arguments)

    monkeypatch.setattr(mla_plugin, "attention", spy)
    monkeypatch.setattr(mla_plugin, "decode", spy_on_decode)
    is_latent = name != "Llama" and Version("5.15") <= VERSION
    expected = {
        "none": {("bshd", "causal")},
        "left": {("bshd", "padding_causal")},
        "packed": {("thd", "padding_causal")},
        "decode": {("bshd", "causal"), ("latent",) if is_latent else ("bshd", "no_mask")},
        "padded decode": {
            ("bshd", "padding_causal"),
            ("latent", "leftpad_kv", "seqlens_kv") if is_latent else ("bshd", "padding_causal_bottom_right"),
        },
    }
    plugin, found = trio(name).plugin, {}
    for what in expected:
        ids, mask = tokens_of("left" if what in ("left", "padded decode") else "none")
        ids, mask = ids[:, 2:6], mask[:, 2:6]
        if what == "packed":
            plugin(**packed(input_ids=packed()["input_ids"][:, :4], position_ids=torch.tensor([[0, 1, 0, 1]])))
        elif "decode" in what:
            plugin.generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
        else:
            plugin(input_ids=ids, attention_mask=mask)
        found[what] = set(seen)
        seen.clear()
    assert found == expected
