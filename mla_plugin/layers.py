"""What the attention layers of a host's model ask for: between the adapters, which know, and ``mla_plugin.explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mla_plugin.hooks.decode import DecodeRequest


class AttentionCall(NamedTuple):
    """A call of ``mla_plugin.attention`` that a layer makes, on tensors of the meta device."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    arguments: dict[str, Any]


class LayerCall(NamedTuple):
    """One call that a layer makes, and its name, such as ``prefill``."""

    what: str
    call: AttentionCall | DecodeRequest


@dataclass(frozen=True)
class LayerKind:
    """Layers that make the same calls.

    Attributes:
        name: of their class, with what distinguishes them from other layers of that class.
        count: number of such layers.
        asked: the calls of each; empty if this library does not compute them.
        note: further information.
    """

    name: str
    asked: tuple[LayerCall, ...] = ()
    note: str | None = None
    count: int = 1


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model, each kind once, in the order of its first layer.

    Attributes:
        model: name of its class, and the host.
        kinds: its layers.
        device_type, device_index: where the model is; ``meta`` for one without memory.
        notes: what holds for the model as a whole.
    """

    model: str
    kinds: tuple[LayerKind, ...]
    device_type: str
    device_index: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Batch:
    """What a model is asked about.

    Attributes:
        batch_size: sequences.
        seqlen: tokens of each.
        dtype: of q, k and v; None for the model's.
        is_training: a backward will follow; None for what the model says.

    Raises:
        ValueError, TypeError: a size is no positive int, ``dtype`` no torch.dtype, ``is_training`` no bool.
    """

    batch_size: int = 1
    seqlen: int = 4096
    dtype: torch.dtype | None = None
    is_training: bool | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "seqlen"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int):
                raise TypeError(f"{name}={given!r}; expected an int")
            if given < 1:
                raise ValueError(f"{name}={given}; expected at least 1")
        if not (self.dtype is None or isinstance(self.dtype, torch.dtype)):
            raise TypeError(f"dtype={self.dtype!r}; expected a torch.dtype, or None for the model's")
        if not (self.is_training is None or isinstance(self.is_training, bool)):
            raise TypeError(f"is_training={self.is_training!r}; expected True, False or None for the model's mode")


def grouped(layers: list[LayerKind]) -> tuple[LayerKind, ...]:
    """Each kind once, with the number of its layers."""
    found: dict[Any, list[LayerKind]] = {}
    for layer in layers:
        asked = tuple(
            (what, call if isinstance(call, DecodeRequest) else _likeness(call)) for what, call in layer.asked
        )
        found.setdefault((layer.name, asked, layer.note), []).append(layer)
    return tuple(LayerKind(alike[0].name, alike[0].asked, alike[0].note, len(alike)) for alike in found.values())


def _likeness(call: AttentionCall) -> tuple[Any, ...]:
    """What tells calls apart, hashable: shapes for tensors."""
    arguments = sorted(call.arguments.items())
    values = [*enumerate(call.tensors), *arguments]
    return tuple((name, (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x) for name, x in values)
