"""What warm-up notes is loaded when CUDA starts; without the note nothing is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch

from mla_plugin import environment, preparation
from mla_plugin.cli import main, warm_up
from mla_plugin.preparation import Needs
from tests.repository.project import ROOT

CALL = """
import sys, torch, mla_plugin
from mla_plugin import preparation
before = set(sys.modules)
q = torch.zeros(1, 4, 1, 24, requires_grad=True)
out = mla_plugin.attention(q, q, q)
torch.autograd.grad(out, q, torch.zeros_like(out))
"""
TARGET = """
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
class Driver:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
driver.set_active(Driver())
"""
"""Triton's driver without a GPU."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def fresh_python(code: str) -> str:
    """What the code prints in a new process, where Triton compiles."""
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env={**environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def written(content: object) -> None:
    preparation.note_path().write_text(content if isinstance(content, str) else json.dumps(content))


def test_what_the_calls_imported_is_imported_again() -> None:
    fresh_python(f"{CALL}\npreparation.note(before)")
    modules = preparation.noted().modules
    assert {"mla_plugin.plugins.sdpa", "torch.fx.experimental.symbolic_shapes"} <= set(modules)
    assert {name.partition(".")[0] for name in modules} <= set(preparation.PACKAGES)
    code = "import sys, torch, mla_plugin; from mla_plugin import preparation; preparation.load()\n"
    assert fresh_python(f"{code}print([name for name in {modules} if name not in sys.modules])") == "[]\n"


def test_a_noted_call_imports_nothing_more() -> None:
    fresh_python(f"{CALL}\npreparation.note(before)")
    start = "import torch, mla_plugin; from mla_plugin import preparation; preparation.load()"
    new = fresh_python(f"{start}\n{CALL}\nprint(sorted(name for name in sys.modules if name not in before))")
    assert [name for name in eval(new) if name.partition(".")[0] in preparation.PACKAGES] == []


def test_hashes_are_computed_ahead() -> None:
    """Those of the kernels that the calls looked up, of their helpers, and of Triton."""
    kernels = "mla_plugin.kernels.prefill.forward"
    name = "attention_forward_kernel"
    look_up = f"import importlib\nkernel = importlib.import_module({kernels!r}).{name}"
    start = "import sys, torch, mla_plugin; from mla_plugin import preparation; before = set(sys.modules)"
    fresh_python(f"{start}\n{look_up}\nkernel.cache_key\npreparation.note(before)")
    assert (kernels, name) in preparation.noted().kernels
    after = "from triton.runtime.cache import triton_key\nprint(kernel.hash is None, triton_key.cache_info().currsize)"
    assert fresh_python(f"{start}\n{TARGET}\npreparation.load()\n{look_up}\n{after}") == "False 1\n"
    assert fresh_python(f"{start}\n{TARGET}\n{look_up}\n{after}") == "True 0\n"


def test_without_kernels_triton_is_not_started() -> None:
    written({"modules": ["mla_plugin.plugins.sdpa"], "kernels": []})
    code = "import sys, torch, mla_plugin; from mla_plugin import preparation; preparation.load()\n"
    assert fresh_python(f"{code}print('mla_plugin.plugins.sdpa' in sys.modules, 'triton' in sys.modules)") == (
        "True False\n"
    )


def test_without_a_note_nothing_is_loaded() -> None:
    code = "import sys, torch, mla_plugin; from mla_plugin import preparation; before = set(sys.modules)\n"
    assert fresh_python(f"{code}preparation.load()\nprint(set(sys.modules) - before)") == "set()\n"


@pytest.mark.parametrize("content", ["", "[]", "{", {"modules": ["json"]}, {"modules": 1, "kernels": [[1]]}])
def test_a_broken_note_is_no_note(content: object) -> None:
    written(content)
    assert preparation.noted() == Needs()
    preparation.load()


def test_what_is_gone_is_left_out() -> None:
    written({"modules": ["torch.nowhere", "mla_plugin.resolver"], "kernels": [["mla_plugin.kernels.gone", "kernel"]]})
    preparation.load()
    assert preparation.noted().modules == ("torch.nowhere", "mla_plugin.resolver")


def test_a_second_note_adds_to_the_first() -> None:
    written({"modules": ["torch.nowhere"], "kernels": [["mla_plugin.kernels.gone", "kernel"]]})
    preparation.note(name for name in sys.modules if name != "mla_plugin.preparation")
    found = preparation.noted()
    assert found.modules == ("torch.nowhere", "mla_plugin.preparation")
    assert ("mla_plugin.kernels.gone", "kernel") in found.kernels
    assert os.listdir(preparation.note_path().parent) == [preparation.note_path().name]


@pytest.mark.parametrize(("cuda", "calls"), [("13.0", [preparation.load]), (None, [])])
def test_only_pytorch_for_cuda_is_asked(cuda: str | None, calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[object] = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    preparation.when_cuda_starts()
    assert queued == calls


def test_where_triton_keeps_its_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    knobs = pytest.importorskip("triton.knobs")
    with knobs.cache.scope():
        knobs.cache.reset()  # another test may have set it
        for name, value in (
            ("TRITON_CACHE_DIR", str(tmp_path)),
            ("TRITON_CACHE_DIR", None),
            ("TRITON_HOME", "/somewhere"),
        ):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
            home = os.environ.get("TRITON_HOME")
            expected = knobs.cache.dir if home is None else os.path.join(home, ".triton", "cache")
            assert str(environment.triton_cache()) == expected


def test_warm_up_notes_and_keeps_binaries_alone_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    knobs = pytest.importorskip("triton.knobs")
    binaries: list[bool] = []
    step = ("a call", lambda: binaries.append(knobs.compilation.store_binary_only))
    monkeypatch.setattr(warm_up, "steps", lambda *_: iter([step]))
    assert main(["warm-up", "--device", "cpu"]) == 0
    assert not preparation.note_path().exists()
    monkeypatch.setattr(warm_up.model_shape, "device_of", lambda _: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert main(["warm-up"]) == 0
    assert preparation.note_path().exists()
    assert [*binaries, knobs.compilation.store_binary_only] == [False, True, False]
    assert "1 of 1 calls are warm" in capsys.readouterr().out


def test_parents_are_imported_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an import statement takes the locks of modules, or another thread's import of the package fails."""
    imported: list[str] = []
    monkeypatch.setattr(preparation, "noted", lambda: Needs(("torch.nn.functional",)))
    monkeypatch.setattr(preparation.importlib, "import_module", imported.append)
    preparation.load()
    assert imported == ["torch", "torch.nn", "torch.nn.functional"]


@pytest.mark.parametrize("content", ["[" * 200_000, "{}", '{"modules": 3, "kernels": []}'], ids=["deep", "{}", "3"])
def test_a_note_that_cannot_be_read_is_none(content: str) -> None:
    preparation.note_path().write_text(content)
    assert preparation.noted() == Needs()


def test_many_write_the_note_at_once() -> None:
    with ThreadPoolExecutor(4) as threads:
        written = [threads.submit(preparation.note, ()) for _ in range(40)]
        wait(written, return_when=FIRST_COMPLETED)
        found = [preparation.noted() for _ in range(40)]
        assert all(writer.result() is None for writer in written)
    assert all(needs.modules for needs in found)  # never half a note once there is one
    assert [path.name for path in preparation.note_path().parent.iterdir()] == [preparation.note_path().name]
