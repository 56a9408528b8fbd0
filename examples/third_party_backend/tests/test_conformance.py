"""The backend against the suite that mla-plugin ships; run it with ``pytest`` where both packages are installed."""

from mla_plugin.conformance import BackendConformance


class TestBlockwise(BackendConformance):
    backend = "blockwise"
    refuses = {  # noqa: RUF012
        "sbhd": "qkv_format",
        "bhsd": "qkv_format",
        "thd": "qkv_format",
        "causal_bottom_right": "attn_mask_type",
        "padding_masks": "attn_mask_type",
        "arbitrary": "attn_mask_type",
        "window": "window_size",
        "window_without_causal_mask": "window_size",
        "bias": "bias_type",
        "gqa": "num_kv_heads",
    }
