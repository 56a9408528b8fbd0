"""The real libraries on the GPU machine, from binaries beside the checkout that are no part of the project.

``.peers/_vllm_fa3_C.abi3.so.xz`` is vLLM's build of FlashAttention 3, ``.peers_fa2/_vllm_fa2_C.abi3.so.xz`` its build
of FlashAttention 2 (both forward only, packed only), ``.peers_fa4/fa4.tar.xz`` an installation of FlashAttention 4,
packed. A test whose library is not there is skipped.
"""

from __future__ import annotations

import functools
import lzma
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.house.project import ROOT
from tests.plugins.flash_libraries import install


def _file(path: str) -> Path:
    found = ROOT / path
    if not found.exists():
        pytest.skip(f"{path} is not there")
    return found


@functools.cache
def _load(path: Path) -> None:
    library = Path(tempfile.mkdtemp()) / path.name.removesuffix(".xz")
    library.write_bytes(lzma.decompress(path.read_bytes()))
    torch.ops.load_library(library)


def use_flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the operator, and make importing ``vllm.vllm_flash_attn`` find it loaded, as in vLLM."""
    _load(_file(".peers/_vllm_fa3_C.abi3.so.xz"))
    install(monkeypatch, "vllm.vllm_flash_attn")


def use_flash_attention_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of ``flash_attn.flash_attn_interface`` over the operator, dense tensors laid end to end."""
    _load(_file(".peers_fa2/_vllm_fa2_C.abi3.so.xz"))
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
    site = _unpack(_file(".peers_fa4/fa4.tar.xz"))
    if str(site) not in sys.path:
        sys.path[:0] = [str(site), str(site / "nvidia_cutlass_dsl" / "dsl_packages")]
