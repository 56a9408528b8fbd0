"""The TransformerEngine adapter inside seven released versions of its Python, each in a separate process."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import mla_plugin
from mla_plugin.compat.transformer_engine.gaps import GAPS, GAPS_OVER_RANKS
from mla_plugin.import_hook import when_imported
from tests.compat import te_host
from tests.repository.project import ROOT


def environ_of(version: str, also: Path = ROOT, **variables: str) -> dict[str, str]:
    """Triton's interpreter, and the checkout and this version of TransformerEngine on Python's path."""
    environ = {
        name: text for name, text in os.environ.items() if not name.startswith(("NVTE_", "MLA_PLUGIN_", "PYTEST"))
    }
    environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TE_VERSION": version}
    environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(te_host.folder_of(version)), str(also)))
    return environ | variables


def run(*command: str, version: str, also: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python in the checkout."""
    environ = environ_of(version, also, **variables)
    return subprocess.run(
        (sys.executable, *command), cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )


def passed_inside(version: str, *arguments: str) -> int:
    """How many tests passed inside one version; nothing failed, nothing was skipped."""
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.compat.te_parts", *arguments)
    done = run(*command, version=version, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")  # none is used: a second saved
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert "skipped" not in summary
    return int(re.match(r"\d+(?= passed)", summary).group())


@pytest.mark.parametrize("version", te_host.VERSIONS)
def test_inside(version: str) -> None:
    assert passed_inside(version, *(f"tests/compat/te_inside{part}.py" for part in ("", "_judged", "_fill"))) > 99


@pytest.mark.parametrize("version", ["2.11.0", "2.15.0"])
def test_the_first_and_the_last_release_that_answer_wrongly(version: str) -> None:
    """About padding between packed sequences, on four devices: alone, and under MLA_PLUGIN_TE=fill."""
    names = "padding_between_sequences_without_us or fills_padding_between_sequences and not end_together"
    assert passed_inside(version, "tests/compat/te_inside_fill.py", "-k", names) == 12


IN_THE_SLOT = """
import json, os, sys, torch, warnings
from tests.compat import te_host, te_other_plugin
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    te = te_host.import_transformer_engine(os.environ["TE_VERSION"])
if "register" in sys.argv:
    import mla_plugin
    mla_plugin.register("transformer_engine")
torch.cuda.is_available, real = (lambda: True), torch.cuda.is_available
mla, plain = (te.DotProductAttention(2, d, qkv_format="bshd", attention_dropout=0.0) for d in ((24, 16), (16, 16)))
torch.cuda.is_available = real
wrapped = te.DotProductAttention.forward.__code__.co_filename.endswith("wrapper.py")
outs = []
for text in ("1", "0"):
    os.environ["NVTE_MLA_TRITON"] = text
    for module, dims in ((mla, (24, 24, 16)), (plain, (16, 16, 16))):
        kind = torch.Tensor if wrapped and text == "1" and module is mla else te_host.OnDevice
        q, k, v = (torch.ones(1, 3, 2, d).as_subclass(kind) for d in dims)
        v = v * torch.arange(3).view(1, 3, 1, 1)
        with te_host.CudaIsCpu():
            outs.append(module(q, k, v).as_subclass(torch.Tensor)[0, -1, 0].item())
print(json.dumps({
    "outs": outs, "runs": len(te_other_plugin.RUNS), "selections": len(te_other_plugin.SELECTIONS),
    "flash": te.FlashAttention.__name__,
    "warnings": [str(w.message) for w in caught if "NVTE_PLUGIN" in str(w.message)],
    "wrapped": wrapped,
}))
"""
OURS, OTHER = "mla_plugin.compat.transformer_engine", "tests.compat.te_other_plugin"


def in_the_slot(*arguments: str, version: str = "2.20.2", **variables: str) -> dict:
    """MLA and other attention, with NVTE_MLA_TRITON=1 and then without; 1.0 is attention, 2.0 the other plugin."""
    done = run("-W", "ignore", "-c", IN_THE_SLOT, *arguments, version=version, NVTE_FUSED_ATTN="0", **variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_nvte_plugin_installs_the_wrapper() -> None:
    found = in_the_slot(NVTE_PLUGIN=OURS)
    assert found["wrapped"]
    assert found["warnings"] == []
    assert found["flash"] == "FlashAttention"
    assert found["outs"] == pytest.approx([1.0] * 4)
    assert found["runs"] == found["selections"] == 0


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [((), {"NVTE_PLUGIN": OURS, "MLA_PLUGIN_NVTE_PLUGIN": OTHER}), (("register",), {"NVTE_PLUGIN": OTHER})],
    ids=["both in the slot", "registered above the slot"],
)
def test_another_plugin_keeps_the_slot(arguments: tuple[str, ...], variables: dict[str, str]) -> None:
    found = in_the_slot(*arguments, **variables)
    assert found["wrapped"]
    assert found["flash"] == "CountingFlashAttention"
    assert found["outs"] == pytest.approx([1.0, 2.0, 2.0, 2.0])
    assert found["runs"] == 3


def test_another_plugin_that_fails_is_reported_by_transformer_engine() -> None:
    found = in_the_slot(NVTE_PLUGIN=OURS, MLA_PLUGIN_NVTE_PLUGIN="no_such_plugin")
    assert not found["wrapped"]
    assert len(found["warnings"]) == 1
    assert "no_such_plugin" in found["warnings"][0]


PROGRAM = """
import json, os, sys
from tests.compat import te_host
first = sys.path[0] if __spec__ is None else ""
before = [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]
te = te_host.import_transformer_engine(os.environ["TE_VERSION"])
wrapped = te.DotProductAttention.forward.__code__.co_filename.endswith("wrapper.py")
print(json.dumps([__name__, sys.argv, first, before, wrapped]))
sys.exit(3)
"""


def test_run_wraps_a_program_that_knows_nothing_of_us(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    script = str(tmp_path / "train.py")
    for program, name, first in ((script, script, str(tmp_path)), ("train", script, "")):
        options = ["-m"] if program == "train" else []
        given = ["--", "--lr", "-m", "-h"]
        done = run("-m", "mla_plugin.run", *options, program, *given, version="2.19.0", also=tmp_path)
        assert done.returncode == 3, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == ["__main__", [name, *given], first, [], True]


def test_run_keeps_a_safe_path(tmp_path: Path) -> None:
    """``python -P`` (Python 3.11) puts no folder in front, so none may be replaced."""
    (tmp_path / "show.py").write_text("import json, sys\nprint(json.dumps(sys.path))\n")
    script = str(tmp_path / "show.py")
    plain, ours = (
        run(*options, script, version="2.19.0", PYTHONSAFEPATH="1") for options in ((), ("-m", "mla_plugin.run"))
    )
    assert json.loads(ours.stdout) == json.loads(plain.stdout), ours.stderr


def test_run_names_what_is_missing() -> None:
    done = run("-m", "mla_plugin.run", "no_such_program.py", version="2.19.0")
    assert done.returncode == 2
    assert "no_such_program.py" in done.stderr
    assert "-m" in done.stderr


def test_register_needs_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"not installed.*pip install"):
        mla_plugin.register("transformer_engine")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    with pytest.raises(ImportError, match=r"2\.9\.0 is installed.*>= 2\.10"):
        mla_plugin.register("transformer_engine")


def test_nothing_is_imported_by_registering() -> None:
    code = (
        "import sys, mla_plugin; handle = mla_plugin.register('transformer_engine'); waiting = len(sys.meta_path); "
        "handle.uninstall(); handle.uninstall(); print(waiting - len(sys.meta_path), handle.host, "
        "[name for name in sys.modules if name.startswith('transformer_engine')])"
    )
    done = run("-c", code, version="2.19.0")
    assert done.stdout.split() == ["1", "transformer_engine", "[]"], done.stderr


def test_an_import_calls_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arriving.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    forget = when_imported("arriving", lambda module: seen.append(module.value))
    forget_too = when_imported("never_arriving", seen.append)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("never_arriving")
    importlib.import_module("arriving")
    assert seen == [1]
    importlib.reload(sys.modules["arriving"])
    assert seen == [1]
    when_imported("arriving", lambda module: seen.append(2))
    assert seen == [1, 2]
    forget()
    forget_too()
    monkeypatch.delitem(sys.modules, "arriving")


def test_a_module_that_another_thread_is_importing_is_waited_for(tmp_path: Path, monkeypatch) -> None:
    gate = SimpleNamespace(started=threading.Event(), opened=threading.Event())
    monkeypatch.setitem(sys.modules, "gate", gate)
    (tmp_path / "arriving_slowly.py").write_text("import gate\ngate.started.set()\ngate.opened.wait(9)\nvalue = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importing = threading.Thread(target=importlib.import_module, args=["arriving_slowly"])
    importing.start()
    assert gate.started.wait(9)
    threading.Timer(0.05, gate.opened.set).start()
    seen = []
    when_imported("arriving_slowly", lambda module: seen.append(module.value))
    importing.join()
    assert seen == [1]
    monkeypatch.delitem(sys.modules, "arriving_slowly")


MEGATRON = """
import json, os, torch
import torch.distributed as dist
from tests.compat import te_host
te = te_host.import_transformer_engine(os.environ["TE_VERSION"])
import mla_plugin
mla_plugin.register("transformer_engine")
from megatron.core import parallel_state
from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from tests.compat.megatron.parts import config, packing
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
torch.cuda.is_available, real = (lambda: True), torch.cuda.is_available
with te_host.CudaIsCpu():
    core = TEDotProductAttention(
        config(params_dtype=torch.float32), 1, AttnMaskType.causal, "self",
        softmax_scale=0.37, k_channels=24, v_channels=16,
    )
torch.cuda.is_available = real
params = packing((4, 5))[0]
lengths = {"cu_seqlens_q": params.cu_seqlens_q, "max_seqlen_q": 5, "max_seqlen_kv": 5}
equal = []
for name, text, shape, packed, options in (
    ("NVTE_MLA_TRITON", "1", (5, 2), {}, {"qkv_format": "sbhd", "backend": "triton"}),
    ("MLA_PLUGIN_TE", "fill", (9,), {"packed_seq_params": params},
     {"qkv_format": "thd", "attn_mask_type": "padding_causal", "backend": "sdpa", **lengths}),
):
    q, k, v = (torch.randn(*shape, 4, dim) for dim in (24, 24, 16))
    os.environ[name] = text
    out = core(q, k, v, None, attn_mask_type=AttnMaskType.causal, **packed)
    equal.append(torch.equal(out, mla_plugin.attention(q, k, v, softmax_scale=0.37, **options).flatten(-2)))
    del os.environ[name]
print(json.dumps(equal))
"""


def test_megatrons_own_subclass() -> None:
    """TEDotProductAttention of Megatron-Core: sbhd under NVTE_MLA_TRITON=1, packed sequences under fill."""
    done = run("-W", "ignore", "-c", MEGATRON, version="2.20.2", NVTE_FUSED_ATTN="0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [True, True]


def test_calls_over_two_ranks_are_filled(tmp_path: Path) -> None:
    """2.14 fails for grouped heads with unequal dimensions, for MLA by a2a, and for padding between sequences."""
    command = (sys.executable, "-W", "ignore", "-m", "tests.compat.te_ranks")
    options = {"cwd": ROOT, "env": environ_of("2.14.1"), "text": True, "stdout": subprocess.PIPE}
    ranks = [
        subprocess.Popen((*command, str(rank), str(tmp_path / "store")), stderr=subprocess.STDOUT, **options)
        for rank in range(2)
    ]
    for done in ranks:
        out, _ = done.communicate(timeout=120)
        assert out.splitlines()[-1] == "filled", out


def test_the_table_of_gaps() -> None:
    for gap in (*GAPS, *GAPS_OVER_RANKS):
        assert "NVIDIA/TransformerEngine" in gap.source
        assert gap.without
    assert all(gap.runs for gap in GAPS)
    assert len({gap.name for gap in GAPS}) == len(GAPS)
    for start in ("padding between packed sequences", "packed causal self-attention"):
        same = [gap for gap in GAPS if gap.name.startswith(start)]
        for version in (*te_host.VERSIONS, "2.11.0", "2.15.0", "2.21.0.dev0"):  # one of them for each release
            assert sum(gap.versions.contains(version, prereleases=True) for gap in same) == 1
