"""Reasons that several backends share, for their ``select_backend``."""

from __future__ import annotations

from collections.abc import Iterator

from mla_plugin.types import AttentionRequest, Refused

NO_DECODE = Refused(("DecodeRequest, accepted is AttentionRequest: this backend reads expanded keys and values",))
"""The answer to a decode request of a backend that computes none."""


def beyond_plain_attention(request: AttentionRequest) -> Iterator[str]:
    """Reasons of a backend that computes softmax(scores) @ V over expanded K and V on one device, and nothing else."""
    if request.softmax_type != "vanilla":
        yield f"softmax_type={request.softmax_type!r}, accepted is 'vanilla'"
    if request.has_score_mod or request.has_score_mod_bprop:
        yield f"score_mod={request.has_score_mod}, score_mod_bprop={request.has_score_mod_bprop}, accepted is neither"
    if request.fp8:
        yield "fp8=True, accepted is False"
    if request.return_max_logit:
        yield "return_max_logit=True, accepted is False"
    if request.num_splits != 1:
        yield f"num_splits={request.num_splits}, accepted is 1"
    if request.has_kv_cache:
        yield "has_kv_cache=True, accepted is False"
    if request.context_parallel:
        yield f"context_parallel=True over cp_size={request.cp_size}, accepted is False"
