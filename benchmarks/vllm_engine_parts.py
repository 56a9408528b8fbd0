"""What ``vllm_engine_run`` puts into vLLM's engine: weights, a filled cache, and a clock on the GPU."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

LOAD_FORMAT = "random_by_name"
ALPHABET = 64
"""Tokens that prompts consist of and that the model generates.

An n-gram of one is found in any prompt, often near its end, with few tokens after it.
"""
PAGES_AT_ONCE = 4096
"""Filled through a tensor in bfloat16, because PyTorch draws no random e4m3."""


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
            if cache.element_size() > 1:
                cache.normal_()
                continue
            for part in cache.view(torch.float8_e4m3fn).split(PAGES_AT_ONCE):
                part.copy_(torch.randn(part.shape, dtype=torch.bfloat16, device=part.device))

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        """Nothing to load."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """All tokens but the last, or none."""
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found if self.is_on else (0, False)


def complete_drafts() -> None:
    """Every request gets as many drafts as the engine was asked for, whatever its prompt has after an n-gram.

    Where one request has fewer, vLLM 0.25 computes the step as a prefill, without a graph. In a batch of random prompts
    that is nearly every step.
    """
    propose = NgramProposer.propose
    signature = inspect.signature(propose)

    def completed(proposer: NgramProposer, *given: Any, **named: Any) -> list[list[int]]:
        sampled = signature.bind(proposer, *given, **named).arguments["sampled_token_ids"]
        found = propose(proposer, *given, **named)
        spare = list(range(2, 2 + proposer.k))
        # no token was sampled of a request whose prompt is not complete yet
        return [
            [*drafts, *spare[len(drafts) :]] if len(new) else [] for drafts, new in zip(found, sampled, strict=True)
        ]

    NgramProposer.propose = completed


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
