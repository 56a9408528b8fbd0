"""Make a folder for PYTHONPATH in which FlashInfer, FlashMLA, FlashAttention 3 and 4 look installed, from loose files.

    python -m benchmarks.peers_site PEERS SITE
    PYTHONPATH=SITE python -m pytest -m gpu tests/plugins/test_decode_gpu.py
    PYTHONPATH=SITE python -m benchmarks.decode_backends

PEERS holds wheels, which are installed without their dependencies, and ``_vllm_fa3_C.abi3.so.xz``, vLLM's build of
FlashAttention 3, for which the folder gets a package ``vllm`` that does nothing but load it. vLLM itself is not needed.
``_flashmla_C.abi3.so`` and ``flash_mla_interface.py`` are vLLM's build of FlashMLA and the functions over it.
``fa4.tar.xz`` holds a folder of FlashAttention 4's wheels, unpacked.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
from pathlib import Path

VLLM_VERSION = "0.25.1"


def install_wheels(peers: Path, site: Path) -> None:
    """Every wheel of the folder."""
    wheels = sorted(map(str, peers.glob("*.whl")))
    if wheels:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade", "--target"]
        subprocess.run([*command, str(site), *wheels], check=True)


def install_flash_attention_3(peers: Path, site: Path) -> None:
    """The operator ``_vllm_fa3_C::fwd`` under the names by which our backend finds it."""
    packed = peers / "_vllm_fa3_C.abi3.so.xz"
    if not packed.exists():
        return
    library = site / "_vllm_fa3_C.abi3.so"
    if not library.exists():
        library.write_bytes(lzma.decompress(packed.read_bytes()))
    package = make_package(site, "vllm", VLLM_VERSION)
    (package / "__init__.py").write_text("")
    (package / "vllm_flash_attn.py").write_text(loading(library))


def install_flash_mla(peers: Path, site: Path) -> None:
    """vLLM's build under the names of DeepSeek's package, whose functions it has."""
    library, interface = peers / "_flashmla_C.abi3.so", peers / "flash_mla_interface.py"
    if not (library.exists() and interface.exists()):
        return
    package = make_package(site, "flash_mla", f"1.0.0+vllm.{VLLM_VERSION}")
    (package / library.name).write_bytes(library.read_bytes())
    (package / "__init__.py").write_text(loading(package / library.name))
    (package / interface.name).write_text(interface.read_text())


def make_package(site: Path, name: str, version: str) -> Path:
    """An empty package of a distribution of the same name."""
    package, information = site / name, site / f"{name}-{version}.dist-info"
    package.mkdir(exist_ok=True)
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return package


def loading(library: Path) -> str:
    """A module that loads operators."""
    return f"import torch\n\ntorch.ops.load_library({str(library)!r})\n"


def install_flash_attention_4(peers: Path, site: Path) -> None:
    """An archive of installed wheels; links do what their ``.pth`` file, without effect here, would do."""
    packed = peers / "fa4.tar.xz"
    if not packed.exists():
        return
    subprocess.run(["tar", "-C", str(site), "--strip-components", "1", "-xf", str(packed)], check=True)
    for package in (site / "nvidia_cutlass_dsl" / "dsl_packages").iterdir():
        link = site / package.name
        if not link.exists():
            link.symlink_to(package)


def main() -> None:
    """Fill the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path)
    parser.add_argument("site", type=Path)
    options = parser.parse_args()
    site = options.site.resolve()
    site.mkdir(parents=True, exist_ok=True)
    install_wheels(options.peers.resolve(), site)
    install_flash_attention_3(options.peers.resolve(), site)
    install_flash_mla(options.peers.resolve(), site)
    install_flash_attention_4(options.peers.resolve(), site)
    print(site)


if __name__ == "__main__":
    main()
