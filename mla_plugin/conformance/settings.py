"""Settings that a backend must not change: PyTorch's, NumPy's and Python's, and environment variables."""

from __future__ import annotations

import contextlib
import decimal
import functools
import gc
import io
import locale
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.multiprocessing

from mla_plugin import environment
from mla_plugin.conformance.budget import fail

_CUDA, _CUDNN = torch.backends.cuda, torch.backends.cudnn
Setting = tuple[Callable[[], Any], Callable[[Any], Any], tuple[Any, Any]]


def _attribute(holder: Any, name: str, *values: Any) -> Setting:
    return functools.partial(getattr, holder, name), functools.partial(setattr, holder, name), (values[0], values[-1])


def _autocast_dtype(device_type: str) -> Setting:
    read = functools.partial(torch.get_autocast_dtype, device_type)
    return read, functools.partial(torch.set_autocast_dtype, device_type), (torch.bfloat16, torch.float16)


def _autocast(device_type: str) -> Setting:
    read = functools.partial(torch.is_autocast_enabled, device_type)
    return read, functools.partial(torch.set_autocast_enabled, device_type), (False, False)


def _keeps_denormals() -> bool:
    return bool(torch.full((), 1e-310, dtype=torch.float64) * 1.0 != 0)


def _print_options() -> dict[str, Any]:
    return vars(torch._tensor_str.PRINT_OPTS).copy()


_SETTINGS: dict[str, Setting] = {
    "torch.get_default_dtype()": (
        torch.get_default_dtype,
        torch.set_default_dtype,
        (torch.float32, torch.bfloat16),
    ),
    "torch.get_float32_matmul_precision()": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        ("highest", "medium"),
    ),
    "torch.get_num_threads()": (torch.get_num_threads, torch.set_num_threads, (2, 5)),
    "torch.are_deterministic_algorithms_enabled()": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ((False, False), (True, True)),
    ),
    "torch.backends.cuda.flash_sdp_enabled()": (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp, (True, False)),
    "torch.backends.cuda.mem_efficient_sdp_enabled()": (
        _CUDA.mem_efficient_sdp_enabled,
        _CUDA.enable_mem_efficient_sdp,
        (True, True),
    ),
    "torch.backends.cuda.math_sdp_enabled()": (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp, (True, True)),
    "torch.backends.cuda.cudnn_sdp_enabled()": (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp, (True, True)),
    "torch.is_anomaly_enabled()": (torch.is_anomaly_enabled, torch.set_anomaly_enabled, (False, True)),
    "whether denormal numbers are kept (torch.set_flush_denormal)": (
        _keeps_denormals,
        lambda keeps: torch.set_flush_denormal(not keeps),
        (True, True),
    ),
    "torch.set_printoptions()": (
        _print_options,
        lambda value: vars(torch._tensor_str.PRINT_OPTS).update(value),
        (_print_options(), _print_options()),
    ),
    "gc.isenabled()": (gc.isenabled, lambda value: gc.enable() if value else gc.disable(), (True, False)),
    "sys.getrecursionlimit()": (sys.getrecursionlimit, sys.setrecursionlimit, (3000, 4000)),
    "logging.getLogger().level": (lambda: logging.root.level, logging.root.setLevel, (logging.ERROR, logging.ERROR)),
    "logging.getLogger().handlers": (
        lambda: tuple(logging.root.handlers),
        lambda value: setattr(logging.root, "handlers", list(value)),
        ((), ()),
    ),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": _attribute(
        _CUDA.matmul, "allow_fp16_reduced_precision_reduction", True, False
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": _attribute(
        _CUDA.matmul, "allow_bf16_reduced_precision_reduction", True, False
    ),
    "torch.backends.mkldnn.enabled": _attribute(torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled),
    "torch.backends.opt_einsum.enabled": _attribute(
        torch.backends.opt_einsum, "enabled", torch.backends.opt_einsum.enabled
    ),
    "torch.utils.deterministic.fill_uninitialized_memory": _attribute(
        torch.utils.deterministic, "fill_uninitialized_memory", True, False
    ),
    "torch.nn.functional.scaled_dot_product_attention": _attribute(
        torch.nn.functional, "scaled_dot_product_attention", torch.nn.functional.scaled_dot_product_attention
    ),
    **{f"torch.is_autocast_enabled({kind!r})": _autocast(kind) for kind in ("cpu", "cuda")},
    **{f"torch.get_autocast_dtype({kind!r})": _autocast_dtype(kind) for kind in ("cpu", "cuda")},
    "torch.backends.cudnn.enabled": _attribute(_CUDNN, "enabled", True),
    "torch.backends.cudnn.benchmark": _attribute(_CUDNN, "benchmark", False, True),
    "torch.backends.cudnn.deterministic": _attribute(_CUDNN, "deterministic", False, True),
    "torch.backends.cudnn.allow_tf32": _attribute(_CUDNN, "allow_tf32", True, False),
}
"""Name to getter, setter, and the two values to test with; equal if another value would change results."""
_HOLDERS = (torch.Tensor, torch.nn.functional)
_PRECISION = "torch.get_float32_matmul_precision()"
_READ_OFTEN = (
    "torch.get_default_dtype()",
    _PRECISION,
    "torch.get_num_threads()",
    "torch.are_deterministic_algorithms_enabled()",
    "gc.isenabled()",
)
"""Those that take little time to read."""
_variables: dict[str, str | None] = {}
"""Environment variables that calls have changed, and their previous values."""


def _kept(read: Callable[[], Any], write: Callable[[Any], Any]) -> Setting:
    """A setting of which another value would change results, or what others see: it is left as it is."""
    return read, lambda value: None if read() == value else write(value), (read(), read())


def _set_locale(value: str) -> None:
    locale.setlocale(locale.LC_ALL, value)


def _umask() -> int:
    before = os.umask(0o022)
    os.umask(before)
    return before


_DIRECTORIES = os.path.realpath(tempfile.gettempdir()), os.path.realpath(os.sep)
_PROCESS: dict[str, Setting] = {
    "os.getcwd()": (os.getcwd, os.chdir, _DIRECTORIES),
    "the mask of os.umask()": (_umask, os.umask, (0o022, 0o027)),
    "sys.path": (
        lambda: tuple(sys.path),
        functools.partial(sys.path.__setitem__, slice(None)),
        (tuple(sys.path), (*tuple(sys.path), "/conformance")),
    ),
    "sys.getswitchinterval()": (sys.getswitchinterval, sys.setswitchinterval, (0.004, 0.006)),
    "gc.get_threshold()": (gc.get_threshold, lambda value: gc.set_threshold(*value), ((700, 10, 10), (800, 11, 11))),
    "multiprocessing.get_start_method()": (
        functools.partial(multiprocessing.get_start_method, allow_none=True),
        functools.partial(multiprocessing.set_start_method, force=True),
        ("spawn", None),
    ),
    "torch.autograd.set_multithreading_enabled()": (
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
        (True, False),
    ),
    "logging.disable()": (lambda: logging.root.manager.disable, logging.disable, (logging.NOTSET, logging.INFO)),
    "warnings.showwarning": _attribute(warnings, "showwarning", warnings.showwarning),
    "sys.excepthook": _attribute(sys, "excepthook", sys.excepthook),
    "threading.excepthook": _attribute(threading, "excepthook", threading.excepthook),
    "torch.is_warn_always_enabled()": (torch.is_warn_always_enabled, torch.set_warn_always, (False, False)),
    "torch.get_default_device()": _kept(torch.get_default_device, torch.set_default_device),
    "torch.multiprocessing.get_sharing_strategy()": _kept(
        torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy
    ),
    "socket.getdefaulttimeout()": (socket.getdefaulttimeout, socket.setdefaulttimeout, (60.0, None)),
    "locale.setlocale()": _kept(functools.partial(locale.setlocale, locale.LC_ALL), _set_locale),
    "decimal.getcontext().prec": (
        lambda: decimal.getcontext().prec,
        lambda value: setattr(decimal.getcontext(), "prec", value),
        (28, 30),
    ),
}
"""The same for the process; loading a library may change them, so a first call may."""
if hasattr(sys, "setdlopenflags"):
    _PROCESS["sys.getdlopenflags()"] = _kept(sys.getdlopenflags, sys.setdlopenflags)
if hasattr(os, "sched_setaffinity"):
    _CPUS = os.sched_getaffinity(0)
    _PROCESS["os.sched_getaffinity(0)"] = (
        functools.partial(os.sched_getaffinity, 0),
        functools.partial(os.sched_setaffinity, 0),
        (_CPUS, {min(_CPUS)}),
    )


def _loaded() -> dict[str, Setting]:
    """Those of the process, and of packages that only some processes have loaded."""
    found = dict(_PROCESS)
    is_main = threading.current_thread() is threading.main_thread()  # others may not
    for number, usual in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if is_main and signal.getsignal(number) is not None:
            write, values = functools.partial(signal.signal, number), (usual, signal.SIG_IGN)
            found[f"signal.getsignal({number.name})"] = functools.partial(signal.getsignal, number), write, values
    if (numpy := sys.modules.get("numpy")) is not None:
        of_errors = numpy.geterr() | {"under": "warn"}, numpy.geterr() | {"under": "ignore"}
        found["numpy.get_printoptions()['precision']"] = (
            lambda: numpy.get_printoptions()["precision"],
            lambda value: numpy.set_printoptions(precision=value),
            (7, 9),
        )
        found["numpy.geterr()"] = numpy.geterr, lambda value: numpy.seterr(**value), of_errors
    if (config := sys.modules.get("torch._dynamo.config")) is not None:
        found["torch._dynamo.config.suppress_errors"] = _attribute(config, "suppress_errors", False)
        found["torch._dynamo.config.recompile_limit"] = _attribute(config, "recompile_limit", 9, 10)
    return found


@contextmanager
def settings_restored() -> Iterator[None]:
    """Restore every setting and variable at the end of the block."""
    settings = _SETTINGS | _loaded()
    before, variables = {name: read() for name, (read, _, _) in settings.items()}, environment.variables()
    try:
        yield
    finally:
        for name, (_, write, _) in settings.items():
            write(before[name])
        for name in {**variables, **environment.variables()}:
            environment.assign(name, variables.get(name))


@contextmanager
def changed_variables(names: Iterable[str], value: str | None) -> Iterator[None]:
    """Set environment variables, or remove them with None, within the block."""
    before = environment.variables()
    for name in names:
        environment.assign(name, value)
    try:
        yield
    finally:
        for name in names:
            environment.assign(name, before.get(name))


@contextmanager
def unusual_settings() -> Iterator[None]:
    """Set every setting to its second value within the block, except the float32 precision, which changes results."""
    with settings_restored():
        for name, (_, write, values) in (_SETTINGS | _loaded()).items():
            if name != _PRECISION:
                write(values[1])
        yield


@contextmanager
def settings_kept() -> Iterator[None]:
    """Fail when the block changes a setting. A variable that it changes is noted, for ``check_settings_are_kept``."""
    before = {name: read() for name, (read, _, _) in _SETTINGS.items()}
    variables, functions = environment.variables(), [dict(vars(holder)) for holder in _HOLDERS]
    yield
    for holder, attributes in zip(_HOLDERS, functions, strict=True):
        _check_not_replaced(holder, attributes)
    for name, (read, _, _) in _SETTINGS.items():
        if (now := read()) != before[name]:
            _fail_of(name, before[name], now)
    if (now := environment.variables()) != variables:
        changed = {name for name in {*variables, *now} if variables.get(name) != now.get(name)}
        _variables.update((name, variables.get(name)) for name in changed if name not in _variables)


def _check_not_replaced(holder: Any, before: dict[str, Any]) -> None:
    """Fail where an attribute of PyTorch is another one than before, which is restored; libraries add some."""
    now = dict(vars(holder))
    if now == before:
        return
    for name in [name for name, value in before.items() if now.get(name) is not value]:
        setattr(holder, name, before[name])
        fail(f"{name} of {holder.__name__} was replaced during the call; others call it too")


def read_often() -> dict[str, Any]:
    """Settings that may be looked at before each operator: another thread sees them changed even for a while."""
    return {name: _SETTINGS[name][0]() for name in _READ_OFTEN} | {"torch.initial_seed()": torch.initial_seed()}


def check_read_often(before: dict[str, Any]) -> None:
    """Fail if one of them is no longer what it was."""
    for name, now in read_often().items():
        if now != before[name]:
            fail(f"{name} is {now} during the call and was {before[name]} before; other threads see it")


def _fail_of(name: str, before: object, now: object) -> None:
    fail(f"{name} was {before} before the call and is {now} after it; a backend must not change it")


def check_settings_are_kept(run: Callable[[], object]) -> None:
    """Fail unless each has after ``run`` the value that it had before; it prints nothing either.

    The filters of warnings are one more. A variable that an earlier call changed may be the doing of a library that was
    loaded by it, and is loaded once: the variable is what it was before that call, and the next one leaves it alone.
    """
    for index in range(2):
        with warnings.catch_warnings(), settings_restored():
            settings = _SETTINGS | _loaded()
            for _, write, values in settings.values():
                write(values[index])
            for name, value in _variables.items():
                environment.assign(name, value)
            variables = environment.variables()
            warnings.resetwarnings()
            warnings.filterwarnings("ignore", message=".*")
            filters = list(warnings.filters)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                run()
            if printed.getvalue():
                fail(f"the call prints {printed.getvalue()[:80]!r}; a backend must not write to stdout or stderr")
            for name, (read, _, values) in settings.items():
                if (now := read()) != values[index]:
                    _fail_of(name, values[index], now)
            if warnings.filters != filters:
                fail("the call changed the warning filters; a backend must not change them")
            after = environment.variables()
            for name in sorted({*variables, *after}):
                if variables.get(name) != after.get(name):
                    _fail_of(f"the environment variable {name}", variables.get(name), after.get(name))
