import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_plugin.variables import VARIABLES
from tests import interpreter, quick

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start; and a test looks whether it stays
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: kernels are tested in its interpreter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-targets",
        action="store_true",
        help="compile the prefill kernels for every head dimension, not for representatives: half an hour",
    )


def _is_quick(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The lane of a minute imports nothing that it leaves out: Megatron-Core alone takes six seconds."""
    return True if _is_quick(config) and quick.is_left_out(collection_path) else None


@pytest.hookimpl(hookwrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Half of all cases are a GPU's: where there is none, one of a function is loaded."""
    is_gpu = metafunc.definition.get_closest_marker("gpu") is not None
    is_one = _is_quick(metafunc.config) or (is_gpu and not torch.cuda.is_available())
    with quick.cases_as_they_are(is_one):
        yield
    if is_one:
        quick.keep_one_call(metafunc)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """On a GPU each test is handed out by itself: many processes share few files."""
    if config.getoption("dist") != "loadgroup" or torch.cuda.is_available():
        return None
    from tests.distribution import ByFile

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """GPU tests are deselected, not skipped, where there is no GPU: a run without one has no skips."""
    quick.mark(items)
    if torch.cuda.is_available():
        from tests.gpu import memory, peers

        on_gpu = [item for item in items if item.get_closest_marker("gpu")]
        peers.skip_without(on_gpu)
        memory.group(on_gpu)
        return
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu:
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of large tensors are not run where the device lacks the memory."""
    interpreter.make_quick()
    if torch.cuda.is_available():
        from tests.gpu import memory

        memory.skip_where_too_small(item)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Their memory is given back."""
    if torch.cuda.is_available():
        from tests.gpu import memory

        memory.give_back(item)


@pytest.fixture(autouse=True)
def _default_dtype_kept() -> Iterator[None]:
    """A test that changes the default dtype fails itself, instead of those that come after it."""
    yield
    left = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    assert left is torch.float32, f"the test left {left} as the default dtype"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see none of the variables that the caller's shell may hold, and one thread."""
    for variable in VARIABLES:
        if variable.owner != "Triton" and variable.name in os.environ:
            monkeypatch.delenv(variable.name)
    torch.set_num_threads(1)


@pytest.fixture
def few_programs_of_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over the chunks of ``batch_invariant`` takes whole rows: faster to interpret, and sizes change no bit."""
    if not torch.cuda.is_available():
        sizes = "mla_plugin.kernels.decode.invariant.launch.combine_sizes"
        monkeypatch.setattr(sizes, lambda *_: (4, 512, 4))
