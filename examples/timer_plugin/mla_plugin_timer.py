"""A plugin of hook wrappers: it is no backend, and counts and times the calls of every backend.

``mla_plugin_timer.report()`` gives what was counted. On a CUDA device the times are the host's: a launch returns before
its kernel ends.
"""

import time
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import mla_plugin as mla

_calls: dict[tuple[str, str], list[float]] = defaultdict(list)


@mla.hookimpl(wrapper=True)
def forward(plan: Any) -> Generator[None, Any, Any]:
    start = time.perf_counter()
    result = yield
    _calls["forward", plan.forward_backend].append(time.perf_counter() - start)
    return result


@mla.hookimpl(wrapper=True)
def backward(plan: Any) -> Generator[None, Any, Any]:
    start = time.perf_counter()
    result = yield
    _calls["backward", plan.backward_backend].append(time.perf_counter() - start)
    return result


def report() -> dict[tuple[str, str], tuple[int, float]]:
    """(hook, backend) to the number of calls and their seconds."""
    return {key: (len(seconds), sum(seconds)) for key, seconds in _calls.items()}
