"""``mla-plugin explain``: which backend runs a request and why, on this machine or on a described one."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from mla_plugin import device, environment
from mla_plugin.arguments.attention import BIAS_TYPES
from mla_plugin.arguments.cache_format import FORMATS
from mla_plugin.arguments.layout import LAYOUTS
from mla_plugin.arguments.mask import ATTN_MASK_TYPES
from mla_plugin.arguments.options import HOSTS
from mla_plugin.cli import ranks, terminal
from mla_plugin.cli.model_shape import count, width
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.types import Platform
from mla_plugin.resolver import Decision, DecodeDecision, changes, describe_decode, survey, survey_decode
from mla_plugin.resolver.explanation import describe
from mla_plugin.resolver.why import Why
from mla_plugin.resolver.why import why as ask_why
from mla_plugin.variables import VARIABLES

DTYPES = ("bfloat16", "float16", "float32", "float64")
DESCRIPTION = "Explain which backend runs a request and why, here or on a described machine."

EPILOG = """\
Without --device and --capability the platform is this machine. Packages and
environment variables are those of this machine, changed by --package and --env.
If this PyTorch has no CUDA, a note gives the CUDA and cuDNN versions assumed
for a CUDA device.

exit status: 0 if a backend takes the request, 1 if none does, 2 for invalid
arguments; with --why, 0 if that backend runs or can run.

In a program, mla_plugin.explain(q, k, v, ...) explains a call and
mla_plugin.explain(model) each layer of a model. NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=1
logs each new decision to stderr; NVTE_DEBUG_LEVEL=2 also logs every reason.

example: mla-plugin explain --capability 8.0 --format thd --mask padding_causal
         mla-plugin explain --decode --heads 16 --why flashinfer"""

SHARED_MEMORY_PER_BLOCK = {
    (8, 0): 166912,
    (8, 6): 101376,
    (8, 7): 166912,
    (8, 9): 101376,
    (9, 0): 232448,
    (10, 0): 232448,
    (10, 3): 232448,
    (12, 0): 101376,
    (12, 1): 101376,
}
"""Largest opt-in shared memory of a thread block in bytes (CUDA C++ Programming Guide, compute capabilities)."""

ASSUMED: dict[str, Any] = {"cuda_version": changes.CUDA, "cudnn_version": changes.CUDNN}
"""Assumed properties of a described CUDA device if this PyTorch has no CUDA."""


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=VALUE")
    return name, value


def _known(kind: str, names: Collection[str]) -> Callable[[str], tuple[str, str]]:
    """Parse NAME=VALUE and check the name; a misspelt name would silently change nothing."""

    def parse(text: str) -> tuple[str, str]:
        name, value = _pair(text)
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1) or sorted(names)
            raise argparse.ArgumentTypeError(f"no decision depends on the {kind} {name!r}; {', '.join(close)}?")
        return name, value

    return parse


def _package(text: str) -> tuple[str, str]:
    """Parse NAME=VERSION; an empty version means not installed."""
    name, version = _known("package", device.DISTRIBUTIONS)(text)
    try:
        Version(version or "0")
    except InvalidVersion:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a version such as {name}=2.8.3") from None
    return name, version


def _numbers(text: str, example: str) -> tuple[int, ...]:
    parts = text.split(".")
    if len(parts) != len(example.split(".")) or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: write it as in {example}")
    return tuple(map(int, parts))


def _capability(text: str) -> tuple[int, ...]:
    return _numbers(text, "8.0")


def _cudnn_version(text: str) -> tuple[int, ...]:
    return _numbers(text, "9.8.0")


def _cuda_version(text: str) -> str:
    _numbers(text, "13.0")
    return text


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number 0 <= x < 1")
    return value


def add_parser(commands: Any) -> None:
    """Add the command and its arguments."""
    parser = commands.add_parser(
        "explain",
        help="which backend runs a request, and why the others do not",
        usage="%(prog)s [options]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run, default_of=parser.get_default)
    _add_request(parser.add_argument_group("request"))
    _add_decode(
        parser.add_argument_group("decode", "with --decode, --seqlen-q defaults to 1; --mask no_mask sees all keys")
    )
    ranks.add_arguments(
        parser.add_argument_group("context parallelism and latents", "--seqlen-q and --seqlen-kv are whole sequences"),
        count,
    )
    _add_platform(parser.add_argument_group("platform"))
    parser.add_argument("--backend", metavar="NAME", help="use only this backend")
    parser.add_argument(
        "--why",
        metavar="NAME",
        help="explain why this backend does not run, and what to install or change",
    )
    parser.add_argument("--json", action="store_true", help="print the decision as JSON")


def _add_request(group: Any) -> None:
    group.add_argument("--head-dim-qk", metavar="N", type=count, default=192, help="192 by default, as DeepSeek-V3")
    group.add_argument("--head-dim-v", metavar="N", type=count, default=128, help="128 by default, as DeepSeek-V3")
    group.add_argument("--heads", metavar="N", type=count, default=128, help="query heads; 128 by default")
    group.add_argument("--kv-heads", metavar="N", type=count, help="key-value heads; by default as many as query heads")
    group.add_argument("--batch-size", metavar="N", type=count, default=2, help="sequences; 2 by default")
    group.add_argument("--seqlen-q", metavar="N", type=count, help="longest query sequence; 4096 by default")
    group.add_argument(
        "--seqlen-kv", metavar="N", type=count, help="longest key-value sequence; by default as the queries"
    )
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="bfloat16 by default")
    group.add_argument("--format", choices=LAYOUTS, default="bshd", help="memory layout; bshd by default")
    masks = ", ".join(ATTN_MASK_TYPES)
    group.add_argument(
        "--mask", choices=ATTN_MASK_TYPES, default="causal", metavar="TYPE", help=f"one of {masks}; causal by default"
    )
    group.add_argument("--window", type=int, nargs=2, metavar=("LEFT", "RIGHT"), help="sliding window; -1 is unlimited")
    group.add_argument(
        "--dropout", type=_probability, default=0.0, metavar="P", help="dropout probability; 0 by default"
    )
    group.add_argument("--inference", action="store_true", help="forward only; the default is training")
    group.add_argument("--deterministic", action="store_true", help="the backward must be bitwise reproducible")
    group.add_argument(
        "--batch-invariant", action="store_true", help="the bits of a row must not depend on the rest of the batch"
    )
    group.add_argument("--pad-between-seqs", action="store_true", help="thd with padding between the sequences")
    group.add_argument("--bias", choices=BIAS_TYPES, default="no_bias", help="additive bias; no_bias by default")
    group.add_argument("--host", choices=HOSTS, default="direct", help="the calling framework; direct by default")


def _add_decode(group: Any) -> None:
    group.add_argument("--decode", action="store_true", help="absorbed decode over the compressed cache")
    group.add_argument("--kv-lora-rank", metavar="N", type=count, default=512, help="width of c_kv; 512 by default")
    group.add_argument("--rope", metavar="N", type=width, default=64, help="width of k_rope; 64 by default")
    group.add_argument("--page-size", metavar="N", type=count, default=64, help="tokens per page; 64 by default")
    group.add_argument("--contiguous", action="store_true", help="a contiguous cache instead of pages")
    group.add_argument("--no-host-lengths", action="store_true", help="only the device knows the lengths")
    group.add_argument("--leftpad", action="store_true", help="a left-padded batch")
    group.add_argument("--kv-cache-format", choices=FORMATS, default="plain", help="of the cache; plain by default")


def _add_platform(group: Any) -> None:
    group.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if this machine has it, else cpu")
    group.add_argument("--capability", type=_capability, metavar="MAJOR.MINOR", help="a CUDA device, such as 8.0")
    group.add_argument("--cudnn-version", type=_cudnn_version, metavar="X.Y.Z", help="such as 9.8.0")
    group.add_argument(
        "--cuda-version", type=_cuda_version, metavar="X.Y", help="CUDA that PyTorch was built with, such as 13.0"
    )
    group.add_argument(
        "--package",
        type=_package,
        action="append",
        default=[],
        metavar="NAME=VERSION",
        help="an installed package, such as flash-attn=2.8.3; an empty version means not installed",
    )
    group.add_argument(
        "--env",
        type=_known("variable", [variable.name for variable in VARIABLES]),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable, such as NVTE_FLASH_ATTN=0",
    )
    group.add_argument(
        "--te-release",
        metavar="X.Y",
        help="TransformerEngine release whose rules apply, such as 2.14; default: the newest known, and with --host "
        "transformer_engine the installed one",
    )


def request_of(arguments: argparse.Namespace, device_type: str) -> AttentionRequest:
    """The request that the arguments describe.

    Raises:
        ValueError: the arguments contradict each other.
    """
    num_kv_heads = arguments.kv_heads or arguments.heads
    seqlen_q = arguments.seqlen_q or 4096
    if arguments.heads % num_kv_heads:
        raise ValueError(f"--heads {arguments.heads} is not a multiple of --kv-heads {num_kv_heads}")
    if arguments.pad_between_seqs and arguments.format != "thd":
        raise ValueError(f"--pad-between-seqs needs --format thd; the format is {arguments.format}")
    asked = tuple(arguments.window) if arguments.window else None
    return AttentionRequest(
        qkv_format=arguments.format,
        dtype=getattr(torch, arguments.dtype),
        device_type=device_type,
        batch_size=arguments.batch_size,
        num_heads=arguments.heads,
        num_kv_heads=num_kv_heads,
        max_seqlen_q=seqlen_q,
        max_seqlen_kv=arguments.seqlen_kv or seqlen_q,
        head_dim_qk=arguments.head_dim_qk,
        head_dim_v=arguments.head_dim_v,
        attn_mask_type=arguments.mask,
        window_size=asked or (-1, -1),
        pad_between_seqs=arguments.pad_between_seqs,
        bias_type=arguments.bias,
        dropout_p=arguments.dropout,
        is_training=not arguments.inference,
        deterministic=arguments.deterministic,
        batch_invariant=arguments.batch_invariant,
        host=arguments.host,
    )


def decode_request_of(arguments: argparse.Namespace, device_type: str) -> DecodeRequest:
    """The decode request that the arguments describe.

    Raises:
        ValueError: a width is negative.
    """
    seqlen_q = arguments.seqlen_q or 1
    return DecodeRequest(
        dtype=getattr(torch, arguments.dtype),
        device_type=device_type,
        batch_size=arguments.batch_size,
        seqlen_q=seqlen_q,
        num_heads=arguments.heads,
        kv_lora_rank=arguments.kv_lora_rank,
        qk_rope_head_dim=arguments.rope,
        max_seqlen_kv=arguments.seqlen_kv or 4096,
        page_size=None if arguments.contiguous else arguments.page_size,
        causal=seqlen_q > 1 and arguments.mask != "no_mask",
        has_seqlens_kv=True,
        has_host_lengths=not arguments.no_host_lengths,
        has_leftpad_kv=arguments.leftpad,
        batch_invariant=arguments.batch_invariant,
        kv_cache_format=arguments.kv_cache_format,
        host=arguments.host,
    )


def platform_of(arguments: argparse.Namespace) -> Platform:
    """This machine as changed by the arguments; a device that it does not have is described only by them.

    Raises:
        ValueError: the arguments contradict each other, or ask for a CUDA device that this machine does not have.
    """
    if arguments.capability and arguments.device == "cpu":
        raise ValueError("--capability describes a CUDA device; leave it out with --device cpu")
    has_cuda = torch.cuda.is_available()
    is_cuda = arguments.capability is not None or (arguments.device == "cuda" if arguments.device else has_cuda)
    if is_cuda and not has_cuda and not arguments.capability:
        raise ValueError("this machine has no CUDA device; describe one with --capability, such as --capability 8.0")
    platform = device.platform("cuda" if is_cuda and has_cuda else "cpu")
    packages = dict(platform.packages) | dict(arguments.package)
    described: dict[str, Any] = {
        "device_type": "cuda" if is_cuda else "cpu",
        "packages": tuple(sorted((name, version) for name, version in packages.items() if version)),
    }
    if arguments.capability not in (None, platform.compute_capability):
        shared_memory = SHARED_MEMORY_PER_BLOCK.get(arguments.capability)
        described |= {"compute_capability": arguments.capability, "shared_memory_per_block": shared_memory}
        described |= {"multi_processor_count": None, "tools": platform.tools - {"triton-interpreter"}}
    given = {name: getattr(arguments, name) for name in ASSUMED if getattr(arguments, name)}
    assumed = {name: value for name, value in ASSUMED.items() if is_cuda and not has_cuda and name not in given}
    if assumed:
        words = ", ".join(f"{name}={value}" for name, value in assumed.items())
        terminal.show(f"note: this PyTorch has no CUDA; assumed {words}", sys.stderr)
    return dataclasses.replace(platform, **described, **assumed, **given)


def _differences(value: Any) -> dict[str, Any]:
    """The attributes of a dataclass that have no default or differ from it."""
    fields = dataclasses.fields(value)
    return {f.name: getattr(value, f.name) for f in fields if getattr(value, f.name) != f.default}


def as_json(decision: Decision | DecodeDecision, why: Why | None = None) -> dict[str, Any]:
    """The decision for JSON: request, platform, cascade, trace in the order tried, the plan or the error, and why."""
    content: dict[str, Any] = {"request": _differences(decision.request), "platform": _differences(decision.platform)}
    if isinstance(decision, Decision):
        content["transformer_engine"] = dataclasses.asdict(decision.cascade) if decision.cascade else None
    content["trace"] = [dataclasses.asdict(entry) for entry in decision.trace]
    content["plan"] = None
    if decision.plan is not None:
        content["plan"] = {"forward": decision.plan.forward_backend}
    if isinstance(decision, Decision) and decision.plan is not None:
        content["plan"]["backward"] = decision.plan.backward_backend
    content["error"] = decision.error
    if why is not None:
        content["why"] = why.as_dict()
    return content


def run(arguments: argparse.Namespace) -> int:
    """Print the decision; 0 when a backend takes the request, or each section of it, 1 when none does."""
    ranks.check_flags(arguments)
    platform = platform_of(arguments)
    environ = dict(environment.gates()) | dict(arguments.env)
    options: dict[str, Any] = {"backend": arguments.backend, "platform": platform, "environ": environ}
    whole: AttentionRequest | DecodeRequest
    if arguments.decode:
        whole = decode_request_of(arguments, platform.device_type)
        if whole.batch_invariant:  # the call would refuse another value
            environment.batch_invariant_chunk(dict(arguments.env))
    else:
        options["te_release"] = arguments.te_release
        whole = request_of(arguments, platform.device_type)
    asked = ranks.requests_of_rank(arguments, whole)
    found = [_decided(request, arguments.why, options) for request in asked.requests]
    contents = [as_json(decision, why) for decision, why in found]
    texts = [_text(decision) if why is None else why.text for decision, why in found]
    if asked.heading is not None:
        contents = [{"context_parallel": asked.heading, "sections": contents}]
        texts = [asked.heading, *texts]
    if arguments.json:
        content = contents[0] if len(contents) == 1 else {"sections": contents}
        print(json.dumps(content, indent=2, default=_plain))
    else:
        terminal.show("\n\n".join(texts))
    runs = (decision.plan if why is None else why.state in ("runs", "behind") for decision, why in found)
    return 0 if all(runs) else 1


def _decided(
    request: AttentionRequest | DecodeRequest, why: str | None, options: dict[str, Any]
) -> tuple[Decision | DecodeDecision, Why | None]:
    decision: Decision | DecodeDecision
    if isinstance(request, DecodeRequest):
        decision = survey_decode(request, **options)
    else:
        try:
            decision = survey(request, **options)
        except AssertionError as error:
            raise ValueError(f"TransformerEngine would raise: {error}") from error
    return decision, None if why is None else ask_why(why, request, **options)


def _text(decision: Decision | DecodeDecision) -> str:
    return describe_decode(decision) if isinstance(decision, DecodeDecision) else describe(decision)


def _plain(value: Any) -> Any:
    """Convert a value that JSON cannot represent."""
    return sorted(value) if isinstance(value, frozenset) else str(value)
