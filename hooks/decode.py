"""Decode over the compressed cache: the request that backends answer, the plan and the result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, get_type_hints

import torch

from mla_plugin.arguments.cache_format import FP8_DS_MLA, RANK, ROPE, check_format
from mla_plugin.arguments.checks import check_choice, check_count, check_device_type
from mla_plugin.arguments.decode import DecodeTensors, Profile
from mla_plugin.arguments.decode_layout import starts_aligned
from mla_plugin.arguments.layout import are_joined
from mla_plugin.arguments.options import HOSTS
from mla_plugin.hooks.types import Platform, TraceEntry

_LEAST = {"batch_size": 0, "seqlen_q": 0, "max_seqlen_kv": 0, "num_heads": 1, "kv_lora_rank": 1, "qk_rope_head_dim": 0}


@dataclass(frozen=True)
class DecodeRequest:
    """One absorbed decode call over the compressed cache, without its tensors.

    Attributes:
        dtype: dtype of the queries, and of a cache that is not quantised.
        device_type: ``"cpu"`` or ``"cuda"``.
        batch_size: number of sequences.
        seqlen_q: query tokens of each sequence; more than 1 for speculative steps.
        num_heads: query heads; all of them share the cache.
        kv_lora_rank, qk_rope_head_dim: width of ``c_kv`` and of ``k_rope`` (DeepSeek-V3: 512 and 64); the second may be
            0.
        max_seqlen_kv: keys that the cache has room for per sequence. ``decode`` rounds it up to a power of two, so that
            a cache that grows one token at a time does not make a new request at every step.
        page_size: tokens per page; None for a contiguous cache.
        causal: query i of seqlen_q sees keys up to seqlens_kv - seqlen_q + i; False for a single query, which sees all.
        has_seqlens_kv: lengths are given per sequence; otherwise every sequence fills a contiguous cache.
        has_host_lengths: the host knows the lengths too: the sequences fill the cache, or a ``DecodeLengths`` has
            them.
        profile: mean and spread of the lengths, rounded; None if the host does not know them.
        has_leftpad_kv: sequences are left-padded in the cache.
        has_aligned_rows: every row of c_kv and of k_rope starts on a 16-byte boundary.
        has_joined_rows: each row of k_rope follows that of c_kv in memory: both are columns of one tensor.
        return_lse: the caller wants the log-sum-exp.
        batch_invariant: as in ``mla_plugin.decode``; a backend that does not guarantee it refuses.
        kv_cache_format: ``"plain"``, ``"fp8"`` or ``"fp8_ds_mla"``, see ``arguments/cache_format.py``. An acceptance
            that does not name the format in ``Accepted.kv_cache_formats`` counts as a refusal.
        device_index: CUDA device ordinal; None for the current device or for the CPU.
        host: the calling framework.

    Raises:
        ValueError, TypeError: an attribute is invalid; the message says what was given and what is expected.
    """

    dtype: torch.dtype
    device_type: str
    batch_size: int
    seqlen_q: int
    num_heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    max_seqlen_kv: int
    page_size: int | None = None
    causal: bool = False
    has_seqlens_kv: bool = False
    has_host_lengths: bool = False
    profile: Profile | None = None
    has_leftpad_kv: bool = False
    has_aligned_rows: bool = True
    has_joined_rows: bool = True
    return_lse: bool = False
    batch_invariant: bool = False
    kv_cache_format: str = "plain"
    device_index: int | None = None
    host: str = "direct"

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype={self.dtype!r}; expected a torch.dtype")
        check_device_type(self.device_type)
        for name, least in _LEAST.items():
            check_count(name, getattr(self, name), least)
        if self.page_size is not None:
            check_count("page_size", self.page_size, 1)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}; expected True or False")
        if self.profile is not None:
            _check_profile(self.profile)
        check_choice("host", self.host, HOSTS)
        check_format(self.kv_cache_format)
        if self.kv_cache_format == FP8_DS_MLA and (self.kv_lora_rank, self.qk_rope_head_dim) != (RANK, ROPE):
            raise ValueError(
                f"kv_lora_rank={self.kv_lora_rank}, qk_rope_head_dim={self.qk_rope_head_dim}; "
                f"kv_cache_format='fp8_ds_mla' has {RANK} and {ROPE}"
            )

    @classmethod
    def of(cls, tensors: DecodeTensors, *, host: str = "direct", batch_invariant: bool = False) -> DecodeRequest:
        """Build the request of checked tensors."""
        q, c_kv, k_rope, page_table = tensors.q_nope_abs, tensors.c_kv, tensors.k_rope, tensors.page_table
        batch, seqlen_q, heads, rank = q.shape
        steps = [stride * x.element_size() for x in (c_kv, k_rope) for stride in x.stride()[:-1]]
        return cls(
            dtype=q.dtype,
            device_type=q.device.type,
            device_index=q.device.index,
            batch_size=batch,
            seqlen_q=seqlen_q,
            num_heads=heads,
            kv_lora_rank=rank,
            qk_rope_head_dim=tensors.q_rope.shape[-1],
            max_seqlen_kv=1 << (tensors.capacity - 1).bit_length() if tensors.capacity else 0,
            page_size=None if page_table is None else c_kv.shape[1],
            causal=tensors.causal,
            has_seqlens_kv=tensors.seqlens_kv is not None,
            has_host_lengths=tensors.seqlens_kv is None or tensors.host_lengths is not None,
            profile=_profile_of(tensors),
            has_leftpad_kv=tensors.leftpad_kv is not None,
            has_aligned_rows=starts_aligned(c_kv, k_rope) and all(step % 16 == 0 for step in steps),
            has_joined_rows=are_joined(c_kv, k_rope),
            return_lse=tensors.return_lse,
            batch_invariant=batch_invariant,
            kv_cache_format=tensors.kv_cache_format,
            host=host,
        )

    def replace(self, **changes: object) -> DecodeRequest:
        """A copy with some attributes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]


_FLAGS = tuple(name for name, kind in get_type_hints(DecodeRequest).items() if kind is bool)


def _check_profile(profile: object) -> None:
    if not isinstance(profile, Profile):
        raise TypeError(f"profile={profile!r}; expected a Profile, such as that of DecodeLengths, or None")
    check_count("profile.mean", profile.mean)
    check_count("profile.spread", profile.spread, 1)


def _profile_of(tensors: DecodeTensors) -> Profile | None:
    if tensors.lengths is not None:
        return tensors.lengths.profile
    return Profile.of([tensors.capacity]) if tensors.seqlens_kv is None else None


@dataclass(frozen=True)
class DecodePlan:
    """The decision for one decode request: which backend runs it."""

    request: DecodeRequest
    platform: Platform
    forward_backend: str
    trace: tuple[TraceEntry, ...] = ()


class DecodeOutput(NamedTuple):
    """What a decode returns.

    Attributes:
        out: [B, S_q, H, R], dtype of the queries; a query that sees no key is 0.
        lse: [B, H, S_q], natural log, float32 (float64 for float64); -inf for a query that sees no key. None if the
            call does not ask for it.
    """

    out: torch.Tensor
    lse: torch.Tensor | None
