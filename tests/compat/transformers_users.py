"""The adapter as users run it, under Trainer, TRL, PEFT and torchao; test_transformers_users.py starts it.

A model with ``attn_implementation="mla_plugin"`` does what it does with sdpa: losses of a training run, tokens of
``generate``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

import mla_plugin
from mla_plugin.compat.transformers import latent_steps
from tests.compat.latent_models import fresh, generate, prefill, step
from tests.compat.test_transformers_models import VOCABULARY

HAS_LATENTS = Version(transformers.__version__) >= Version("5.15")
PLAIN = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_strategy": "no"}


def rows(count: int = 8, length: int | None = None) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(4, 12, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (length or n,), generator=generator).tolist() for n in lengths]


def losses(trainer: Trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def both(run) -> None:
    """``run`` of a model with each implementation gives the same numbers."""
    found, expected = (torch.tensor(run(fresh("DeepseekV3", kind).train())) for kind in ("mla_plugin", "sdpa"))
    assert len(found) >= 2
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_trainer(checkpointing, tmp_path):
    def collate(items):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(x["input_ids"]) for x in items], batch_first=True)
        mask = (ids != 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def run(model):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, gradient_checkpointing=checkpointing, **PLAIN
        )
        data = [{"input_ids": row} for row in rows()]
        return losses(Trainer(model, arguments, train_dataset=data, data_collator=collate))

    both(run)


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_that_predicts_with_generate(bf16, tmp_path):
    model = fresh("DeepseekV3")
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, generation_max_length=14, bf16=bf16, **PLAIN
    )
    data = [{"input_ids": row, "attention_mask": [1] * 9, "labels": row} for row in rows(4, length=9)]
    trainer = Seq2SeqTrainer(model, arguments, eval_dataset=data, data_collator=transformers.default_data_collator)
    trainer.model.generation_config.pad_token_id = 0
    found = torch.from_numpy(trainer.predict(data).predictions)
    if not bf16:
        ids = torch.tensor(rows(4, length=9))
        expected = fresh("DeepseekV3", "eager").generate(ids, max_length=14, do_sample=False)
        assert torch.equal(found[:, :14], expected)
    steps = latent_steps(model).values()
    assert [x.absorbed > 0 for x in steps] == [True, True] * HAS_LATENTS


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>")


def test_trl_with_packing(tmp_path, monkeypatch):
    from datasets import Dataset  # here, for the newest does not work with transformers 4.57
    from datasets.table import InMemoryTable
    from trl import SFTConfig, SFTTrainer

    layouts, attention = Counter(), mla_plugin.attention

    def counted(*tensors, **arguments):
        layouts[arguments.get("qkv_format")] += 1
        return attention(*tensors, **arguments)

    monkeypatch.setattr(mla_plugin, "attention", counted)
    text = [" ".join(f"w{i}" for i in row) for row in rows(32)]

    def run(model):
        arguments = SFTConfig(
            str(tmp_path),
            max_steps=3,
            packing=True,
            max_length=32,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            bf16=False,
            **PLAIN,
        )
        data = Dataset(InMemoryTable.from_pydict({"text": text}), fingerprint="rows")
        return losses(SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer()))

    both(run)
    assert layouts == {"thd": 6}


def adapted(implementation: str, **config) -> torch.nn.Module:
    base = fresh("DeepseekV3", implementation)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=12, target_modules=["kv_b_proj"], **config))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_()
    return model.eval()


def absorbed_steps(model: torch.nn.Module) -> list[int]:
    return [steps.absorbed for steps in latent_steps(model).values()]


def reasons(model: torch.nn.Module) -> str:
    return " ".join(str(steps.reason) for steps in latent_steps(model).values())


def two_states() -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module]]:
    """What PEFT does with its adapters, and the models in that state."""
    ours, theirs = adapted("mla_plugin"), adapted("eager")
    yield "added", ours, theirs
    with ours.disable_adapter(), theirs.disable_adapter():
        yield "disabled", ours, theirs
    ours.merge_adapter(), theirs.merge_adapter()
    yield "merged", ours, theirs
    ours, theirs = adapted("mla_plugin", use_rslora=True), adapted("eager", use_rslora=True)
    yield "another scale", ours, theirs


def test_peft_decodes_over_latents():
    for state, ours, theirs in two_states():
        before = sum(absorbed_steps(ours))
        found, expected = (step(model, prefill(model)) for model in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert sum(absorbed_steps(ours)) == before + 2 * HAS_LATENTS, state


def test_peft_of_another_kind_is_expanded():
    ours, theirs = adapted("mla_plugin", use_dora=True), adapted("eager", use_dora=True)
    found, expected = (step(model, prefill(model)) for model in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert sum(absorbed_steps(ours)) == 0
    assert not HAS_LATENTS or "variant of LoRA" in reasons(ours)
    dropping = adapted("mla_plugin", lora_dropout=0.5)
    past = prefill(dropping)
    dropping.train()
    step(dropping, past)
    assert sum(absorbed_steps(dropping)) == 0
    assert not HAS_LATENTS or "drops inputs" in reasons(dropping)


def test_torchao():
    ours, theirs = fresh("DeepseekV3"), fresh("DeepseekV3", "eager")
    for model in (ours, theirs):
        quantize_(model, Int8WeightOnlyConfig())
    assert torch.equal(generate(ours), generate(theirs))
    assert sum(absorbed_steps(ours)) == 0
    assert not HAS_LATENTS or "kv_b_proj.weight is a torchao." in reasons(ours)
    ours, theirs = fresh("DeepseekV3"), fresh("DeepseekV3", "eager")
    for model in (ours, theirs):
        quantize_(
            model,
            Int8WeightOnlyConfig(),
            filter_fn=lambda module, name: isinstance(module, torch.nn.Linear) and "kv_b_proj" not in name,
        )
    assert torch.equal(generate(ours), generate(theirs))
    assert (sum(absorbed_steps(ours)) > 0) == HAS_LATENTS
