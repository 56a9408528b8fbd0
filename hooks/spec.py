"""The three hooks of an attention backend. These docstrings are the contract; the conformance suite checks it.

A backend is a module or an object with three functions marked ``mla_plugin.hookimpl``. Its name is the one it is
registered under: the name of its entry point in the group ``mla_plugin``. A function with a hook's name but without
the marker is an error at registration.

A plugin whose hooks are all wrappers (``hookimpl(wrapper=True)``) is not a backend; it runs around the calls of every
backend. An exception raised in a hook reaches the user unchanged, with a note that names the backend.
"""

from __future__ import annotations

import torch

from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.arguments.decode import DecodeTensors
from mla_plugin.hooks import hookspec
from mla_plugin.hooks.attention import AttentionOutput, AttentionRequest, Gradients, Plan, Residuals
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan, DecodeRequest
from mla_plugin.hooks.types import Accepted, Platform, Refused


@hookspec
def select_backend(  # type: ignore[empty-body]
    request: AttentionRequest | DecodeRequest, platform: Platform
) -> Accepted | Refused:
    """Return whether this backend can compute the request on the platform, and if not, every reason why.

    Called once for each new request; the answer is cached, so it must depend only on the two arguments. Every backend
    is asked, also after one has accepted. It must not touch a device, import a heavy package or compile: ``platform``
    lists what is installed. Each reason gives the value found and the limit, such as ``"head_dim_qk=320 > 256"``. A
    third-party backend that raises here, or returns wrong types, is left out, and the trace says why.

    There are two kinds of requests, attention over expanded keys and values and decode over the compressed cache. A
    backend that computes one kind refuses the other: ``"DecodeRequest, expected AttentionRequest"``. A backend
    that reads quantised caches names their formats in ``Accepted.kv_cache_formats``. An acceptance that does not name
    the request's format counts as a refusal.
    """


@hookspec(firstresult=True)
def forward(  # type: ignore[empty-body]
    plan: Plan | DecodePlan, tensors: AttentionTensors | DecodeTensors
) -> AttentionOutput | DecodeOutput:
    """Compute attention. Called only on the backend named by ``plan.forward_backend``, with checked arguments.

    ``out`` and ``lse`` are fresh tensors as ``AttentionOutput`` describes. A row that sees no key gives out 0 and
    lse -inf; padded rows of ``thd`` and rows beyond a sequence's length are rows that see no key. Inputs may have any
    strides as long as the last dimension is contiguous. No host synchronisation on a CUDA device. NaN in a query
    propagates to its row of ``out``, unless ``Accepted.drops_nan`` says otherwise. Do not change process-wide settings,
    environment variables or ``tensors``, do not print, and do not keep any tensor of a call.

    A bias of -inf hides its key from its query, as a mask does; a query that sees keys sees one with a finite bias.
    Two calls with the same tensors may differ in roundings, unless the request is ``deterministic``.

    With ``dropout_p`` each softmax weight is 0 with this probability, independently of all other queries, keys, heads
    and sequences, and otherwise divided by ``1 - dropout_p``; ``lse`` is of the weights before that. ``dropout_seed``
    decides which are dropped: the same ones in both passes and in each call with the same tensors, and others by a
    different seed.

    A decode request comes with ``DecodeTensors`` and returns a ``DecodeOutput``, under the same rules; the call may be
    captured in a CUDA graph and replayed with other lengths, page tables and cache contents in the same memory. Two
    decode calls with the same tensors give the same bits, unasked, so that a generation can be repeated.
    """


@hookspec(firstresult=True)
def backward(  # type: ignore[empty-body]
    plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Compute the gradients; not called for decode. Called only on the backend named by ``plan.backward_backend``.

    ``dout`` has out's shape and any strides; ``dlse`` has lse's shape, or is None when lse is unused, which may happen
    with ``return_lse=True`` too. For a row that sees no key ``dlse`` may be infinite and must be ignored. The forward
    may have run on another backend: only ``out`` and ``lse`` connect the two. Their strides are that backend's; the
    last dimension of ``out`` is contiguous. In a request with ``partial=True`` they belong to a softmax over more keys
    than these; a backend that cannot use them as given must refuse such a request. With dropout the weights that the
    forward of the same ``dropout_seed`` drops are dropped, and the others divided by ``1 - dropout_p``.
    The gradients are new memory, and padded rows of them are 0. Compute them explicitly: autograd records nothing
    inside the hooks, not even under ``torch.enable_grad``.
    """
