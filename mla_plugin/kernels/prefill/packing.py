"""Where the sequences are in the tensors, and the launch arguments that every prefill kernel needs."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments.layout import LAYOUTS, Layout
from mla_plugin.arguments.mask import OPEN, Band
from mla_plugin.kernels import tiles
from mla_plugin.kernels.launch import named_strides
from mla_plugin.kernels.tile_math import split_head_dim

WIDE_STRIDE = 2**31 // 128
"""Token stride from which a tile of 128 rows, the largest, exceeds int32 offsets."""

OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
"""The kernels' names for the tensors of ``Packing.offsets``."""


@dataclass(frozen=True)
class Packing:
    """Where the sequences are in the tensors, and which keys each query sees.

    Attributes:
        qkv_format: ``bshd``, ``sbhd``, ``bhsd`` or ``thd``.
        max_seqlen_q, max_seqlen_kv: longest sequence; in a dense layout at most S.
        cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], true lengths; None: every sequence fills its row.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], first token of each sequence; ``thd`` only, None: as
            the true lengths.
        mask: the keys that a query sees.
        same_lengths: each sequence has as many queries as keys.
    """

    qkv_format: str
    max_seqlen_q: int
    max_seqlen_kv: int
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    mask: Band = OPEN
    same_lengths: bool = False

    @functools.cached_property
    def band(self) -> Band:
        """``mask``; a side that reaches beyond every token is open: kernels add windows to positions, in int32."""
        return self.mask.within(self.max_seqlen_q + self.max_seqlen_kv)

    @property
    def layout(self) -> Layout:
        """The axes of q, k, v and out."""
        return LAYOUTS[self.qkv_format]

    def offsets(self) -> tuple[torch.Tensor | None, ...]:
        """cu_seqlens_q, cu_seqlens_kv and where the sequences start: contiguous, as the kernels read them."""
        lengths_q, lengths_kv = self.cu_seqlens_q, self.cu_seqlens_kv
        if lengths_q is None or lengths_kv is None:
            return None, None, None, None
        lengths_q, lengths_kv = lengths_q.contiguous(), lengths_kv.contiguous()
        starts_q, starts_kv = self.cu_seqlens_q_padded, self.cu_seqlens_kv_padded
        return (
            lengths_q,
            lengths_kv,
            lengths_q if starts_q is None else starts_q.contiguous(),
            lengths_kv if starts_kv is None else starts_kv.contiguous(),
        )


_ALIGNMENT = 16  # elements: the multiple that Triton looks for in a stride


@functools.lru_cache(maxsize=4096)
def _are_aligned(strides: tuple[int, ...]) -> bool:
    return all(stride % _ALIGNMENT == 0 for stride in strides)


def with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x itself, or a copy whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x with contiguous rows; on Hopper a copy of 2-byte elements if strides or address are not multiples of 16.

    Triton reads 16 bytes at a time if it knows that strides (elements) and address (bytes) are such multiples, and the
    width a multiple of 8. Other rows are read element by element and not pipelined, several times slower than the copy.
    Moreover k and v then share shared memory, for which CUDA 12.8's assembler omits addresses of the matrix
    instructions: results were wrong on an H200. tests/kernels/assembly.py checks for this in everything compiled ahead
    of time.
    """
    strides = x.stride()
    if strides[-1] != 1:
        return with_aligned_rows(x.contiguous())
    if x.data_ptr() % 16 == 0 and _are_aligned(strides[:-1]):
        return x
    if x.element_size() != 2 or gpu_class_of(x.device) != "Hopper":
        return x
    pitch = -(-x.shape[-1] // _ALIGNMENT) * _ALIGNMENT
    return x.new_empty((*x.shape[:-1], pitch))[..., : x.shape[-1]].copy_(x)


def lse_like(q: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Memory for the log-sum-exp; filled with -inf for packed sequences, where padding tokens see no key."""
    shape = layout.lse_shape(q.shape)
    if layout.is_packed:
        return q.new_full(shape, -torch.inf, dtype=torch.float32)
    return q.new_empty(shape, dtype=torch.float32)


def output_like(x: torch.Tensor, head_dim: int, layout: Layout, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Memory for an output, of x's dtype by default; zeros for packed sequences, whose padding no program writes."""
    shape = (*x.shape[:-1], head_dim)
    return x.new_zeros(shape, dtype=dtype) if layout.is_packed else x.new_empty(shape, dtype=dtype)


@functools.cache
def gpu_class_of(device: torch.device) -> str:
    """The GPU class of a device, see tiles.py."""
    if device.type != "cuda":
        return tiles.INTERPRETED
    properties: Any = torch.cuda.get_device_properties(device)  # PyTorch's stub lacks the shared memory
    return tiles.gpu_class((properties.major, properties.minor), properties.shared_memory_per_block_optin)


@functools.cache
def l2_cache_bytes(device: torch.device) -> int:
    """Size of a device's L2 cache; an H100's under the interpreter."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 50 << 20


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a device; 1 under the interpreter, which runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def columns_of(head_dim_qk: int, head_dim_v: int) -> tuple[int, int, int, int]:
    """The blocks of columns of both head dimensions: QK0, QK1, V0, V1."""
    return (*split_head_dim(head_dim_qk), *split_head_dim(head_dim_v))


def static_tile(kernel: str, q: torch.Tensor, v: torch.Tensor) -> tiles.Tile:
    """The table's tile for a call of one of the kernels that ``tiles.TABLES`` names."""
    columns = sum(columns_of(q.shape[-1], v.shape[-1]))
    return tiles.tile_for(tiles.TABLES[kernel], gpu_class_of(q.device), q.element_size(), columns)


def launch_options(tile: tiles.Tile) -> dict[str, int | None]:
    """A tile's launch options."""
    options: dict[str, int | None] = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    return options


def is_wide(*strides: tuple[int, int, int]) -> bool:
    """A tile of one of the tensors, given by its (sequence, head, token) strides, exceeds int32 offsets."""
    return max(token for _, _, token in strides) >= WIDE_STRIDE


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are computed in float32; TF32 would lose half of the digits."""
    return "ieee" if dtype == torch.float32 else "tf32"


def is_in(v: torch.Tensor, k: torch.Tensor) -> bool:
    """v is the first columns of k, in the same memory. Both have equal sizes but for columns; v may not have more."""
    if v.data_ptr() != k.data_ptr() or v.shape[-1] > k.shape[-1]:
        return False
    # the stride of a dimension of size 1 is arbitrary
    return all(a == b for a, b, size in zip(v.stride(), k.stride(), k.shape, strict=True) if size > 1)


class Kind(NamedTuple):
    """Everything that the launches of a prefill call depend on, except its tensors' addresses.

    Of these only ``v_is_in_k`` matters.

    Attributes:
        dtype, device: of q, k and v.
        qkv_format, band, same_lengths: see ``Packing``.
        has_lengths: ``Packing`` has lengths.
        q_shape, k_shape, v_shape, q_strides, k_strides, v_strides: as the tensors say.
        v_is_in_k: v is the first columns of k, in the same memory, as with absorbed weights.
        num_sequences: B.
        seqlen_q, seqlen_kv: tokens that the grids cover per sequence: the longest one; S in a dense layout, where rows
            after the longest sequence are written too.
        softmax_scale: > 0.
    """

    dtype: torch.dtype
    device: torch.device
    qkv_format: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    v_is_in_k: bool
    num_sequences: int
    seqlen_q: int
    seqlen_kv: int
    band: Band
    has_lengths: bool
    same_lengths: bool
    softmax_scale: float

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, packing: Packing) -> Kind:
        """The kind of one call."""
        q_shape, k_shape, cu_seqlens, layout = q.shape, k.shape, packing.cu_seqlens_q, packing.layout
        if layout.is_packed and cu_seqlens is not None:
            sizes = (cu_seqlens.shape[0] - 1, packing.max_seqlen_q, packing.max_seqlen_kv)
        else:
            batch, _, seqlen_q = layout.pick(q_shape)
            sizes = (batch, seqlen_q, layout.pick(k_shape)[2])
        return cls(
            q.dtype,
            q.device,
            packing.qkv_format,
            q_shape,
            k_shape,
            v.shape,
            q.stride(),
            k.stride(),
            v.stride(),
            is_in(v, k),
            *sizes,
            packing.band,
            cu_seqlens is not None,
            packing.same_lengths,
            softmax_scale,
        )

    @property
    def layout(self) -> Layout:
        """As ``Packing.layout``."""
        return LAYOUTS[self.qkv_format]

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q_shape[self.layout.heads]

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.k_shape[self.layout.heads]

    @property
    def columns(self) -> tuple[int, int, int, int]:
        """The blocks of columns, see ``columns_of``."""
        return columns_of(self.q_shape[-1], self.v_shape[-1])

    @property
    def shapes_show_every_query_a_key(self) -> bool:
        """Known from the shapes; False if lengths decide."""
        return not self.has_lengths and self.band.shows_every_query_a_key(self.seqlen_q, self.seqlen_kv)

    @property
    def some_query_may_see_no_key(self) -> bool:
        """A row of a sequence that has keys may see none of them, as far as the host knows.

        In a dense layout the rows past a sequence's end are such rows too.
        """
        if not self.has_lengths:
            return not self.shapes_show_every_query_a_key
        if not self.layout.is_packed:
            return True
        left, right, bottom_right = self.band
        return not self.same_lengths and (right if bottom_right else left) >= 0

    @property
    def lse_strides(self) -> tuple[int, int]:
        """Of ``lse_like``, between sequences and between heads."""
        heads, tokens = self.layout.lse_shape(self.q_shape)[-2:]
        return (0, tokens) if self.layout.is_packed else (heads * tokens, tokens)

    def pick(self, values: Sequence[int]) -> tuple[int, int, int]:
        """(sequence, head, token) of strides in this layout."""
        return self.layout.pick(values)

    def is_wide(self, *others: tuple[int, int, int]) -> bool:
        """A tile of q, k, v or the others, given by their picked strides, exceeds int32 offsets."""
        own = (self.pick(strides) for strides in (self.q_strides, self.k_strides, self.v_strides))
        return is_wide(*own, *others)

    def arguments(self, tile: tiles.Tile) -> dict[str, object]:
        """The arguments that the forward kernel and both backward kernels have in common."""
        return {
            **named_strides("q", "bhm", self.pick(self.q_strides)),
            **named_strides("k", "bhn", self.pick(self.k_strides)),
            **named_strides("v", "bhn", self.pick(self.v_strides)),
            **named_strides("l", "bh", self.lse_strides),
            **dict(zip(("QK0", "QK1", "V0", "V1"), self.columns, strict=True)),
            "max_seqlen_q": self.seqlen_q,
            "max_seqlen_kv": self.seqlen_kv,
            "window_left": self.band.left,
            "window_right": self.band.right,
            "softmax_scale": self.softmax_scale,
            "D_QK": self.q_shape[-1],
            "D_V": self.v_shape[-1],
            "GROUP": self.num_heads // self.num_kv_heads,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "PACKED": self.layout.is_packed,
            "HAS_LENGTHS": self.has_lengths,
            "BOTTOM_RIGHT": self.band.bottom_right,
            "HAS_LEFT": self.band.left >= 0,
            "HAS_RIGHT": self.band.right >= 0,
            "PRECISION": dot_precision(self.dtype),
        }
