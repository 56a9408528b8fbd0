"""``mla_plugin.explain``: describes the decision for a request, a call's arguments, or each layer of a model."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import torch

from mla_plugin import environment
from mla_plugin.hooks.attention import AttentionRequest, request_of
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.operations.attention import api as attention_api
from mla_plugin.operations.decode import api as decode_api
from mla_plugin.operations.latent import api as latent_api
from mla_plugin.resolver import Decision, DecodeDecision, describe_decode, survey, survey_decode
from mla_plugin.resolver import explain as explain_request
from mla_plugin.resolver.asking import check_backend_is_registered, check_hypothetical
from mla_plugin.resolver.explanation import describe

if TYPE_CHECKING:
    from mla_plugin.layers import AttentionCall, LayerKind, ModelLayers

_HOSTS = {"transformers": "transformers", "megatron": "megatron"}
"""Package that defines a model's classes, and the adapter that describes its layers."""

_ACCEPTED = (
    "expected an AttentionRequest, a DecodeRequest, the tensors q, k, v with the arguments of "
    "mla_plugin.attention, the function latent_attention or decode with its arguments, or a model: a transformers "
    "PreTrainedModel or a Megatron-Core module such as GPTModel"
)


@overload
def explain(
    request: AttentionRequest | DecodeRequest,
    /,
    *,
    backend: str | None = None,
    why: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
) -> str: ...
@overload
def explain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    /,
    *,
    why: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
    **arguments: Any,
) -> str: ...
@overload
def explain(
    model: torch.nn.Module,
    /,
    *,
    batch_size: int = 1,
    seqlen: int = 4096,
    dtype: torch.dtype | None = None,
    is_training: bool | None = None,
    why: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
) -> str: ...
@overload
def explain(
    call: Callable[..., Any],
    /,
    *tensors: torch.Tensor,
    why: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
    **arguments: Any,
) -> str: ...
def explain(*subject: Any, **arguments: Any) -> str:
    """Explain which backend runs, and why. Nothing is computed; meta tensors and models on the meta device work too.

    It explains one of four things:

    - ``explain(request)``: an ``AttentionRequest`` or a ``DecodeRequest``;
    - ``explain(q, k, v, **arguments of attention)``: exactly the call that ``mla_plugin.attention`` would make, with
      its defaults, under the same autocast, with a backward if a tensor requires grad;
    - ``explain(latent_attention, q, c_kv, ..., **arguments)``, ``explain(decode, q_nope_abs, ..., **arguments)``: the
      same for these functions; with ``cp_group`` the sections that this rank computes;
    - ``explain(model, batch_size=1, seqlen=4096)``: every kind of layer of a transformers ``PreTrainedModel`` or of a
      Megatron-Core module, in training, or in prefill and decode for a model in evaluation mode: what runs, and which
      faster backends do not run, and why.

    Args:
        *subject: one of these.
        backend: for a request or a call: use only this backend.
        batch_size, seqlen: size of a model's input, without padding.
        dtype: dtype of a model's q, k and v; default the model's.
        is_training: a backward will follow; default the model's ``training``.
        why: name of a backend: explain instead why it does not run, and what to install or change.
        platform: a hypothetical device; default the device of the tensors or the model, and this machine's for the
            meta device.
        environ: a hypothetical environment; default the process's.
        te_release: the release of TransformerEngine whose rules apply, as in ``survey``; ignored for decode.

    Returns:
        the text: each backend in the order tried with its verdict and reasons, then what runs. For a model, one
        section per kind of layer.

    Raises:
        TypeError: the subject is none of these, or an argument is not accepted with it.
        ValueError: an argument is invalid; the message says what was given and what is expected.
    """
    check_hypothetical(arguments.get("platform"), arguments.get("environ"))
    first = subject[0] if subject else arguments.get("request", arguments.get("q", arguments.get("model")))
    if isinstance(first, (AttentionRequest, DecodeRequest)):
        return _bound(explain_request, "request", subject, arguments)
    if isinstance(first, FunctionType) and first in _CALLS:
        return _explain_call(_CALLS[first], *subject[1:], **arguments)
    if isinstance(first, torch.Tensor) or "q" in arguments or (len(subject) > 1 and not callable(first)):
        return _explain_call(requests_of_attention, *subject, **arguments)
    if _adapter(first) is not None:
        return _bound(_explain_model, "model", subject, arguments)
    raise TypeError(f"explain() got {_kind_of(first)}; {_ACCEPTED}")


def _bound(function: Callable[..., str], what: str, subject: tuple[Any, ...], arguments: dict[str, Any]) -> str:
    """Call ``function``; an argument that it does not take is reported as an error of ``explain``."""
    signature = inspect.signature(function)
    try:
        bound = signature.bind(*subject, **arguments)
    except TypeError as error:
        accepted = ", ".join(name for name in signature.parameters if name != what)
        raise TypeError(f"explain({what}, ...) {error}; expected {accepted}") from None
    return function(*bound.args, **bound.kwargs)


def _kind_of(given: object) -> str:
    kind = type(given)
    return "nothing" if given is None else f"{kind.__module__}.{kind.__qualname__}"


def _explain_call(
    ask: Callable[..., CallRequests],
    *tensors: Any,
    why: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
    **arguments: Any,
) -> str:
    asked = ask(*tensors, **arguments)
    if not asked.requests:
        check_backend_is_registered(asked.backend)
        return "=> no backend: the call has no queries or no keys, so there is nothing to compute"
    options: dict[str, Any] = {"backend": asked.backend, "why": why, "platform": platform, "environ": environ}
    options |= {"te_release": te_release}
    text = [explain_request(_on_device(request, platform), **options) for request in asked.requests]
    return "\n\n".join(text if asked.heading is None else [asked.heading, *text])


class CallRequests(NamedTuple):
    """The requests that a call makes.

    Attributes:
        heading: describes the context parallelism of a call with a group; None without one.
        requests: each kind once; empty if there is nothing to compute.
        backend: the one that the call names.
    """

    heading: str | None
    requests: tuple[AttentionRequest | DecodeRequest, ...]
    backend: str | None


def requests_of_attention(*tensors: Any, **arguments: Any) -> CallRequests:
    """The requests of ``attention`` with these arguments."""
    call = attention_api.described_call(*tensors, **arguments)
    is_empty = not (call.tensors.q.numel() and call.tensors.k.numel())
    if is_empty or call.cp_group is None:
        request = request_of(call.tensors, call.options)  # of an empty call too, because it checks the shapes
        return CallRequests(None, () if is_empty else (request,), call.backend)
    from mla_plugin.context_parallel import described

    return CallRequests(*described.of_attention(*call[:2], call.cp_group, call.cp_comm_type), call.backend)


def requests_of_latent_attention(*tensors: Any, **arguments: Any) -> CallRequests:
    """The requests of ``latent_attention`` with these arguments."""
    from mla_plugin.context_parallel import described

    call, cp_group, cp_comm_type = latent_api.described_call(*tensors, **arguments)
    is_empty = not (call.tensors.q.numel() and call.tensors.c_kv.numel())
    heading, requests = described.of_latents(call, None if is_empty else cp_group, cp_comm_type)  # checks the shapes
    return CallRequests(heading, () if is_empty else requests, call.backend)


def requests_of_decode(*tensors: Any, **arguments: Any) -> CallRequests:
    """The requests of ``decode`` with these arguments."""
    from mla_plugin.context_parallel import described

    call = decode_api.described_call(*tensors, **arguments)
    if not call.tensors.q_nope_abs.numel():
        return CallRequests(None, (), call.backend)
    said = (call.host, call.batch_invariant, call.cp_group, call.cp_interleave)
    return CallRequests(*described.of_decode(call.tensors, *said), call.backend)


_CALLS: dict[object, Callable[..., CallRequests]] = {
    attention_api.attention: requests_of_attention,
    latent_api.latent_attention: requests_of_latent_attention,
    decode_api.decode: requests_of_decode,
}


def _on_device(
    request: Any, platform: Platform | None, device_type: str | None = None, device_index: int | None = None
) -> Any:
    """The request on the platform's device, else on its own; the meta device becomes this machine's."""
    if platform is not None:
        return request.replace(device_type=platform.device_type, device_index=None)
    if device_type is None:
        device_type, device_index = request.device_type, request.device_index
    if device_type == "meta":
        device_type, device_index = "cuda" if torch.cuda.is_available() else "cpu", None
    return request.replace(device_type=device_type, device_index=device_index)


def _adapter(model: object) -> str | None:
    """The adapter of the host that defines the model's class or one of its base classes."""
    if not isinstance(model, torch.nn.Module):
        return None
    packages = [kind.__module__.partition(".")[0] for kind in type(model).__mro__]
    return next((_HOSTS[package] for package in packages if package in _HOSTS), None)


def _explain_model(
    model: torch.nn.Module,
    *,
    batch_size: int = 1,
    seqlen: int = 4096,
    dtype: torch.dtype | None = None,
    is_training: bool | None = None,
    why: str | None = None,
    platform: Platform | None = None,
    environ: Mapping[str, str] | None = None,
    te_release: str | None = None,
) -> str:
    from mla_plugin.layers import Batch  # here, so that importing the package stays fast

    batch = Batch(batch_size, seqlen, dtype, is_training)
    layers = importlib.import_module(f"mla_plugin.compat.{_adapter(model)}.layers").layers_of(model, batch)
    options = {"platform": platform, "environ": environ, "te_release": te_release}
    text = [f"{layers.model}, batch {batch_size}, {seqlen} tokens", *(f"note: {note}" for note in layers.notes)]
    for kind in layers.kinds:
        text += ["", *_section(kind, layers, why, options)]
    return "\n".join(text)


def _section(kind: LayerKind, layers: ModelLayers, why: str | None, options: dict[str, Any]) -> Iterator[str]:
    """One kind of layer: its requests, each with the decision and the faster backends that do not run."""
    from mla_plugin.resolver.speed import faster

    yield f"{kind.count} x {kind.name}"
    if kind.note is not None:
        yield f"  note: {kind.note}"
    platform, environ = options["platform"], options["environ"]
    gates = dict(environment.gates()) if environ is None else environ
    for what, asked in itertools.chain.from_iterable(itertools.starmap(_each_asked, kind.asked)):
        request = _on_device(asked, platform, layers.device_type, layers.device_index)
        if why is not None:
            yield f"  {what}:"
            yield from (f"    {line}" for line in explain_request(request, why=why, **options).splitlines())
            continue
        decision = _survey(request, options)
        head, *_, last = _described(decision).splitlines()
        yield f"  {what}: {head}"
        if decision.plan is None:
            yield from (f"    {line.strip()}" for line in str(decision.error).splitlines()[2:])
        yield f"  {last}"
        lines = list(faster(decision, gates))
        yield from (f"     {line}" for line in lines)
        if not lines and decision.plan is not None and decision.platform.device_type == "cuda":
            yield "     no backend is known to be faster"


def _each_asked(
    what: str, call: AttentionCall | DecodeRequest
) -> Iterator[tuple[str, AttentionRequest | DecodeRequest]]:
    """Every request that a layer's call makes, with its heading."""
    if isinstance(call, DecodeRequest):
        yield what, call
        return
    asked = requests_of_attention(*call.tensors, **call.arguments)
    heading = what if asked.heading is None else f"{what}, {asked.heading}"
    yield from ((heading, request) for request in asked.requests)


def _survey(request: AttentionRequest | DecodeRequest, options: dict[str, Any]) -> Decision | DecodeDecision:
    if isinstance(request, DecodeRequest):
        return survey_decode(request, platform=options["platform"], environ=options["environ"])
    return survey(request, **options)


def _described(decision: Decision | DecodeDecision) -> str:
    return describe_decode(decision) if isinstance(decision, DecodeDecision) else describe(decision)
