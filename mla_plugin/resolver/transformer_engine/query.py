"""The typed input of one TransformerEngine selection, which its rules read. ``inputs`` builds it.

Rule numbers are those of ``docs/te_selection.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from mla_plugin.resolver.transformer_engine.flash import ComputeCapability, at_least
from mla_plugin.resolver.transformer_engine.release import Release, Span

FLASH_VERSIONS = ("flash2", "flash3", "flash4")
HALF_TYPES = ("bfloat16", "float16")
_WITHOUT_DIGITS = str.maketrans("", "", "0123456789")
UNCAUSAL_MASKS = ("no_mask", "padding", "arbitrary")

Window = tuple[int, int]


@dataclass(frozen=True)
class Query:
    """Everything that one selection depends on.

    Attributes:
        dq, dv: head_dim_qk and head_dim_v; ``sq``, ``skv``: longest query and key sequence; ``cc``: compute capability.
        q_format, kv_format: ``bshd``, ``sbhd`` or ``thd``; without a KV cache both are the layout's first.
        release: of TransformerEngine, by its first two numbers.
        window: as given; None means the mask's default (``full_window``).
        bias_shape: ``"1hss"`` and the like; None without a bias.
        softcap: limit of the scores, 0 for none; ``fa3_softcap``: whether FlashAttention 3's functions take one.
        switched_off: backends that an environment variable disables, with the setting; ``flash`` means all three
            versions of FlashAttention.
        flash_versions: installed version by backend name; ``absent``: why a version counts as not installed.
        fused_supported: cuDNN's answer if the caller knows it; None to evaluate rule 42.
        short_first: whether cuDNN's kernels for short sequences come before the general ones.
        The others have the names of TransformerEngine's ``AttentionParams``, some of them shortened.
    """

    release: Release
    dtype: str
    layout: str
    batch_size: int
    q_format: str
    kv_format: str
    num_heads: int
    num_kv_heads: int
    sq: int
    skv: int
    dq: int
    dv: int
    mask: str
    window: Window | None
    bottom_right_diagonal: bool
    has_alibi_slopes: bool
    bias_type: str
    bias_shape: str | None
    bias_requires_grad: bool
    pad_between_seqs: bool
    dropout: float
    softcap: float
    context_parallel: bool
    cp_comm_type: str
    is_training: bool
    kv_cache: bool
    is_paged: bool
    page_size: int | None
    softmax_type: str
    return_max_logit: bool
    cuda_graph: bool
    num_splits: int | None
    checkpoint_core_attention: bool
    has_score_mod: bool
    has_score_mod_bprop: bool
    deterministic: bool
    cc: ComputeCapability
    cudnn: tuple[int, ...]
    fused_supported: bool | None
    short_first: bool
    flash_versions: Mapping[str, str]
    fa3_softcap: bool
    absent: Mapping[str, str]
    switched_off: Mapping[str, str]

    def has(self, version: str) -> bool:
        """Whether a version of FlashAttention counts as installed."""
        return version not in self.absent

    def fa2_at_least(self, minimum: str) -> bool:
        """Whether FlashAttention 2 is new enough; True when it is absent, since then there is nothing to remove."""
        return not self.has("flash2") or at_least(self.flash_versions["flash2"], minimum)

    @cached_property
    def fmt(self) -> str:
        """Format of Q, or ``thd_2bshd`` and the like when the KV cache is kept in another format."""
        return _joined(self.q_format, self.kv_format)

    @cached_property
    def layout_formats(self) -> tuple[str, str]:
        """Formats of Q and of K and V as cuDNN derives them from the layout, with or without a KV cache."""
        return layout_formats(self.layout)

    @cached_property
    def layout_format(self) -> str:
        """``fmt`` as cuDNN derives it from the layout."""
        return _joined(*self.layout_formats)

    @cached_property
    def is_paged_layout(self) -> bool:
        """Whether K and V are paged according to the layout."""
        return self.layout.startswith("paged_kv_")

    @cached_property
    def full_window(self) -> Window:
        """The window with None replaced by the mask's default (rule 30); a given window is taken as it is."""
        return normalise_window(self.mask, None) if self.window is None else self.window

    @cached_property
    def swa(self) -> bool:
        """Sliding-window attention: the window removes more than a causal mask does."""
        return self.window is not None and (self.window[0] != -1 or self.window[1] not in (-1, 0))

    @cached_property
    def is_top_left_cross(self) -> bool:
        """Cross-attention whose diagonal starts at the first query and the first key."""
        return not self.bottom_right_diagonal and self.sq != self.skv

    @cached_property
    def is_blackwell_datacenter(self) -> bool:
        """Compute capability 10.x or 11.x, where FlashAttention 4 has separate kernels with other restrictions."""
        return (10, 0) <= self.cc < (12, 0)

    @cached_property
    def fused_bias_type(self) -> str:
        """Bias type in cuDNN's query: ALiBi may become a post-scale bias (rule 36)."""
        if self.bias_type != "alibi":
            return self.bias_type
        as_bias = any(change.when(self) for change in ALIBI_AS_BIAS if change.holds_in(self.release))
        return "post_scale_bias" if as_bias else "alibi"

    @property
    def device(self) -> str:
        """The compute capability, for a message."""
        return f"compute capability {self.cc[0]}.{self.cc[1]}"

    @property
    def lengths(self) -> str:
        """The sequence lengths, for a message."""
        return f"max_seqlen_q={self.sq} and max_seqlen_kv={self.skv}"

    @property
    def cudnn_text(self) -> str:
        """cuDNN's version, for a message."""
        return ".".join(map(str, self.cudnn))


@dataclass(frozen=True)
class AlibiAsBias(Span):
    """A call for which cuDNN gets ALiBi as a post-scale bias without gradient (rule 36)."""

    when: Callable[[Query], bool]


ALIBI_AS_BIAS: tuple[AlibiAsBias, ...] = (
    AlibiAsBias(lambda q: q.has_alibi_slopes),
    AlibiAsBias(lambda q: q.sq != q.skv, until="2.11"),
)


def layout_formats(layout: str) -> tuple[str, str]:
    """Formats of Q and of K and V: ``"thd_bshd_bshd"`` gives ``("thd", "bshd")``, ``"bs3hd"`` ``("bshd", "bshd")``."""
    pieces = layout.removeprefix("paged_kv_").translate(_WITHOUT_DIGITS).split("_")
    return pieces[0], pieces[min(1, len(pieces) - 1)]


def _joined(q_format: str, kv_format: str) -> str:
    return q_format if q_format == kv_format else f"{q_format}_2{kv_format}"


def normalise_window(mask: str, window: Window | None) -> Window:
    """The window as TransformerEngine normalises it: (left, right) tokens, -1 for unlimited.

    A causal mask turns (-1, -1) into (-1, 0) and (left, right) into (left, 0); other masks turn (-1, 0) into (-1, -1).

    Args:
        mask: attention mask type.
        window: (left, right); None for the mask's default.

    Raises:
        AssertionError: as in TransformerEngine, for an unknown mask or a window that the mask does not allow.
    """
    causal = "causal" in mask
    if not causal and mask not in UNCAUSAL_MASKS:
        raise AssertionError(f"attn_mask_type={mask!r}: expected {', '.join(UNCAUSAL_MASKS)} and the causal masks")
    if window is None or window in ((-1, -1), (-1, 0)):
        return (-1, 0) if causal else (-1, -1)
    left, right = window
    if left < 0 or (right < 0 and not causal):
        accepted = "(-1, 0) or (left >= 0, 0)" if causal else "(-1, -1) or (left >= 0, right >= 0)"
        raise AssertionError(f"window_size={window} with attn_mask_type={mask!r}: expected {accepted}")
    return (left, 0) if causal else window
