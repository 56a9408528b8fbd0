"""Stands for the compiled ``transformer_engine_torch``: functions are mocks, classes are numbered on demand.

TransformerEngine's own loader executes this file. Enumerations that its Python mirrors take their numbers from it.
"""

from __future__ import annotations

import enum
import importlib.util
import re
from pathlib import Path
from unittest.mock import MagicMock

import torch

_SLOT_OF_NVTE_PLUGIN = ("flash_attention", "get_attention_backend")
_LOOKED_UP_BY_VALUE = ("NVTE_", "CommOverlap", "FP8Fwd", "FP8Bwd", "Float8Block")
_DTYPES = ("kByte", "kInt16", "kInt32", "kInt64", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2")
_DTYPES += ("kFloat8E8M0", "kFloat4E2M1")


def get_cudnn_version() -> int:
    """9.12.0, in cuDNN's encoding."""
    return 91200


def convert_thd_to_bshd(
    packed: torch.Tensor, cu_seqlens: torch.Tensor, batch_size: int, max_seqlen: int
) -> torch.Tensor:
    """[T, H, D] to [B, S, H, D]; rows past a sequence's end are 0."""
    dense = packed.new_zeros(batch_size, max_seqlen, *packed.shape[1:])
    for row, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        dense[row, : end - start] = packed[start:end]
    return dense


def convert_bshd_to_thd(dense: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """[B, S, H, D] to [T, H, D]."""
    packed = dense.new_zeros(num_tokens, *dense.shape[2:])
    for row, (start, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        packed[start:end] = dense[row, : end - start]
    return packed


def _source(name: str) -> str:
    return (Path(importlib.util.find_spec("transformer_engine").origin).parent / "pytorch" / name).read_text()


def _members(source: str, name: str) -> list[str]:
    """Names in the body of an IntEnum that the Python mirrors from the extension."""
    body = re.search(rf"class {name}\(.*?\):(.*?)\n\n\n", source, re.DOTALL)
    return re.findall(r"^    (\w+) = ", body.group(1), re.MULTILINE) if body else []


def _dtype() -> type[enum.IntEnum]:
    source = _source("constants.py")
    numbers = dict(re.findall(r"^    (k\w+) = (?:int\()?(\d+)", source, re.MULTILINE))
    names = _members(source, "DType") or _DTYPES
    return enum.IntEnum("DType", {name: int(numbers.get(name, i)) for i, name in enumerate(names)})


def _fused_backends() -> type[enum.IntEnum] | MagicMock:
    names = _members(_source("cpp_extensions/fused_attn.py"), "FusedAttnBackend")
    members = {f"NVTE_{name}": i for i, name in enumerate(names)}
    return enum.IntEnum("NVTE_Fused_Attn_Backend", members) if names else MagicMock(name="NVTE_Fused_Attn_Backend")


class _Numbered(type):
    """A class of the extension: every attribute is a new number."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        value = len(cls.__dict__)
        setattr(cls, name, value)
        return value


DType = _dtype()
NVTE_Fused_Attn_Backend = _fused_backends()


def __getattr__(name: str) -> object:
    if name.startswith("__") or name in _SLOT_OF_NVTE_PLUGIN:
        raise AttributeError(name)
    is_class = name[:1].isupper() and not name.startswith(_LOOKED_UP_BY_VALUE)
    value = globals()[name] = _Numbered(name, (), {}) if is_class else MagicMock(name=name)
    return value
