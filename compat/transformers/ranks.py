"""Context parallelism: a model of transformers over the ranks of a group, each with its own tokens of every sequence.

transformers knows nothing of the group, so a context manager holds it: inside, the attention function passes it to
``mla_plugin.attention``, and every layer attends to the keys of all ranks. Everything else of a model works token by
token, but for the rotary embedding, which needs ``position_ids``, and the loss, which shifts labels: ``shard_batch``
gives both. What would be computed from this rank's tokens only is refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin.arguments.checks import check_choice
from mla_plugin.compat.transformers import latent
from mla_plugin.compat.transformers.causality import is_bidirectional_without_mask
from mla_plugin.compat.transformers.sinks import with_sinks
from mla_plugin.context_parallel import position_ids, shard
from mla_plugin.context_parallel.checks import WAYS
from mla_plugin.context_parallel.group import Group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TOKENS = ("input_ids", "inputs_embeds")
_ACCEPTED = (*_TOKENS, "labels", "position_ids", "attention_mask")
_IGNORED_LABEL = -100
_LAYERS = {"full_attention", "sliding_attention"}
"""What ``config.layer_types`` may hold; others, such as linear attention, pass states along the sequence."""


class Ranks:
    """The group that a model's layers share, and how they exchange K and V."""

    def __init__(self, group: Group, cp_comm_type: str) -> None:
        self.group, self.cp_comm_type = group, cp_comm_type
        self._checked: weakref.ref[torch.Tensor] | None = None

    def check_mask(self, attention_mask: torch.Tensor | None, *, is_causal: bool, config: Any) -> None:
        """That each token of a forward sees itself and all before it, on any rank, and nothing else.

        Raises:
            ValueError: padding, or another pattern; reads ``attention_mask`` where there is one.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError(_PADDING)
        if getattr(config, "index_topk", None) is not None:
            raise ValueError("context_parallel: sparse (DSA) models choose keys of their own rank only")
        if not is_causal:
            raise ValueError(
                "context_parallel: this model's mask is more than causal (a sliding window shorter than the sequence, "
                "chunks, tokens that see later ones), and a mask of one rank's tokens cannot say so"
            )

    def check_call(self, module: Any, query: torch.Tensor, key: torch.Tensor, given: Mapping[str, Any]) -> None:
        """That a layer's call is one over whole sequences, cut as ``shard_batch`` cuts them.

        Raises:
            ValueError: a mask, packed sequences, a cache, other positions, a model with other layers, or one whose
                layers do not say reliably whether they are causal.
        """
        for name in ("attention_mask", "indices", "cu_seq_lens_q", "cu_seq_lens_k"):
            if given[name] is not None:
                raise ValueError(f"context_parallel: a layer got {name}; rows of one sequence without masks are needed")
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"context_parallel: {query.shape[2]} queries and {key.shape[2]} keys on this rank, as in decoding with "
                "a cache; generate() and cached prefixes run outside of the context manager"
            )
        config = getattr(module, "config", None)
        if is_bidirectional_without_mask(config):
            raise ValueError(
                f"context_parallel: {type(config).__name__}'s models support neither sdpa nor other attention "
                "functions, so their layers do not say reliably whether they are causal; set _supports_sdpa = True on "
                "your own model if is_causal of its layers is right"
            )
        others = set(getattr(config, "layer_types", None) or ()) - _LAYERS
        if others:
            raise ValueError(f"context_parallel: the model has layers of {sorted(others)}, which see one rank's tokens")
        self._check_positions(given["position_ids"], query.shape[2])

    def _check_positions(self, given: torch.Tensor | None, tokens: int) -> None:
        """Values are read, once a forward: all layers of it are passed the same tensor."""
        if given is not None and self._checked is not None and self._checked() is given:
            return
        group = self.group
        if given is not None and given.shape[-1] == tokens:
            expected = position_ids(tokens * group.size, group.size, group.rank, device=given.device)
            if bool((given == expected).all()):
                self._checked = weakref.ref(given)
                return
        raise ValueError(
            f"context_parallel: position_ids of rank {group.rank} of {group.size} with {tokens} tokens must be "
            f"mla_plugin.context_parallel.position_ids({tokens * group.size}, {group.size}, {group.rank}) in each row; "
            "shard_batch gives them"
        )

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        is_causal: bool,
        scaling: float | None,
        dropout: float,
        s_aux: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of this rank's queries; arguments and result as in ``attention_forward``."""
        if latent.gets_latents(module):
            key, value = latent.expand(module, key, value)
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return with_sinks(
            mla_plugin.attention,
            *(q, k, v),
            s_aux=s_aux,
            attn_mask_type="causal" if is_causal else "no_mask",
            softmax_scale=scaling,
            dropout_p=dropout,
            host="transformers",
            cp_group=self.group.process_group,
            cp_comm_type=self.cp_comm_type,
        ).contiguous()


_PADDING = (
    "context_parallel: attention_mask holds padding, and no rank knows the others' part of it; pad rows at their end "
    "and give no attention_mask: causal attention lets no token see what comes after it, and labels of -100 take "
    "padding out of the loss"
)

_active: list[Ranks | None] = [None]
"""The innermost context manager's last. For all threads: a backward on a GPU recomputes in a separate thread."""

_shared: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Layers whose latest forward was shared by ranks."""


@contextlib.contextmanager
def context_parallel(cp_group: dist.ProcessGroup | DeviceMesh, *, cp_comm_type: str = "p2p") -> Iterator[None]:
    """Inside, layers with ``attn_implementation="mla_plugin"`` attend to the tokens of all ranks of a group.

    All ranks run the same forwards and backwards, each on its own part of the same batch, which ``shard_batch`` cuts.
    With gradient checkpointing ``backward`` has to run inside too, for it computes attention again.

    Args:
        cp_group: a ProcessGroup or a one-dimensional DeviceMesh. A group of one rank changes nothing.
        cp_comm_type: how K and V travel, as in ``mla_plugin.attention``: ``p2p``, ``all_gather`` or ``a2a``.

    Raises:
        TypeError, ValueError: no such group or exchange. A forward inside raises a ValueError for padding, packed
            sequences, other positions than ``shard_batch`` gives, decoding with a cache, sliding windows shorter than
            the sequences, sparse models and models with linear attention.
    """
    check_choice("cp_comm_type", cp_comm_type, tuple(WAYS))
    group = Group.of(cp_group)
    _active.append(None if group.size == 1 else Ranks(group, cp_comm_type))
    try:
        yield
    finally:
        _active.pop()


def current() -> Ranks | None:
    """What the innermost context manager says; None outside, and for a group of one rank."""
    return _active[-1]


def current_for(module: Any) -> Ranks | None:
    """``current`` for a layer that is called now.

    Raises:
        RuntimeError: a backward outside of the context manager recomputes a forward that ran inside.
    """
    found = current()
    if torch.compiler.is_compiling() or not isinstance(module, torch.nn.Module):
        return found
    if found is None and not _shared:
        return None
    is_recomputed = torch._C._current_graph_task_id() != -1
    if is_recomputed and found is None and module in _shared:
        raise RuntimeError(
            "a backward outside of context_parallel computes attention again (gradient checkpointing) that ran inside; "
            "call backward() inside of the context manager"
        )
    if not is_recomputed:
        (_shared.discard if found is None else _shared.add)(module)
    return found


def shard_batch(batch: Mapping[str, Any], cp_group: dist.ProcessGroup | DeviceMesh) -> dict[str, Any]:
    """This rank's part of a batch, for a forward inside of ``context_parallel``.

    Labels are shifted before they are cut, for the next token may be on another rank. The loss is this rank's share:
    its sum over the labels here, divided by the number of labels of the whole batch. **Sums** of it and of the
    gradients over the group are those of one process.

    Args:
        batch: of whole sequences, equal on all ranks: ``input_ids`` [B, S] or ``inputs_embeds`` [B, S, D], and perhaps
            ``labels`` [B, S] (-100 where there is no loss), ``position_ids`` that count from 0, and an
            ``attention_mask`` of ones. S is a multiple of twice the ranks.
        cp_group: as in ``context_parallel``.

    Returns:
        the same tokens, cut; ``position_ids`` [1, S / ranks]; with labels also ``labels`` and ``shift_labels``, both
        shifted, and ``num_items_in_batch``, a tensor.

    Raises:
        ValueError: padding, packed sequences, a length that cannot be cut, something else in the batch.
    """
    group = Group.of(cp_group)
    unknown = sorted(set(batch) - set(_ACCEPTED))
    names = [name for name in _TOKENS if batch.get(name) is not None]
    if unknown or len(names) != 1:
        raise ValueError(
            f"shard_batch got {sorted(batch)}; expected {', '.join(_ACCEPTED)}, with one of {' and '.join(_TOKENS)}"
        )
    whole = cast(torch.Tensor, batch[names[0]])
    tokens = whole.shape[1]
    mask, positions, labels = (batch.get(name) for name in ("attention_mask", "position_ids", "labels"))
    if mask is not None and not bool(mask.all()):
        raise ValueError(_PADDING)
    if positions is not None and not torch.equal(positions, torch.arange(tokens).to(positions).expand_as(positions)):
        raise ValueError("shard_batch got position_ids that do not count from 0 in each row, as for packed sequences")
    cut = {name: shard(batch[name], group.size, group.rank) for name in names}
    cut["position_ids"] = position_ids(tokens, group.size, group.rank, device=whole.device)[None]
    if labels is not None:
        if labels.shape != whole.shape[:2]:
            raise ValueError(f"labels are {list(labels.shape)}; expected {list(whole.shape[:2])}, as the tokens")
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED_LABEL)
        cut["labels"] = cut["shift_labels"] = shard(shifted, group.size, group.rank)
        cut["num_items_in_batch"] = (shifted != _IGNORED_LABEL).sum()
    return cut
