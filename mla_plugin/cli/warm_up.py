"""``mla-plugin warm-up``: compile a model's kernels before they are needed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import mla_plugin
from mla_plugin import preparation
from mla_plugin.cli import model_shape
from mla_plugin.cli.model_shape import ModelShape

DESCRIPTION = "Compile the kernels that a model needs on this machine before they are needed."
EPILOG = """\
Kernels are compiled by running them on small tensors: those of the backend that
the resolver chooses, and our Triton kernels. Triton keeps compiled kernels in
its cache directory (TRITON_CACHE_DIR, by default ~/.triton/cache), where later
processes on the same GPU model find them. What else the calls load, such as
Triton itself, is noted there: later processes that import mla_plugin load it
when PyTorch initialises CUDA, and not in their first call.

exit status: 1 if no backend takes any of the calls.

example: mla-plugin warm-up --config config.json --tensor-parallel 2"""

PAGE_SIZE = 64
LENGTHS = (512, 500)
"""A compiled kernel depends on whether lengths are multiples of 16, so there is one of each sort."""

Step = tuple[str, Callable[[], object]]


def add_parser(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "warm-up",
        help="compile a model's kernels before they are needed",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    model_shape.add_arguments(parser)
    parser.add_argument("--inference", action="store_true", help="no backward")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if this machine has it, else cpu")
    parser.add_argument("--backend", metavar="NAME", help="use only this backend")


def attention(shape: ModelShape, length: int, layout: str, is_training: bool, device: str, backend: str | None) -> None:
    """One causal call, and its backward."""
    batch = 2
    sizes = {"bshd": (batch, length), "bhsd": (batch,), "thd": (batch * length,)}[layout]
    options: dict[str, Any] = {}
    tensors = []
    for heads, dim in (
        (shape.num_heads, shape.head_dim_qk),
        (shape.num_kv_heads, shape.head_dim_qk),
        (shape.num_kv_heads, shape.head_dim_v),
    ):
        extents = (*sizes, heads, length, dim) if layout == "bhsd" else (*sizes, heads, dim)
        tensors.append(torch.zeros(extents, dtype=shape.dtype, device=device, requires_grad=is_training))
    if layout == "thd":
        offsets = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        options = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets, "max_seqlen_q": length, "max_seqlen_kv": length}
    q, k, v = tensors
    mask = "padding_causal" if layout == "thd" else "causal"
    out = mla_plugin.attention(q, k, v, qkv_format=layout, attn_mask_type=mask, backend=backend, **options)
    assert isinstance(out, torch.Tensor)
    if is_training:
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))


def decode(shape: ModelShape, batch: int, seqlen_q: int, device: str, backend: str | None) -> None:
    """One call over a paged cache."""
    assert shape.kv_lora_rank is not None
    pages = 16
    cache = torch.zeros(
        batch * pages, PAGE_SIZE, shape.kv_lora_rank + shape.qk_rope_head_dim, dtype=shape.dtype, device=device
    )
    table = torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)
    q_nope_abs, q_rope = (
        torch.zeros(batch, seqlen_q, shape.num_heads, dim, dtype=shape.dtype, device=device)
        for dim in (shape.kv_lora_rank, shape.qk_rope_head_dim)
    )
    lengths = mla_plugin.DecodeLengths(torch.full((batch,), pages * PAGE_SIZE - 5, dtype=torch.int32), device=device)
    mla_plugin.decode(
        q_nope_abs,
        q_rope,
        cache,
        softmax_scale=shape.head_dim_qk**-0.5,
        page_table=table,
        seqlens_kv=lengths,
        backend=backend,
    )


def steps(shape: ModelShape, is_training: bool, device: str, backend: str | None) -> Iterator[Step]:
    """What to run, with a name for the reader."""
    backends = (backend,) if backend is not None else ((None, "triton") if device == "cuda" else (None,))
    for name in backends:
        which = name or "the resolver's choice"
        for layout in ("bshd", "bhsd", "thd"):
            for length in LENGTHS:
                passes = "forward and backward" if is_training else "forward"
                call = functools.partial(attention, shape, length, layout, is_training, device, name)
                yield f"{layout}, length {length}, {passes}: {which}", call
        if shape.kv_lora_rank is not None:
            for batch in (1, 2, 64):
                for seqlen_q in (1, 2):
                    call = functools.partial(decode, shape, batch, seqlen_q, device, name)
                    yield f"decode, batch {batch}, {seqlen_q} query tokens: {which}", call


def run(arguments: argparse.Namespace) -> int:
    """Run every step; 1 where one had no backend."""
    device = model_shape.device_of(arguments)
    shape = model_shape.of_arguments(arguments)
    print(f"{shape}, on {torch.cuda.get_device_name() if device == 'cuda' else 'the CPU'}")
    todo = list(steps(shape, not arguments.inference, device, arguments.backend))
    start, loaded = time.perf_counter(), set(sys.modules)
    with _binaries_alone() if device == "cuda" else contextlib.nullcontext():
        refused = _refused(todo, device)
    for name in refused:
        print(f"no backend: {name}; `mla-plugin explain` says why")
    print(f"{len(todo) - len(refused)} of {len(todo)} calls are warm, {time.perf_counter() - start:.0f} s")
    if device == "cuda" and len(refused) < len(todo):
        try:
            preparation.note(loaded)
        except OSError as error:
            print(f"the kernels are compiled; what else the calls load could not be noted: {error}", file=sys.stderr)
    return 1 if len(refused) == len(todo) else 0


def _refused(todo: list[Step], device: str) -> list[str]:
    """Run the steps; the names of those that no backend takes."""
    is_terminal = sys.stdout.isatty()
    refused = []
    for done, (name, call) in enumerate(todo):
        if is_terminal:
            print(f"\r\x1b[K{_bar(done, len(todo))} {name[:50]}", end="", flush=True)
        began = time.perf_counter()
        try:
            call()
            if device == "cuda":
                torch.cuda.synchronize()
        except mla_plugin.NoBackendError:
            refused.append(name)
            continue
        if not is_terminal:
            print(f"{time.perf_counter() - began:6.1f} s  {name}", flush=True)
    if is_terminal:
        print(f"\r\x1b[K{_bar(len(todo), len(todo))}")
    return refused


@contextlib.contextmanager
def _binaries_alone() -> Iterator[None]:
    """Triton reads all that it keeps of a kernel: 8 ms with its intermediate texts, 1 ms without them."""
    try:
        from triton import knobs
    except ImportError:  # other backends need no Triton
        yield
        return
    with knobs.compilation.scope():
        knobs.compilation.store_binary_only = True
        yield


def _bar(done: int, total: int, width: int = 20) -> str:
    filled = width * done // total
    return f"[{'#' * filled}{'.' * (width - filled)}] {done}/{total}"
