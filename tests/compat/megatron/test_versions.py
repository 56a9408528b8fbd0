"""The adapter's tests once more on the other supported versions of Megatron-Core, and the end before the oldest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compat.megatron import versions

HERE = Path(__file__).parent
LAYERS = ("test_layers", "test_specs", "test_attention_backend")  # what Megatron's own layers and models go through
HYBRID = (*LAYERS, "inside_hybrid")
MODULES = {
    "0.17.1": LAYERS,
    "0.18.2": HYBRID,
    "0.19.2": (*HYBRID, "inside_hybrid_dense", "test_core_attention", "test_max_logits"),
}


@pytest.mark.parametrize("version", MODULES)
def test_a_newer_megatron(version):
    code = "import triton, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:warnings", "--no-header", "--tb=short"]
    options += ["-o", "markers=xdist_group(name)", "--deselect", f"{HERE}/test_layers.py::test_the_example"]
    run = versions.run(version, code, *options, *(f"{HERE}/{module}.py" for module in MODULES[version]))
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert "skipped" not in run.stdout.splitlines()[-1]


def test_an_older_megatron_is_refused_at_once():
    """By every way in, and before anything is built."""
    entries = [
        "import mla_plugin; mla_plugin.register('megatron')",
        "from mla_plugin.compat.megatron import mla_gpt_layer_spec",
        "from mla_plugin.compat.megatron.specs import with_core_attention",
        "from mla_plugin.compat.megatron.core_attention import MLACoreAttention",
    ]
    code = f"""
for entry in {entries}:
    try:
        exec(entry)
    except ImportError as error:
        print(error)
"""
    run = versions.run("0.15.3", code)
    message = "megatron-core 0.15.3 is installed, mla_plugin needs >= 0.16: pip install --upgrade megatron-core"
    assert run.stdout.splitlines() == [message] * len(entries), run.stderr
