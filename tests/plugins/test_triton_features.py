"""Features and head dimensions of the Triton kernels that the catalogue does not combine, with tiles of unequal sides.

In the interpreter the sequences span several tiles, so that whole and partial ones meet every mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import mla_plugin
from mla_plugin.conformance import BackendConformance, Case
from mla_plugin.kernels import tiles
from mla_plugin.kernels.prefill import launch_forward as prefill

FURTHEST = 2**31 - 1
SMALL: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim_qk": 24, "head_dim_v": 16}
DENSE: dict[str, Any] = {"seqlens_q": (21, 0, 3, 6), "seqlens_kv": (40, 3, 0, 9), "rows_q": (23,) * 4} | SMALL
DENSE |= {"rows_kv": (41,) * 4, "return_lse": True}
PACKED: dict[str, Any] = {**DENSE, "qkv_format": "thd", "rows_q": (24, 7, 3, 6), "rows_kv": (40, 3, 5, 11), "tail": 3}
MORE_KEYS: dict[str, Any] = {"seqlens_q": (35,), "seqlens_kv": (70,)} | SMALL
MORE_QUERIES: dict[str, Any] = {"seqlens_q": (70,), "seqlens_kv": (35,)} | SMALL
WINDOWS = ((5, -1), (30, 3), (FURTHEST, 0), (3, FURTHEST), (FURTHEST, FURTHEST))
DENSE_MASKS = {"bshd": "padding", "sbhd": "padding_causal", "bhsd": "padding_causal_bottom_right"}
HEAD_DIMS = ((8, 8), (40, 72), (448, 320), (528, 512), (576, 512))
MORE_HEAD_DIMS = ((104, 88), (144, 112), (200, 136), (320, 256), (512, 512), (544, 384), (64, 512), (576, 64))


def _features() -> Iterator[Case]:
    for qkv_format, mask in DENSE_MASKS.items():
        yield Case(f"{qkv_format}-{mask}", qkv_format, attn_mask_type=mask, **DENSE)
        yield Case(f"thd-{mask}", attn_mask_type=mask, **PACKED)
    for mask in ("causal", "causal_bottom_right"):
        yield Case(f"more_keys-{mask}", attn_mask_type=mask, **MORE_KEYS)
        yield Case(f"more_queries-{mask}", attn_mask_type=mask, **MORE_QUERIES)
        yield Case(f"more_queries-window-{mask}", attn_mask_type=mask, window_size=(9, 0), **MORE_QUERIES)
    for left, right in WINDOWS:
        for bottom_right in (False, True):
            diagonal: dict[str, Any] = {"window_size": (left, right), "bottom_right_diagonal": bottom_right}
            name = f"{left}_{right}-{'bottom_right' if bottom_right else 'top_left'}"
            yield Case(f"more_keys-window_{name}", **diagonal, **MORE_KEYS)
    # the last query of the first tile of 16 sees one key of the second tile of 32, and under a window the first query
    edge: dict[str, Any] = {"seqlens_q": (20,), "seqlens_kv": (37,)} | SMALL
    yield Case("edge_of_a_tile-causal", attn_mask_type="causal_bottom_right", **edge)
    for left, right in ((14, 2), (17, 0), (1, 15)):
        yield Case(f"edge_of_a_tile-window_{left}_{right}", window_size=(left, right), **(edge | {"seqlens_kv": (70,)}))
    yield Case("window-thd", attn_mask_type="padding", window_size=(FURTHEST, 3), **PACKED)


def _head_dims(pairs: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """Widths of one block of columns, of two, and with columns to spare, up to the widest."""
    for head_dim_qk, head_dim_v in pairs:
        lengths: dict[str, Any] = {"seqlens_q": (19,), "seqlens_kv": (35,), "num_heads": 2, "num_kv_heads": 1}
        dims: dict[str, Any] = {"head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v}
        yield Case(f"{head_dim_qk}_{head_dim_v}", attn_mask_type="causal_bottom_right", **lengths, **dims)


class TestInterpreter(BackendConformance):
    backend = "triton"
    is_slow = True
    test_unusual_values = test_surroundings = None  # test_triton.py has them

    @pytest.fixture(autouse=True)
    def _unequal_tiles(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(tiles, "_INTERPRETED_TILE", tiles.Tile(16, 32, 4, 1))
        prefill._forward_launch.cache_clear()
        yield
        prefill._forward_launch.cache_clear()

    def cases(self) -> tuple[Case, ...]:
        return (*_features(), *_head_dims(HEAD_DIMS))


@pytest.mark.gpu
class TestCuda(BackendConformance):
    backend = "triton"
    device = "cuda"

    def cases(self) -> tuple[Case, ...]:
        """Of the widest head dimensions float32 takes too long to compile."""
        whole = (*_features(), *_head_dims(HEAD_DIMS + MORE_HEAD_DIMS))
        low = tuple(replace(case, dtype=torch.bfloat16, name=f"{case.name}-bf16") for case in whole)
        return tuple(case for case in whole if case.head_dim_qk + case.head_dim_v <= 256) + low


@pytest.mark.parametrize("mask", ["padding", "padding_causal", "padding_causal_bottom_right"])
@pytest.mark.parametrize("qkv_format", ["bshd", "bhsd"])
def test_values_that_are_not_finite_stay_out_of_rows_that_see_no_key(qkv_format: str, mask: str) -> None:
    """Rows past a sequence's end, and those above a bottom-right diagonal: weights of 0 times NaN."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths_q = torch.tensor([0, 5, 9], dtype=torch.int32, device=device)
    for lengths_kv in (lengths_q, torch.tensor([0, 3, 9], dtype=torch.int32, device=device)):
        q, k, v = (torch.randn(2, 6, 2, 16, device=device) for _ in range(3))
        v[0, 0] = torch.nan
        if qkv_format == "bhsd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        options = {"attn_mask_type": mask, "qkv_format": qkv_format, "backend": "triton"}
        out, lse = mla_plugin.attention(
            q, k, v, cu_seqlens_q=lengths_q, cu_seqlens_kv=lengths_kv, return_lse=True, **options
        )
        out.sum().backward()
        hidden = lse.isneginf()
        assert hidden.any()
        for x in (out, q.grad):
            rows = x if qkv_format == "bhsd" else x.transpose(1, 2)
            assert rows[hidden].eq(0).all()
