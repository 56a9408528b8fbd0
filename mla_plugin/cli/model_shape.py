"""The attention of a model in numbers: from flags, or from the config.json of a Hugging Face checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelShape:
    """What attention needs to know of a model; the defaults are DeepSeek-V3's.

    Attributes:
        num_heads, num_kv_heads: of one rank under tensor parallelism.
        qk_rope_head_dim: the part of head_dim_qk with rotary embeddings.
        kv_lora_rank: width of the compressed cache; None for a model without one.
    """

    num_heads: int = 128
    num_kv_heads: int = 128
    head_dim_qk: int = 192
    head_dim_v: int = 128
    qk_rope_head_dim: int = 64
    kv_lora_rank: int | None = 512
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        heads = f"{self.num_heads} heads"
        if self.num_kv_heads != self.num_heads:
            heads += f" over {self.num_kv_heads} key-value heads"
        cache = "" if self.kv_lora_rank is None else f", cache of {self.kv_lora_rank} + {self.qk_rope_head_dim}"
        return f"{heads}, head dims {self.head_dim_qk}/{self.head_dim_v}{cache}, {str(self.dtype)[6:]}"

    @classmethod
    def of_config(cls, config: Mapping[str, Any], tensor_parallel: int = 1) -> ModelShape:
        """The shape by the names that transformers gives its fields; a composite model's are in ``text_config``.

        Raises:
            ValueError: a field is missing, or the heads cannot be divided over the ranks.
        """
        config = {**config, **(config.get("text_config") or {})}
        heads = _required(config, "num_attention_heads")
        rank = config.get("kv_lora_rank")
        kv_heads = heads if rank is not None else config.get("num_key_value_heads") or heads
        if heads % tensor_parallel or (kv_heads % tensor_parallel and kv_heads > 1):
            raise ValueError(f"{heads} heads and {kv_heads} key-value heads cannot be divided over {tensor_parallel}")
        if rank is None:
            dim = config.get("head_dim") or _required(config, "hidden_size") // heads
            dims = {"head_dim_qk": dim, "head_dim_v": dim, "qk_rope_head_dim": dim}
        else:
            rope, nope = _required(config, "qk_rope_head_dim", 0), _required(config, "qk_nope_head_dim")
            dims = {"head_dim_qk": nope + rope, "head_dim_v": _required(config, "v_head_dim"), "qk_rope_head_dim": rope}
        name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
        if name not in DTYPES:
            raise ValueError(f"dtype={name!r} in the configuration; expected one of {', '.join(DTYPES)}")
        return cls(
            num_heads=heads // tensor_parallel,
            num_kv_heads=max(1, kv_heads // tensor_parallel),
            kv_lora_rank=rank,
            dtype=getattr(torch, name),
            **dims,
        )


def _required(config: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = config.get(name)
    if value is None:
        raise ValueError(f"the configuration has no {name}, which attention needs; give the shape by flags instead")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} in the configuration; expected an integer of at least {least}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that describe a model."""
    group = parser.add_argument_group("model", "DeepSeek-V3 by default")
    group.add_argument("--config", type=Path, metavar="FILE", help="config.json of a Hugging Face checkpoint")
    group.add_argument("--tensor-parallel", type=count, default=1, metavar="N", help="ranks that share the heads")
    flags = {
        "heads": "query heads",
        "kv-heads": "key-value heads; as many as query heads by default",
        "head-dim-qk": "with the rope part",
        "head-dim-v": "",
        "rope": "part of head_dim_qk with rotary embeddings",
        "kv-lora-rank": "width of c_kv; 0 for a model without a compressed cache",
    }
    for flag, text in flags.items():
        kind = width if flag == "kv-lora-rank" else count
        group.add_argument(f"--{flag}", type=kind, metavar="N", help=text or None)
    group.add_argument("--dtype", choices=DTYPES, help="bfloat16 by default")


def _read(path: Path) -> dict[str, Any]:
    """The configuration in a file.

    Raises:
        ValueError: it is not a JSON object.
        OSError: it cannot be read.
    """
    try:
        config = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"--config {path} is not JSON ({error}); expected config.json of a checkpoint") from None
    if not isinstance(config, dict):
        raise ValueError(f"--config {path} holds a {type(config).__name__}; expected an object of a model's fields")
    return config


def of_arguments(arguments: argparse.Namespace) -> ModelShape:
    """The shape that the flags give.

    Raises:
        ValueError: the configuration lacks a field; a flag that contradicts ``--config``.
        OSError: the configuration cannot be read.
    """
    given = {
        "num_heads": arguments.heads,
        "num_kv_heads": arguments.kv_heads or arguments.heads,
        "head_dim_qk": arguments.head_dim_qk,
        "head_dim_v": arguments.head_dim_v,
        "qk_rope_head_dim": arguments.rope,
        "kv_lora_rank": arguments.kv_lora_rank,
        "dtype": None if arguments.dtype is None else getattr(torch, arguments.dtype),
    }
    said = {name: value for name, value in given.items() if value is not None}
    if arguments.config is None:
        if arguments.tensor_parallel != 1:
            raise ValueError("--tensor-parallel divides the heads of --config; with flags give those of one rank")
        shape = ModelShape(**said)
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"--heads {shape.num_heads} is not a multiple of --kv-heads {shape.num_kv_heads}")
        return ModelShape(**{**vars(shape), "kv_lora_rank": shape.kv_lora_rank or None})
    if said.keys() - {"dtype"}:
        raise ValueError("--config gives the shape: leave out the other flags of the model, or leave out --config")
    shape = ModelShape.of_config(_read(arguments.config), arguments.tensor_parallel)
    return ModelShape(**{**vars(shape), **said})


def count(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 1 or more")
    return int(text)


def width(text: str) -> int:
    """Parse a number of columns, which may be 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def device_of(arguments: argparse.Namespace) -> str:
    """``--device``, by default cuda where there is one.

    Raises:
        ValueError: there is none, and it was asked for.
    """
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA device that PyTorch can use; `mla-plugin doctor` says why")
    return arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
