"""Made releases.jsonl.gz next to this file: what the releases of TransformerEngine select, by their own code.

    PYTHONPATH=. python tests/resolver/data/record_releases.py REQUESTS SOURCES

REQUESTS has one request a line: ``id``, ``params``, ``env``, ``platform`` (as ``te_decide`` takes them). SOURCES has
the Python of each release, ``SOURCES/2.14.1/transformer_engine/...``, as its tag and its wheel do.

The module with ``get_attention_backend`` runs with everything else that it imports replaced by stand-ins; the platform
and the installed packages are put in their places, and cuDNN's query answers what ``fused_supported`` says. Kept are
what is selected, the FlashAttention left, what is available, and one letter (``te_cases.LETTERS``) for each backend
that the log names; a letter that follows itself is left out. A release stands in a line only where it differs from the
one before.
"""

import ast
import gzip
import importlib
import importlib.util
import itertools
import json
import logging
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from packaging.version import Version

from mla_plugin.resolver.transformer_engine.cudnn import LAYOUTS, MASKS
from mla_plugin.resolver.transformer_engine.flash import fa4_takes
from tests.resolver.te_cases import BASE_PARAMS, LETTERS, SUBJECTS

FOLDER = "transformer_engine/pytorch/attention/dot_product_attention"
FUSED = {"F16_max512_seqlen": 0, "F16_arbitrary_seqlen": 1, "FP8": 2, "No_Backend": -1}
FORMATS = ("bshd", "sbhd", "thd", "bhsd", "sbhd_2bshd", "bshd_2sbhd", "thd_2bshd", "thd_2sbhd", None)
SHAPES = {"1hss": (True, False, False), "bhss": (False, False, False), "111s": (True, True, True)}


class StandIn(types.ModuleType):
    """A module that has every name: a class for one that begins with a capital, a mock for any other."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        is_class = name[0].isupper() and not name.isupper() and self.__name__ != "transformer_engine_torch"
        value = type(name, (), {}) if is_class else MagicMock(name=name)
        setattr(self, name, value)
        return value


class StandInFinder:
    """Finds a stand-in for every module of TransformerEngine."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


class Member(int):
    """A member of an enumeration, equal to its number."""

    @property
    def value(self) -> int:
        return int(self)


class Names(dict):
    """An enumeration by key and by attribute."""

    __getattr__ = dict.__getitem__


def _plain_function(source: str, name: str) -> Any:
    """One function of a module that cannot be imported."""
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name)
    scope: dict[str, Any] = {}
    exec(compile(ast.Module([node], []), name, "exec"), scope)
    return scope[name]


def load(sources: Path, release: str) -> types.ModuleType:
    """The module with ``get_attention_backend`` of one release."""
    stand_in = importlib.import_module
    kernels = stand_in("transformer_engine.pytorch.cpp_extensions.fused_attn")
    kernels.FusedAttnBackend = Names({name: Member(number) for name, number in FUSED.items()})
    kernels.QKVLayout, kernels.QKVFormat = ({name: name for name in names} for names in (LAYOUTS, FORMATS))
    kernels.AttnMaskType = {name: name for name in MASKS}
    kernels.AttnBiasType = {name: name for name in ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")}
    kernels.SoftmaxType = {name: name for name in ("vanilla", "off-by-one", "learnable")}
    constants = stand_in("transformer_engine.pytorch.constants")
    dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
    constants.TE_DType, constants.DType = {dtype: str(dtype) for dtype in dtypes}, MagicMock()
    stand_in("transformer_engine.pytorch.jit").jit_fuser = lambda function: function
    stand_in("transformer_engine.pytorch.export").is_in_onnx_export_mode = lambda: False
    steps = sources / release / FOLDER / "context_parallel.py"
    if "def cp_per_step_configs" in steps.read_text():
        found = _plain_function(steps.read_text(), "cp_per_step_configs")
        stand_in(f"{FOLDER.replace('/', '.')}.context_parallel").cp_per_step_configs = found
    module = types.ModuleType(f"utils_of_{release}")
    sys.modules[module.__name__] = module
    source = (sources / release / FOLDER / "utils.py").read_text()
    # Custom operators are registered once in a process, under one name.
    source = source.replace('"te_attention::', f'"te_{release.replace(".", "_")}::')
    exec(compile(source, module.__name__, "exec"), module.__dict__)
    module.tex = MagicMock()
    module.AttentionLogging._log_level = logging.DEBUG
    # A selection raises what it asks of FlashAttention 2, for its advice; what counts is what the import compares.
    module.oldest = {False: module.FlashAttentionUtils.version_required}
    module.oldest[True] = module.FlashAttentionUtils.version_required_blackwell
    return module


def install(module: types.ModuleType, platform: dict[str, Any]) -> None:
    """Put the platform and the packages in their places."""
    flash, utils = platform["flash_attn"], module.FlashAttentionUtils
    capability, cudnn = tuple(platform["compute_capability"]), tuple(platform["cudnn_version"])
    for name in vars(utils):
        if name == "is_installed" or name.endswith(("_is_installed", "_plus")):
            setattr(utils, name, False)
    if flash["2"] is not None:
        version = Version(flash["2"])
        fits = getattr(utils, "is_version_supported", lambda found, least: least <= found <= utils.max_version)
        if fits(version, module.oldest[capability >= (10, 0)]):
            utils.version = version
            utils.set_flash_attention_version()
    if flash["3"] is not None:
        utils.fa3_version = Version(flash["3"])
        utils.set_flash_attention_3_params()
    if flash["4"] is not None and hasattr(utils, "fa4_version") and Version(flash["4"]) >= Version("4.0.0b5"):
        utils.fa4_version = Version(flash["4"])
        utils.set_flash_attention_4_params()

        def validate(dq: int, dv: int, major: int, alignment: int) -> None:
            assert fa4_takes(dq, dv, (major, 0), flash["4"])

        utils.v4_validate_head_dims = staticmethod(validate)
    module.get_device_compute_capability, module.get_cudnn_version = lambda: capability, lambda: cudnn
    answer = module.FusedAttnBackend["F16_arbitrary_seqlen" if platform["fused_supported"] else "No_Backend"]
    has_message = hasattr(module, "FusedAttentionParams")
    module.tex.get_fused_attn_backend = lambda *_, **__: (answer, "no kernel") if has_message else answer


def as_params(module: types.ModuleType, line: dict[str, Any]) -> Any:
    """The request as AttentionParams; None where the release cannot express it."""
    names = {field.name for field in fields(module.AttentionParams)}
    params = dict(line["params"])
    if any(params[name] and name not in names for name in ("has_score_mod", "has_score_mod_bprop")):
        return None
    given = params.get("deterministic", "env")
    from_env = not int(line["env"].get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1"))
    params["deterministic"] = from_env if given == "env" else given
    params["qkv_dtype"] = getattr(torch, params["qkv_dtype"])
    if params["window_size"] is not None:
        params["window_size"] = tuple(params["window_size"])
    if params["inference_params"] is not None:
        params["inference_params"] = MagicMock(**params["inference_params"])
    shape = params["core_attention_bias_shape"]
    if shape is not None and "softcap" in names:
        sizes = [params[name] for name in ("batch_size", "num_heads", "max_seqlen_q")]
        ones = [1 if is_one else size for size, is_one in zip(sizes, SHAPES[shape], strict=True)]
        params["core_attention_bias_shape"] = (*ones, params["max_seqlen_kv"])
    return module.AttentionParams(**{k: v for k, v in params.items() if k in names}, fp8=False, fp8_meta={})


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """These variables of TransformerEngine and no others."""
    saved = dict(os.environ)
    for name in [name for name in saved if name.startswith("NVTE_")]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)


class Log(logging.Handler):
    """Keeps the messages that say what is switched off."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.subjects: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        subject = next((s for s in SUBJECTS if message.startswith(f"Disabling {s}")), None)
        if subject is not None:
            self.subjects.append(LETTERS[subject])


def seen(module: types.ModuleType, line: dict[str, Any], log: Log) -> str | None:
    """What the release selects, as ``te_cases.as_seen`` puts it."""
    install(module, line["platform"])
    params = as_params(module, line)
    if params is None:
        return None
    log.subjects = []
    with environment(line["env"]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flash, version, fused, _, unfused, available = module.get_attention_backend(params)
    utils = module.FlashAttentionUtils
    versions = {"4": getattr(utils, "fa4_version", None), "3": utils.fa3_version, "2": utils.version}
    number = next((n for n, found in versions.items() if version is not None and found is version), "-")
    selected = f"flash{number}" if flash else "fused" if fused else "unfused" if unfused else "none"
    letters = "".join(letter for letter, _ in itertools.groupby(log.subjects))
    return f"{selected} {number} {''.join(str(int(bool(left))) for left in available)} {letters}".rstrip()


def compact(line: dict[str, Any], selects: dict[str, str | None]) -> str:
    """A line of the file."""
    changes, last = {}, None
    for release, found in selects.items():
        if found is not None and found != last:
            changes[release], last = found, found
    platform = line["platform"]
    flash = [platform["flash_attn"][number] for number in "234"]
    content = {
        "id": line["id"],
        "params": {k: v for k, v in line["params"].items() if k not in BASE_PARAMS or BASE_PARAMS[k] != v},
        **({"env": line["env"]} if line["env"] else {}),
        "platform": [platform["compute_capability"], platform["cudnn_version"], flash, platform["fused_supported"]],
        "selects": changes,
    }
    return json.dumps(content, separators=(",", ":"))


if __name__ == "__main__":
    sys.meta_path.insert(0, StandInFinder())
    torch.cuda.current_device = lambda: 1  # the advice to install FlashAttention comes from device 0 alone
    lines = [json.loads(text) for text in Path(sys.argv[1]).read_text().splitlines()]
    sources, log = Path(sys.argv[2]), Log()
    logger = logging.getLogger("DotProductAttention")
    logger.handlers, logger.propagate = [log], False
    recorded: list[dict[str, str | None]] = [{} for _ in lines]
    for folder in sorted(sources.iterdir(), key=lambda folder: Version(folder.name)):
        module, release = load(sources, folder.name), ".".join(folder.name.split(".")[:2])
        for line, selects in zip(lines, recorded, strict=True):
            selects[release] = seen(module, line, log)
    text = "".join(f"{compact(line, selects)}\n" for line, selects in zip(lines, recorded, strict=True))
    Path(__file__).with_name("releases.jsonl.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))
