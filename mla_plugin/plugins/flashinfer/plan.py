"""Plans: created once per ``DecodeLengths`` and stored there, shared by all layers of a step, updated in place."""

from __future__ import annotations

import importlib
import math
import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import torch

from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.arguments.decode_layout import known_of
from mla_plugin.arguments.layout import aligned
from mla_plugin.hooks.decode import DecodeOutput

_KEPT = "flashinfer"
"""Where a layout's ``Work`` is kept."""
WORKSPACE_BYTES = 128 << 20
_LEAST_SCALE = 2.0**-10
"""Of softmax_scale; a smaller one is replaced, see ``_rescaled``."""

_workspaces: dict[torch.device, torch.Tensor] = {}


class Work(NamedTuple):
    """The part of a call's layout that a plan depends on; layers whose caches have other strides share a plan."""

    device: torch.device
    dtype: torch.dtype
    table: tuple[int, int, int]
    page_size: int
    seqlen_q: int
    num_heads: int
    rank: int
    rope: int
    causal: bool
    return_lse: bool


def _workspace(device: torch.device) -> torch.Tensor:
    """The device's scratch memory for sums of splits: every plan's, so calls must follow each other on one stream."""
    found = _workspaces.get(device)
    if found is None:
        found = _workspaces[device] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return found


class Pages(NamedTuple):
    """Pages in use, in FlashInfer's format, on the host: sequence b has entries indptr[b] .. indptr[b + 1].

    Attributes:
        indptr: int32 [B + 1].
        entries: int64 [pages in use], where each page's number stands in the flattened page table.
    """

    indptr: torch.Tensor
    entries: torch.Tensor


def used_pages(lengths: torch.Tensor, page_size: int, table_width: int) -> Pages:
    """The pages that sequences of these lengths use.

    Args:
        lengths: int32 [B] on the CPU.
        page_size: tokens of a page.
        table_width: entries of the page table for a sequence.

    Raises:
        ValueError: a sequence is longer than its entries can hold.
    """
    counts = (lengths + (page_size - 1)).div(page_size, rounding_mode="floor")
    if counts.numel() and int(counts.max()) > table_width:
        raise ValueError(
            f"a sequence has {int(lengths.max())} keys; page_table has {table_width} pages of {page_size} for each"
        )
    indptr = torch.zeros(len(counts) + 1, dtype=torch.int32, device="cpu")
    torch.cumsum(counts, 0, out=indptr[1:])
    shift = torch.arange(len(counts), device="cpu") * table_width - indptr[:-1]
    entries = torch.arange(int(indptr[-1]), device="cpu") + shift.repeat_interleave(counts)
    return Pages(indptr, entries)


class _Slot:
    """A FlashInfer wrapper and the memory that its kernel reads; used by one plan at a time.

    A slot takes 8 MiB on the device and as much pinned host memory, so unused slots are kept for other plans.
    """

    def __init__(self, kernel: str, device: torch.device, batch: int, table_width: int) -> None:
        def reserve(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self.mla: Any = importlib.import_module("flashinfer.mla")
        self.kv_indices = reserve(max(batch * table_width, 1))
        self.wrapper = self.mla.BatchMLAPagedAttentionWrapper(
            _workspace(device),
            use_cuda_graph=True,  # later plans use the same memory
            qo_indptr=reserve(batch + 1),
            kv_indptr=reserve(batch + 1),
            kv_indices=self.kv_indices,
            kv_len_arr=reserve(batch),
            backend=kernel,
        )
        self._staged: torch.cuda.Event | None = None

    def wait_until_staged(self) -> None:
        """Wait until the last plan has been copied from FlashInfer's pinned memory, which the next one overwrites."""
        if self._staged is not None:
            self._staged.synchronize()

    def mark_staged(self) -> None:
        """Record that the last plan's copy to the device has been enqueued."""
        if self.kv_indices.is_cuda:
            self._staged = torch.cuda.Event()
            self._staged.record()


_idle: defaultdict[tuple[str, torch.device, int, int], list[_Slot]] = defaultdict(list)
_captured: list[_Slot] = []


class MLAPlan:
    """A plan for one ``DecodeLengths``, one page table and one layout of the call."""

    def __init__(
        self, kernel: str, work: Work, softmax_scale: float, page_table: torch.Tensor, lengths: DecodeLengths
    ) -> None:
        if page_table.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "flashinfer plans on the host, which a CUDA graph cannot capture; call decode once with this "
                "DecodeLengths and page_table before the capture"
            )
        self._work = work
        self._softmax_scale = softmax_scale
        self._page_table = page_table  # kept alive: its address is part of the key that this plan is found under
        key = (kernel, work.device, *page_table.shape)
        try:
            self._slot = _idle[key].pop()
        except IndexError:  # also where another thread took the last one
            with torch.inference_mode(False):  # later plans write to its memory, outside that mode too
                self._slot = _Slot(*key)
        self._give_back = weakref.finalize(self, _idle[key].append, self._slot)
        self._give_back.atexit = False
        self._structured = hasattr(self._slot.mla, "MLAPlanMetadata")  # 0.7: declares everything when planning
        self._make(lengths)

    def renew(self, lengths: DecodeLengths) -> bool:
        """Plan for new lengths; not if the caller now uses another page table, which has its own plan."""
        is_needed = self._is_used or not self._give_back.alive  # a graph holds it
        if is_needed:
            self._make(lengths)
        return is_needed

    def _make(self, lengths: DecodeLengths) -> None:
        """Plan for these lengths and for what the page table holds now; nothing is read from the device."""
        table_version = _version(self._page_table)
        slot, work, page_table = self._slot, self._work, self._page_table
        slot.wait_until_staged()
        host = lengths.host
        assert host is not None  # ``run`` has checked it
        pages = used_pages(host, work.page_size, page_table.shape[1])
        kv_indices = slot.kv_indices[: len(pages.entries)]
        entries = pages.entries.to(work.device, non_blocking=True)
        torch.index_select(page_table.reshape(-1), 0, entries, out=kv_indices)
        qo_indptr = torch.arange(len(host) + 1, dtype=torch.int32, device="cpu") * work.seqlen_q
        self._plan((qo_indptr, pages.indptr, kv_indices, host))
        slot.mark_staged()
        self._is_used, self._table_version = False, table_version

    def _plan(self, metadata: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        work = self._work
        options = {
            "num_heads": work.num_heads,
            "head_dim_ckv": work.rank,
            "head_dim_kpe": work.rope,
            "page_size": work.page_size,
            "causal": work.causal,
            "sm_scale": self._softmax_scale,
            "q_data_type": work.dtype,
            "kv_data_type": work.dtype,
        }
        if self._structured:
            self._slot.wrapper.plan(
                metadata=self._slot.mla.MLAPlanMetadata.csr(*metadata),
                query_layout="split",
                kv_cache_layout="split",
                lse_mode="basee" if work.return_lse else "none",
                **options,
            )
        else:
            self._slot.wrapper.plan(*metadata, **options)

    def run(self, tensors: DecodeTensors) -> DecodeOutput:
        """Launch the kernel."""
        wrapper = self._slot.wrapper
        if tensors.q_nope_abs.is_cuda and torch.cuda.is_current_stream_capturing():
            if self._give_back.detach():
                _captured.append(self._slot)  # the graph keeps reading its memory
        elif self._table_version != _version(self._page_table):
            assert tensors.lengths is not None
            self._make(tensors.lengths)
        self._is_used = True
        q_nope, q_rope = (aligned(x.flatten(0, 1)) for x in tensors[:2])  # [B * S_q, H, columns]
        c_kv, k_rope, return_lse = tensors.c_kv, tensors.k_rope, tensors.return_lse
        out = torch.empty(tensors.q_nope_abs.shape, dtype=q_nope.dtype, device=q_nope.device)
        # FlashInfer's own lse is in base 2; asked for, its kernel converts it
        options = {"out": out.view(q_nope.shape), "return_lse": return_lse, "return_lse_base_on_e": return_lse}
        if self._structured:
            result = wrapper.run(query=(q_nope, q_rope), kv_cache=(c_kv, k_rope), **options)
        else:
            result = wrapper.run(q_nope, q_rope, c_kv, k_rope, **options)
        if not return_lse:
            return DecodeOutput(out, None)
        return DecodeOutput(out, result[1].view(tensors.q_nope_abs.shape[:3]).transpose(1, 2))


def _version(x: torch.Tensor) -> int | None:
    """PyTorch's counter of in-place writes to x through any view; None in inference mode, which does not count."""
    return None if x.is_inference() else x._version


def run(kernel: str, tensors: DecodeTensors) -> DecodeOutput:
    """Find or make the plan, and run it.

    Raises:
        ValueError: a sequence is longer than its pages, or the call has no pages or no lengths on the host.
        RuntimeError: a new plan would have to be made while a CUDA graph is captured.
    """
    page_table, lengths = tensors.page_table, tensors.lengths
    if page_table is None or lengths is None or lengths.host is None:
        raise ValueError("flashinfer needs page_table and seqlens_kv=DecodeLengths(host_lengths, ...)")
    tensors = _rescaled(tensors)
    known = known_of(tensors)
    work = known.kept.get(_KEPT)
    if work is None:
        work = known.kept[_KEPT] = _work(tensors, page_table)
    key = (kernel, work, page_table.data_ptr(), tensors.softmax_scale)
    plan: MLAPlan = lengths.schedule(key, lambda held: MLAPlan(kernel, work, tensors.softmax_scale, page_table, held))
    return plan.run(tensors)


def _rescaled(tensors: DecodeTensors) -> DecodeTensors:
    """The call with a power of two moved from a tiny softmax_scale to the queries.

    FlashInfer's running maximum starts at -5e4 (``math::inf`` in its math.cuh), before the scale: a query whose
    products with all keys are lower gets 0. With a usual scale such scores are below -3000, with a tiny one near 0.
    """
    scale = tensors.softmax_scale
    if not 0 < scale < _LEAST_SCALE:
        return tensors
    # the new scale is 2^-10 to 2^-9 in float16, whose small numbers lose bits, and 2^-4 to 2^-3 in bfloat16
    power = 2.0 ** (math.frexp(scale)[1] + (9 if tensors.q_nope_abs.dtype == torch.float16 else 3))
    q_nope_abs, q_rope = tensors.q_nope_abs * power, tensors.q_rope * power
    return tensors._replace(q_nope_abs=q_nope_abs, q_rope=q_rope, softmax_scale=scale / power)


def _work(tensors: DecodeTensors, page_table: torch.Tensor) -> Work:
    q = tensors.q_nope_abs
    return Work(
        device=q.device,
        dtype=q.dtype,
        table=(page_table.shape[0], page_table.shape[1], page_table.stride(0)),
        page_size=tensors.c_kv.shape[1],
        seqlen_q=q.shape[1],
        num_heads=q.shape[2],
        rank=q.shape[3],
        rope=tensors.q_rope.shape[-1],
        causal=tensors.causal,
        return_lse=tensors.return_lse,
    )
