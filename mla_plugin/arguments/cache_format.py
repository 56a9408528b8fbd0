"""Formats of the compressed cache: what the bytes of a token are, and what numbers they stand for.

``plain``
    R + Dr numbers in the dtype of the queries.
``fp8``
    R + Dr bytes, each an e4m3 number, and one float32 scale for the whole cache: number = e4m3 * scale. What vLLM calls
    ``fp8`` of MLA layers, with its ``k_scale``. A number x is written as x / scale in float32, rounded to the nearest
    e4m3 (ties to even), 448 where that is larger.
``fp8_ds_mla``
    656 bytes: 512 e4m3 numbers, 4 float32 scales of 128 of them each, 64 bfloat16 numbers of k_rope. What FlashMLA
    reads and vLLM calls ``fp8_ds_mla``. Written as above, with a scale for each 128 numbers of a token:

    - max |x| / 448 in float32, at least 2**-126: vLLM's writer (``concat_and_cache_ds_mla_kernel`` in vLLM's
      ``cache_kernels.cu``);
    - the next power of two from max(max |x| / 448, 1e-4) on: FlashMLA's (``quantize_k_cache`` in its
      ``tests/quant.py``).

    A reader takes both.

e4m3 is torch.float8_e4m3fn: no infinity, 0x7F and 0xFF are NaN. NaN is written as 0x7F and does not count in a maximum.
"""

from __future__ import annotations

import math

import torch

from mla_plugin.arguments.checks import check_tensor

PLAIN, FP8, FP8_DS_MLA = "plain", "fp8", "fp8_ds_mla"
FORMATS = (PLAIN, FP8, FP8_DS_MLA)
E4M3_MAX = 448.0
LEAST_SCALE = 2.0**-126
LEAST_POWER_OF_2 = 1e-4
"""FlashMLA's bound of max |x| / 448, before it is rounded up to a power of two."""
RANK, ROPE, TILE = 512, 64, 128
"""Widths of ``fp8_ds_mla``; numbers under one scale."""
SCALES = RANK // TILE
VALUE_BYTES, ROPE_BYTES = RANK + 4 * SCALES, 2 * ROPE
TOKEN_BYTES = VALUE_BYTES + ROPE_BYTES
ROW_DTYPES = {FP8: (torch.bfloat16, torch.float16, torch.float32), FP8_DS_MLA: (torch.bfloat16, torch.float32)}
"""Dtypes of queries and of new rows; a k_rope in bfloat16 does not fit into float16."""
_BYTES = (torch.uint8, torch.float8_e4m3fn)

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_format(kv_cache_format: object) -> None:
    """Check the format's name.

    Raises:
        TypeError, ValueError: it is not one of ``FORMATS``.
    """
    if isinstance(kv_cache_format, str) and kv_cache_format in FORMATS:
        return
    error = ValueError if isinstance(kv_cache_format, str) else TypeError
    raise error(f"kv_cache_format={kv_cache_format!r}; expected one of {', '.join(map(repr, FORMATS))}")


def check_no_scale(kv_cache_format: str, kv_scale: object) -> None:
    """Check that no scale is given for a format that has none, or holds its own."""
    if kv_scale is not None:
        where = "its scales are in the cache" if kv_cache_format == FP8_DS_MLA else "its numbers have no scale"
        raise ValueError(
            f"kv_scale is given with kv_cache_format={kv_cache_format!r}: {where}; it goes with 'fp8': leave it out"
        )


def scale_of(kv_scale: object, device: torch.device) -> torch.Tensor:
    """The scale of ``fp8`` as a tensor without dimensions.

    Raises:
        ValueError, TypeError: it is missing, not one float32, or on another device than the cache.
    """
    if kv_scale is None:
        raise ValueError(
            "kv_scale is missing; kv_cache_format='fp8' needs the scale that the cache was written with, a float32 "
            f"tensor of one element on {device}"
        )
    check_tensor("kv_scale", kv_scale, "of one element, float32")
    assert isinstance(kv_scale, torch.Tensor)
    if kv_scale.dtype != torch.float32 or kv_scale.numel() != 1 or kv_scale.device != device:
        raise ValueError(
            f"kv_scale is {kv_scale.dtype} {list(kv_scale.shape)} on {kv_scale.device}; one float32 on {device} is "
            "needed: its value stays on the device"
        )
    return kv_scale.reshape(())


def check_scale_value(kv_scale: torch.Tensor) -> None:
    """Raise ValueError if the scale of ``fp8``, on the CPU or read from the device, is negative or not finite."""
    value = float(kv_scale)
    if not 0.0 <= value < math.inf:
        raise ValueError(f"kv_scale={value}; expected a finite number that is not negative")


def byte_columns(kv_cache: Cache, rank: int, kv_cache_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The two column blocks of a quantised cache in bytes, uint8: views.

    Args:
        kv_cache: uint8 or float8_e4m3fn. ``fp8``: one tensor [.., .., R + Dr] or a pair; ``fp8_ds_mla``: one tensor
            [.., .., 656].
        rank: R.
        kv_cache_format: one of the two.

    Returns:
        c_kv [.., .., R] and k_rope [.., .., Dr]; of ``fp8_ds_mla`` 528 bytes, the scales included, and 128.

    Raises:
        ValueError, TypeError: the cache is not of that format.
    """
    if kv_cache_format == FP8_DS_MLA:
        whole = _bytes_of("kv_cache", kv_cache, kv_cache_format)
        _check_token_bytes(whole, rank)
        values, rope = whole.split_with_sizes((VALUE_BYTES, ROPE_BYTES), -1)
        return values, rope
    if isinstance(kv_cache, torch.Tensor):
        whole = _bytes_of("kv_cache", kv_cache, kv_cache_format)
        if whole.shape[-1] < rank:
            raise ValueError(
                f"kv_cache has shape {list(whole.shape)}; with kv_cache_format='fp8' one tensor is [.., .., R + Dr] "
                f"with R={rank} of the queries or new rows"
            )
        values, rope = whole.split_with_sizes((rank, whole.shape[-1] - rank), -1)
        return values, rope
    try:
        c_kv, k_rope = kv_cache
    except (TypeError, ValueError):
        raise TypeError(f"kv_cache is {type(kv_cache).__name__}; expected a tensor or a pair (c_kv, k_rope)") from None
    return _bytes_of("c_kv", c_kv, kv_cache_format), _bytes_of("k_rope", k_rope, kv_cache_format)


def columns_of(c_kv: torch.Tensor, k_rope: torch.Tensor, kv_cache_format: str) -> tuple[int, int]:
    """R and Dr of a plain cache, or of ``byte_columns``."""
    return (RANK, ROPE) if kv_cache_format == FP8_DS_MLA else (c_kv.shape[-1], k_rope.shape[-1])


def _bytes_of(name: str, x: object, kv_cache_format: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        widths = f"{TOKEN_BYTES}" if kv_cache_format == FP8_DS_MLA else "R + Dr"
        raise TypeError(
            f"{name} is {type(x).__name__}; kv_cache_format={kv_cache_format!r} needs a tensor [.., .., {widths}] of "
            "uint8 or float8_e4m3fn"
        )
    check_tensor(name, x, "")
    if x.dtype not in _BYTES:
        raise TypeError(
            f"{name} is {x.dtype}; kv_cache_format={kv_cache_format!r} needs uint8 or float8_e4m3fn: pass the cache "
            "that was written in this format, or kv_cache_format='plain'"
        )
    if x.dim() != 3 or (x.shape[-1] > 1 and x.stride(-1) != 1):
        raise ValueError(
            f"{name} has shape {list(x.shape)} and strides {x.stride()}; three dimensions, [pages, page_size, ..] or "
            "[B, S_kv, ..], with a contiguous last one are needed"
        )
    return x.view(torch.uint8) if x.dtype != torch.uint8 else x


def _check_token_bytes(whole: torch.Tensor, rank: int) -> None:
    if whole.shape[-1] != TOKEN_BYTES or rank != RANK:
        raise ValueError(
            f"kv_cache has shape {list(whole.shape)}, R={rank}; a token of kv_cache_format='fp8_ds_mla' has "
            f"{TOKEN_BYTES} bytes and R={RANK}, Dr={ROPE}"
        )
    start = 0 if torch.compiler.is_compiling() else whole.storage_offset()
    if any(step % 4 for step in (*whole.stride()[:-1], start)):
        raise ValueError(
            f"kv_cache has strides {whole.stride()} and begins at byte {start} of its memory; with "
            "kv_cache_format='fp8_ds_mla' all must be multiples of 4, as the scales are float32"
        )


def split_quantised(
    kv_cache: Cache, rank: int, kv_cache_format: str, kv_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(c_kv, k_rope, kv_scale) of a quantised cache, as ``DecodeTensors`` has them: views.

    Args:
        kv_cache, rank, kv_cache_format: as for ``byte_columns``.
        kv_scale: of the whole cache, for ``fp8``.

    Raises:
        ValueError, TypeError: the cache is not of that format, or the scale is wrong.
    """
    c_kv, k_rope = byte_columns(kv_cache, rank, kv_cache_format)
    if kv_cache_format == FP8:
        return c_kv, k_rope, scale_of(kv_scale, c_kv.device)
    check_no_scale(kv_cache_format, kv_scale)
    values, scales = c_kv.split_with_sizes((RANK, 4 * SCALES), -1)
    return values, k_rope.view(torch.bfloat16), scales.view(torch.float32)


def dequantised(
    c_kv: torch.Tensor, k_rope: torch.Tensor, kv_scale: torch.Tensor, kv_cache_format: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The numbers of some rows; products with a scale are made in ``dtype``, float32 or float64.

    Args:
        c_kv, k_rope, kv_scale: as ``split_quantised`` gives them, or the same rows of each of them.
        kv_cache_format: of the cache.
        dtype: of the result.
    """
    scale = kv_scale.to(dtype)
    values = c_kv.view(torch.float8_e4m3fn).to(dtype)
    if kv_cache_format == FP8:
        return values * scale, k_rope.view(torch.float8_e4m3fn).to(dtype) * scale
    return (values.unflatten(-1, (SCALES, TILE)) * scale[..., None]).flatten(-2), k_rope.to(dtype)


def rows_of_bytes(
    c_kv: torch.Tensor, k_rope: torch.Tensor, kv_scale: torch.Tensor | None, kv_cache_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some rows of ``byte_columns`` in bfloat16."""
    if kv_cache_format == FP8_DS_MLA:
        c_kv, scales = c_kv.split_with_sizes((RANK, 4 * SCALES), -1)
        kv_scale, k_rope = (
            x.contiguous().view(dtype) for x, dtype in ((scales, torch.float32), (k_rope, torch.bfloat16))
        )
    assert kv_scale is not None
    rows = dequantised(c_kv, k_rope, kv_scale, kv_cache_format, torch.float32)
    return rows[0].to(torch.bfloat16), rows[1].to(torch.bfloat16)


def as_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale in bytes: uint8."""
    y = x.float() / scale
    return y.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(y.isnan(), 0x7F)


def quantised_rows(
    c_kv: torch.Tensor,
    k_rope: torch.Tensor,
    kv_scale: torch.Tensor | None,
    kv_cache_format: str,
    power_of_2_scales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New rows [T, R] and [T, Dr] in the bytes of ``byte_columns``."""
    if kv_cache_format == FP8:
        assert kv_scale is not None
        return as_e4m3(c_kv, kv_scale), as_e4m3(k_rope, kv_scale)
    tiles = c_kv.float().unflatten(-1, (SCALES, TILE))
    scales = tiles.abs().nan_to_num(0.0, torch.inf).amax(-1) / E4M3_MAX
    if power_of_2_scales:
        bits = scales.clamp(min=LEAST_POWER_OF_2).view(torch.int32)
        scales = ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    else:
        scales = scales.clamp(min=LEAST_SCALE)
    values = as_e4m3(tiles, scales[..., None]).flatten(-2)
    return torch.cat([values, scales.view(torch.uint8)], -1), k_rope.to(torch.bfloat16).view(torch.uint8)
