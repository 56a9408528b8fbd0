"""Reasons that most attention backends share, for their ``select_backend``."""

from __future__ import annotations

from collections.abc import Iterator

from mla_plugin.arguments.cache_format import PLAIN
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Accepted, Refused

BATCH_DEPENDENT = "batch_invariant=True, expected False: the bits of a row may depend on the rest of the batch"
"""The reason of a backend that does not guarantee ``batch_invariant``."""


def if_it_reads_the_cache(answer: Accepted | Refused, request: AttentionRequest | DecodeRequest) -> Accepted | Refused:
    """The backend's answer; a refusal if the answer does not name the format of the request's cache.

    A backend that was written before a format existed is therefore never given a cache of that format.
    """
    kv_format = getattr(request, "kv_cache_format", PLAIN)
    if isinstance(answer, Refused) or kv_format == PLAIN or kv_format in answer.kv_cache_formats:
        return answer
    formats = " or ".join(map(repr, (PLAIN, *answer.kv_cache_formats)))
    return Refused((f"kv_cache_format={kv_format!r}, expected {formats}: this backend does not read such a cache",))


def plain_attention_refusals(request: AttentionRequest) -> Iterator[str]:
    """Yield the reasons of a backend that computes only softmax(scores) @ V over expanded K and V.

    Refused are dropout, a bias, batch invariance, fp8, another softmax, a score function, a key-value cache, the
    largest logit, split sums and context parallelism. A backend that supports one of these must yield the other reasons
    itself. Layouts, masks, windows, lengths, grouped heads, head dimensions and dtypes are left to the backend.

    Args:
        request: the call.

    Yields:
        one reason for each, with the value found and the value expected.
    """
    if request.dropout_p:
        yield f"dropout_p={request.dropout_p}, expected 0"
    if request.bias_type != "no_bias":
        yield f"bias_type={request.bias_type!r}, expected 'no_bias'"
    yield from beyond_plain_attention(request)


def beyond_plain_attention(request: AttentionRequest) -> Iterator[str]:
    """The same for a backend that also supports a bias and dropout."""
    if request.batch_invariant:
        yield BATCH_DEPENDENT
    yield from beyond_the_tensors(request)


def beyond_the_tensors(request: AttentionRequest) -> Iterator[str]:
    """Reasons for features of a request whose tensors are not passed to the hooks."""
    if request.softmax_type != "vanilla":
        yield f"softmax_type={request.softmax_type!r}, expected 'vanilla'"
    if request.has_score_mod or request.has_score_mod_bprop:
        yield f"score_mod={request.has_score_mod}, score_mod_bprop={request.has_score_mod_bprop}, expected neither"
    if request.fp8:
        yield "fp8=True, expected False"
    if request.return_max_logit:
        yield "return_max_logit=True, expected False"
    if request.num_splits != 1:
        yield f"num_splits={request.num_splits}, expected 1"
    if request.has_kv_cache:
        yield "has_kv_cache=True, expected False"
    if request.context_parallel:
        yield f"context_parallel=True over cp_size={request.cp_size}, expected False"
