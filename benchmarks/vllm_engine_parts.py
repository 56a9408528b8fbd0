"""What ``vllm_engine_run`` puts into vLLM's engine: a model, its weights, a filled cache, and a clock on the GPU."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

LOAD_FORMAT = "random_by_name"
ALPHABET = 64
"""Tokens that prompts consist of and that the model generates: an n-gram of one is found in any prompt."""
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 102400,
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
TINY |= {"num_hidden_layers": 2, "vocab_size": 512, "bos_token_id": 500, "eos_token_id": 501}


def make_model(folder: Path, layers: int | None, is_dense: bool, is_tiny: bool) -> None:
    """A configuration without weights. Dense: each layer's MLP is that of the first, about as wide as 6 + 2 experts."""
    model = DEEPSEEK_V2_LITE | (TINY if is_tiny else {})
    model |= {} if layers is None else {"num_hidden_layers": layers}
    model |= {"first_k_dense_replace": model["num_hidden_layers"]} if is_dense else {}
    (folder / "config.json").write_text(json.dumps(model))


@register_model_loader(LOAD_FORMAT)
class RandomByName(DummyModelLoader):
    """Weights of a parameter depend on its name alone, and are such that the next token is no toss-up.

    vLLM's own dummy weights are at most 1e-3, norms too: what its layers compute with them vanishes.
    """

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill every parameter."""
        for name, parameter in model.named_parameters():
            generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(name.encode()))
            if parameter.dim() == 1:
                parameter.data.fill_(float("norm" in name))
                continue
            parameter.data.normal_(0, _deviation(name, parameter), generator=generator)
            if "lm_head" in name:
                parameter.data[ALPHABET:] = 0


def _deviation(name: str, parameter: torch.Tensor) -> float:
    """Of the weights: outputs are as large as inputs, but queries, so that few keys matter, and logits."""
    if "embed_tokens" in name:
        return 1.0
    gain = 3.0 if "q_proj" in name else 6.0 if "lm_head" in name else 1.0
    return float(gain / parameter.shape[-1] ** 0.5)


class FilledCache(DecodeBenchConnector):  # type: ignore[misc]
    """Requests decode from the start, over pages of random latents of their own, while ``is_on``."""

    is_on = False

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Fill the whole cache once."""
        for cache in kv_caches.values():
            cache.normal_()

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Nothing to load."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All tokens but the last, or none."""
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found if self.is_on else (0, False)


class Replays:
    """Milliseconds on the GPU of each replay of a CUDA graph: a step's forward, without the engine around it."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        replay = torch.cuda.CUDAGraph.replay

        def timed(graph: torch.cuda.CUDAGraph) -> None:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            replay(graph)
            end.record()
            self._events.append((start, end))

        torch.cuda.CUDAGraph.replay = timed

    def take(self) -> Iterator[float]:
        """Those since the last call."""
        torch.cuda.synchronize()
        events, self._events = self._events, []
        return (start.elapsed_time(end) for start, end in events)
