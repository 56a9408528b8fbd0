"""A decision as text: for ``explain``, for the log, and for the error when no backend is left."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest, Plan
from mla_plugin.hooks.types import Platform, TraceEntry

if TYPE_CHECKING:
    from mla_plugin.resolver.transformer_engine.cascade import CascadeDecision

logger = logging.getLogger("mla_plugin")

ADVICE = "Change what a reason names, or install a backend that `mla-plugin doctor` lists as missing."


class Decision(NamedTuple):
    """A survey's result.

    Attributes:
        request, platform: what was decided on.
        trace: every backend with its verdict, in the order tried, those left out last.
        plan: the plan; None when no backend is left.
        cascade: what TransformerEngine itself would decide; None if its selection does not apply.
    """

    request: AttentionRequest
    platform: Platform
    trace: tuple[TraceEntry, ...]
    plan: Plan | None = None
    cascade: CascadeDecision | None = None

    @property
    def error(self) -> str | None:
        """The message of the NoBackendError, or None when a backend was found."""
        return None if self.plan else no_backend_message(self)


def _describe_request(request: AttentionRequest) -> str:
    """The request in one line, with its defaults left out."""
    heads = f"{request.num_heads} heads"
    if request.num_kv_heads != request.num_heads:
        heads += f" over {request.num_kv_heads} key-value heads"
    parts = [
        f"{request.qkv_format} {str(request.dtype).removeprefix('torch.')}",
        f"batch {request.batch_size}",
        f"lengths {request.max_seqlen_q} x {request.max_seqlen_kv}",
        heads,
        f"head dims {request.head_dim_qk}/{request.head_dim_v}",
        request.attn_mask_type,
    ]
    if request.has_sliding_window:
        parts.append(f"window {request.window_size}")
    if request.bias_type != "no_bias":
        parts.append(request.bias_type)
    if request.dropout_p:
        parts.append(f"dropout {request.dropout_p}")
    flags = (
        *("pad_between_seqs", "deterministic", "batch_invariant", "has_kv_cache", "context_parallel", "fp8"),
        *("return_lse", "partial"),
    )
    parts.extend(flag for flag in flags if getattr(request, flag))
    parts.append("training" if request.is_training else "inference")
    return ", ".join(parts)


def describe_platform(platform: Platform) -> str:
    """The platform in short form, such as ``cuda sm90``."""
    if platform.compute_capability is None:
        return platform.device_type
    major, minor = platform.compute_capability
    return f"{platform.device_type} sm{major}{minor}"


def lines(trace: tuple[TraceEntry, ...]) -> list[str]:
    """One line for each backend: its verdict and its reasons."""
    width = max((len(entry.backend) for entry in trace), default=0)
    found = []
    for entry in trace:
        verdict = "can run" if entry.accepted else {"backend": "refuses", "cascade": "left out"}.get(entry.layer, "off")
        reasons = "; ".join(entry.reasons)
        found.append(f"  {entry.backend:<{width}}  {verdict:<8}  {reasons}".rstrip())
    return found


def no_backend_message(decision: Decision) -> str:
    """Every backend with every reason, and what to do."""
    return "\n".join(
        [
            f"no attention backend takes this request on {describe_platform(decision.platform)}:",
            f"  {_describe_request(decision.request)}",
            *lines(decision.trace),
            ADVICE,
        ]
    )


def describe(decision: Decision) -> str:
    """The whole decision: the request, each backend in the order tried with its reasons, and what runs."""
    text = [f"{_describe_request(decision.request)}  on {describe_platform(decision.platform)}"]
    if decision.cascade is not None:
        text.append(f"TransformerEngine {decision.cascade.release}'s own selection: {decision.cascade.selected}")
    text += lines(decision.trace)
    if decision.plan is None:
        text.append("=> no backend")
    else:
        plan = decision.plan
        backward = f", backward: {plan.backward_backend}" if decision.request.is_training else ""
        text.append(f"=> forward: {plan.forward_backend}{backward}")
    return "\n".join(text)


def log_decision(describe: Callable[[], str], environ: Mapping[str, str]) -> None:
    """Log a new decision according to NVTE_DEBUG and NVTE_DEBUG_LEVEL: 1 logs what runs, 2 also every reason.

    Args:
        describe: returns the decision as text, whose last line says what runs.
        environ: the environment of the decision.
    """
    if not environment.parse("NVTE_DEBUG", environ):
        return
    level = environment.parse("NVTE_DEBUG_LEVEL", environ)
    if not isinstance(level, int) or level < 1:
        return
    logger.setLevel(logging.DEBUG if level >= 2 else logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(levelname)-8s | %(name)s]: %(message)s"))
        logger.addHandler(handler)
    text = describe()
    logger.info("%s", text.splitlines()[-1].removeprefix("=> "))
    logger.debug("%s", text)
