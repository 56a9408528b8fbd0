"""The three hooks of an attention backend. These docstrings are the contract; the conformance suite checks it.

A backend is a module or an object with three functions marked ``mla_plugin.hookimpl``. Its name is the name that it is
registered under: the entry point's name in the group ``mla_plugin``. A function with a hook's name and without the
marker is an error at registration.

A plugin whose hooks are all wrappers (``hookimpl(wrapper=True)``) is no backend; it runs around every backend's calls.
An error out of a hook reaches the user as it is, with a note that names the backend.
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
    """Say whether this backend can compute the request on the platform, and if not, every reason why.

    Called once for each new request; the answer is cached, so it must depend on the two arguments alone. Every backend
    answers (not firstresult). It must not touch a device, import a heavy package or compile: ``platform`` says what is
    installed. Each reason gives the value found and the limit, such as ``"head_dim_qk=320 > 256"``. A backend of
    another package that raises here, or whose answer holds wrong types, is left out, and the trace says why.

    There are two kinds of requests, attention over expanded keys and values and decode over the compressed cache. A
    backend that computes one kind refuses the other: ``"DecodeRequest, accepted is AttentionRequest"``.
    """


@hookspec(firstresult=True)
def forward(  # type: ignore[empty-body]
    plan: Plan | DecodePlan, tensors: AttentionTensors | DecodeTensors
) -> AttentionOutput | DecodeOutput:
    """Compute attention. Called only on the backend that ``plan.forward_backend`` names; the arguments are checked.

    ``out`` and ``lse`` are fresh tensors as ``AttentionOutput`` describes. A row that sees no key gives out 0 and
    lse -inf; padded rows of ``thd`` and rows beyond a sequence's length are rows that see no key. Inputs may have any
    strides as long as the last dimension is contiguous. No host synchronisation on a CUDA device. NaN in a query shows
    in its row of ``out``. The process's settings stay as they are, and no tensor of a call is kept.

    A decode request comes with ``DecodeTensors`` and gives a ``DecodeOutput``, under the same rules; the call may be
    captured in a CUDA graph and replayed with other lengths, page tables and cache contents in the same memory.
    """


@hookspec(firstresult=True)
def backward(  # type: ignore[empty-body]
    plan: Plan, residuals: Residuals, dout: torch.Tensor, dlse: torch.Tensor | None
) -> Gradients:
    """Compute the gradients; decode has none. Called only on the backend that ``plan.backward_backend`` names.

    ``dout`` has out's shape and any strides; ``dlse`` has lse's shape, or is None when nobody uses lse, also where a
    request has ``return_lse=True``. For a row that sees no key it may be infinite, and nothing of it is used. The
    forward may have been computed by another backend: only ``out`` and ``lse`` tie the two. With ``partial=True`` they
    belong to a softmax over more keys than these; a backend that cannot use them as they are refuses it. Padded rows of
    the gradients are 0. Write the gradient out: autograd records nothing inside the hooks, not even under
    ``torch.enable_grad``.
    """
