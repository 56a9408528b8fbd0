"""Libraries that lie next to the checkout, ``tests.gpu.peers.BINARIES``, for tests on a GPU.

vLLM's builds of FlashAttention 2 and 3 have the forward only, of packed sequences only; that of FlashAttention 4 is an
installation, packed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.peers import BINARIES
from tests.plugins.flash_libraries import install
from tests.repository.project import ROOT


@functools.cache
def _load(path: Path) -> None:
    library = Path(tempfile.mkdtemp()) / path.name.removesuffix(".xz")
    library.write_bytes(lzma.decompress(path.read_bytes()))
    torch.ops.load_library(library)


def use_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the operator, and make importing ``vllm.vllm_flash_attn`` find it loaded, as in vLLM.

    Where vLLM is installed, it brings its own: an operator that is defined twice ends the process.
    """
    if importlib.util.find_spec("vllm") is not None:
        importlib.import_module("vllm.vllm_flash_attn")
        return
    _load(ROOT / BINARIES["FlashAttention 3 of vLLM"])
    install(monkeypatch, "vllm.vllm_flash_attn")


def use_flash_attention_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of ``flash_attn.flash_attn_interface`` over the operator, dense tensors laid end to end."""
    _load(ROOT / BINARIES["FlashAttention 2 of vLLM"])
    install(
        monkeypatch,
        "flash_attn.flash_attn_interface",
        flash_attn_func=_flash_attn_func,
        flash_attn_varlen_func=_flash_attn_varlen_func,
    )


def _flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    return_attn_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    assert return_attn_probs
    out, lse, *_ = torch.ops._vllm_fa2_C.varlen_fwd(
        q,
        k,
        v,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        None,
        None,
        None,
        None,
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        softmax_scale,
        False,
        causal,
        *window_size,
        0.0,
        False,
        0,
        None,
    )
    return out, lse, None


def _flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, None]:
    batch, longest = q.shape[0], (q.shape[1], k.shape[1])
    starts = (torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length for length in longest)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    out, lse, _ = _flash_attn_varlen_func(*rows, *starts, *longest, **options)
    return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1), None


@functools.cache
def _unpack(path: Path) -> Path:
    folder = Path(tempfile.mkdtemp())
    subprocess.run(["tar", "-C", folder, "-xf", path], check=True)
    return folder / "site"


def use_flash_attention_4() -> None:
    """Put the installation on the path."""
    site = _unpack(ROOT / BINARIES["FlashAttention 4, unpacked"])
    if str(site) not in sys.path:
        sys.path[:0] = [str(site), str(site / "nvidia_cutlass_dsl" / "dsl_packages")]
