"""``mla-plugin demo``: train a small DeepSeek-V3 on a text, generate, and check it against eager attention."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import time
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

import mla_plugin
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks.attention import AttentionOutput, Plan
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan
from mla_plugin.hooks.manager import get_manager
from mla_plugin.resolver import survey

SEED = 0
BATCH_SIZE, LENGTH = 8, 128
LEARNING_RATE, WARMUP_STEPS = 4e-3, 20
PROMPT = "Subject to the terms"
TOLERANCE = 1e-3
"""Allowed difference of the float32 logits; 1e-5 is typical, a wrong mask or scale gives more than 0.1."""

# The attention of DeepSeek-V3 with its real head dimensions (192 for q and k, 128 for v), everything else small.
ARCHITECTURE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.05,  # the usual 0.02 learns half as fast in a model this small
}
DESCRIPTION = """\
Train a small DeepSeek-V3 on a text, generate, and check the logits against
eager attention."""

EPILOG = """\
exit status: 1 if the loss does not fall or the logits differ from those of
eager attention by more than %s.

example: mla-plugin demo --steps 100"""


AnyPlan = Plan | DecodePlan


class CallCounter:
    """A hook-wrapper plugin that counts every forward of every backend, by plan."""

    def __init__(self) -> None:
        self.plans: Counter[AnyPlan] = Counter()

    @mla_plugin.hookimpl(wrapper=True)
    def forward(
        self, plan: AnyPlan, tensors: AttentionTensors | DecodeTensors
    ) -> Generator[None, AttentionOutput | DecodeOutput, AttentionOutput | DecodeOutput]:
        """Count the call and pass its result on."""
        self.plans[plan] += 1
        return (yield)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: at least 2 steps are needed to see a loss fall")
    return int(text)


def _tokens(text: str) -> int:
    longest = ARCHITECTURE["max_position_embeddings"] - len(PROMPT)
    if not text.isdecimal() or not 1 <= int(text) <= longest:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number of bytes from 1 to {longest}")
    return int(text)


def add_parser(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "demo",
        help="train, generate and check a small DeepSeek-V3",
        description=DESCRIPTION,
        epilog=EPILOG % TOLERANCE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=_steps, default=300, help="training steps; 300 by default")
    parser.add_argument("--tokens", type=_tokens, default=200, help="bytes to generate; 200 by default")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if this machine has it, else cpu")
    parser.set_defaults(run=run)


def license_text() -> str:
    """The licence of this installation: from the wheel's metadata, else from the checkout.

    Raises:
        FileNotFoundError: it is in neither.
    """
    try:
        files = importlib.metadata.files("mla-plugin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    places = [Path(str(file.locate())) for file in files if file.name == "LICENSE"]
    places.append(Path(mla_plugin.__file__).resolve().parents[1] / "LICENSE")
    for place in places:
        if place.is_file():
            return place.read_text(encoding="utf-8")
    raise FileNotFoundError(f"no LICENSE in the metadata of mla-plugin nor at {places[-1]}; reinstall the package")


def build_model(device_type: str) -> Any:
    """A DeepSeek-V3 with random weights that uses mla-plugin for its attention."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    mla_plugin.register("transformers")
    torch.manual_seed(SEED)
    config = DeepseekV3Config(**ARCHITECTURE)
    return DeepseekV3ForCausalLM._from_config(config, attn_implementation="mla_plugin").to(device_type)


def train(model: Any, data: torch.Tensor, steps: int, report: Callable[[float], None]) -> list[float]:
    """Train on random windows of the text.

    Args:
        model: a causal language model over bytes.
        data: int64 [N], the text's bytes, on the model's device.
        steps: optimizer steps.
        report: called after each step with its loss.

    Returns:
        The loss of each step, in nats per byte.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS) * (1.0 - 0.9 * step / steps)
    )
    generator = torch.Generator().manual_seed(SEED)
    losses = []
    model.train()
    for _ in range(steps):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH_SIZE, 1), generator=generator)
        windows = data[(starts + torch.arange(LENGTH)).to(data.device)]
        loss = model(windows, labels=windows, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        report(losses[-1])
    model.eval()
    return losses


def generate(model: Any, prompt: str, num_tokens: int) -> str:
    """Continue the prompt, one sampled byte at a time."""
    torch.manual_seed(SEED)
    tokens = torch.tensor([list(prompt.encode())], device=model.device)
    written = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_tokens, do_sample=True, temperature=0.5
    )
    return bytes(written[0].tolist()).decode(errors="replace")


@torch.no_grad()
def difference_from_eager(model: Any, data: torch.Tensor) -> float:
    """Largest difference of the logits between our attention and transformers' own eager attention."""
    windows = data[: 2 * LENGTH].view(2, LENGTH)
    ours = model(windows, use_cache=False).logits
    model.set_attn_implementation("eager")
    eager = model(windows, use_cache=False).logits
    model.set_attn_implementation("mla_plugin")
    return float((ours - eager).abs().max())


def _train_with_progress(console: Any, model: Any, data: torch.Tensor, steps: int) -> list[float]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("training", BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.2f}"))
    losses: list[float] = []
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=steps, loss=float("nan"))

        def report(loss: float) -> None:
            losses.append(loss)
            progress.update(task, advance=1, loss=loss)
            if len(losses) == 1 or len(losses) % max(1, steps // 8) == 0:
                progress.console.print(f"step {len(losses):>4}  loss {loss:.3f}")

        return train(model, data, steps, report)


def _show_backends(console: Any, plans: Counter[AnyPlan]) -> None:
    """Print the number of calls per backend, and every backend's answer to the most frequent training request."""
    from rich.table import Table

    calls = Counter[str]()
    for plan, count in plans.items():
        calls[plan.forward_backend] += count
    request, platform = max(
        ((plan.request, plan.platform) for plan in plans if isinstance(plan, Plan) and plan.request.is_training),
        key=lambda asked: sum(count for plan, count in plans.items() if plan.request == asked[0]),
    )
    title = f"backends for the training step ({request.head_dim_qk}/{request.head_dim_v}, {request.attn_mask_type})"
    table = Table("backend", "verdict", "forwards run", "reasons", title=title, title_justify="left")
    for entry in survey(request, platform=platform).trace:
        verdict = "can run" if entry.accepted else "no"
        table.add_row(entry.backend, verdict, str(calls[entry.backend]), "\n".join(entry.reasons))
    console.print(table)


def _require_packages() -> None:
    missing = [name for name in ("rich", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f'the demo needs {" and ".join(missing)}: pip install "mla-plugin[demo]"')


def run(arguments: argparse.Namespace) -> int:
    """Run the demo; 1 when the loss does not fall or the logits are off."""
    _require_packages()
    from rich.console import Console

    console = Console(highlight=False)
    start = time.perf_counter()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device that PyTorch can use; run `mla-plugin doctor` to see why")
    device_type = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = build_model(device_type)
    data = torch.tensor(list(license_text().encode()), device=device_type)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    console.print(f"Training a DeepSeek-V3 of {parameters:,} parameters on {len(data):,} bytes, device {device_type}.")

    counter = CallCounter()
    threads = torch.get_num_threads()
    # The model is too small to gain much from two threads, and on a busy machine they would wait for each other.
    torch.set_num_threads(1)
    get_manager().register(counter, "demo-call-counter")
    try:
        losses = _train_with_progress(console, model, data, arguments.steps)
        written = generate(model, PROMPT, arguments.tokens)
        difference = difference_from_eager(model, data)
    finally:
        get_manager().unregister("demo-call-counter")
        torch.set_num_threads(threads)

    console.print(f"\nIt writes:\n{written}\n", markup=False)
    _show_backends(console, counter.plans)
    falls = losses[-1] < losses[0]
    console.print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per byte")
    console.print(f"logits: max |mla_plugin - eager| = {difference:.1e}, allowed {TOLERANCE:.0e}")
    succeeded = falls and difference <= TOLERANCE
    console.print(f"{'passed' if succeeded else 'FAILED'} in {time.perf_counter() - start:.0f} s")
    return 0 if succeeded else 1
