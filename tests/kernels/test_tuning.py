"""Measured tiles: what is tried, what is kept and for whom; the timer is a table of times, except on a GPU."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from mla_plugin.arguments.mask import Band
from mla_plugin.kernels import tiles
from mla_plugin.kernels.prefill import launch_backward as prefill_backward
from mla_plugin.kernels.prefill import launch_forward as prefill
from mla_plugin.kernels.prefill import packing, tuning
from mla_plugin.kernels.prefill.packing import Packing
from mla_plugin.kernels.prefill.tuning import Key, Tuner, candidates
from mla_plugin.kernels.tiles import Tile

STATIC = Tile(64, 64, 8, 2, 255)
BEST = Tile(64, 32, 8, 2, 255)
TILES = sorted({tile for table in tiles.TABLES.values() for rows in table.values() for _, tile in rows}, key=str)
KEY = Key("forward", "bfloat16", 192, 128, True, False, False, 4096, 4096)


class Timer:
    """Runs what it is given once; ``BEST`` is fastest."""

    def __init__(self) -> None:
        self.timed: list[Tile] = []

    def launch(self, tile: Tile) -> None:
        self.timed.append(tile)

    def __call__(self, run: Callable[[], None]) -> float:
        run()
        return 1.0 if self.timed[-1] == BEST else 2.0


@pytest.fixture
def timer() -> Timer:
    return Timer()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "tiles.json"


def test_the_fastest_of_all_candidates_is_taken_and_kept(path: Path, timer: Timer) -> None:
    tuner = Tuner(path, timer)
    for _ in range(3):
        assert tuner.tile(KEY, STATIC, timer.launch) == BEST
    assert timer.timed == list(candidates(STATIC))


def test_a_second_process_does_not_measure_again(path: Path, timer: Timer) -> None:
    Tuner(path, timer).tile(KEY, STATIC, timer.launch)
    second = Timer()
    assert Tuner(path, second).tile(KEY, STATIC, second.launch) == BEST
    assert second.timed == []
    assert Tuner(path, second).tile(KEY._replace(seqlen_q=8192), STATIC, second.launch) == BEST
    assert second.timed == list(candidates(STATIC))


@pytest.mark.parametrize("field", Key._fields)
def test_every_part_of_the_key_matters(field: str, path: Path, timer: Timer) -> None:
    tuner = Tuner(path, timer)
    tuner.tile(KEY, STATIC, timer.launch)
    value = getattr(KEY, field)
    other = not value if isinstance(value, bool) else value * 2
    tuner.tile(KEY._replace(**{field: other}), STATIC, timer.launch)
    assert len(timer.timed) == 2 * len(candidates(STATIC))
    assert len(json.loads(path.read_text())) == 2


def test_what_other_processes_wrote_meanwhile_stays(path: Path, timer: Timer) -> None:
    first, second = Tuner(path, timer), Tuner(path, timer)
    first.tile(KEY, STATIC, timer.launch)
    second.tile(KEY._replace(causal=False), STATIC, timer.launch)
    first.tile(KEY._replace(packed=True), STATIC, timer.launch)
    assert len(json.loads(path.read_text())) == 3
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\x00\xff", '{"a": '])
def test_a_corrupt_file_is_measured_again_and_mended(content: str, path: Path, timer: Timer) -> None:
    path.parent.mkdir()
    path.write_text(content)
    assert Tuner(path, timer).tile(KEY, STATIC, timer.launch) == BEST
    assert list(json.loads(path.read_text()).values()) == [list(BEST)]


def test_bytes_that_are_no_text_are_a_corrupt_file_too(path: Path, timer: Timer) -> None:
    path.parent.mkdir()
    path.write_bytes(b"\xff\xfe\x00")
    assert Tuner(path, timer).tile(KEY, STATIC, timer.launch) == BEST


@pytest.mark.parametrize("entry", [None, 3, [], [1, 2], [16, 16, 4, 1, None], ["a"] * 5, {"block_m": 64}])
def test_an_entry_that_is_no_candidate_is_measured_again(entry: object, path: Path, timer: Timer) -> None:
    Tuner(path, timer).tile(KEY, STATIC, timer.launch)
    (name,) = json.loads(path.read_text())
    path.write_text(json.dumps({name: entry, "other": 1}))
    second = Timer()
    assert Tuner(path, second).tile(KEY, STATIC, second.launch) == BEST
    assert second.timed
    assert json.loads(path.read_text()) == {name: list(BEST), "other": 1}


def test_a_folder_that_cannot_be_written_costs_only_the_next_process(tmp_path: Path, timer: Timer) -> None:
    (tmp_path / "file").write_text("in the way")
    tuner = Tuner(tmp_path / "file" / "tiles.json", timer)
    for _ in range(2):
        assert tuner.tile(KEY, STATIC, timer.launch) == BEST
    assert timer.timed == list(candidates(STATIC))


def test_nothing_is_measured_while_a_graph_is_captured(
    path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    tuner = Tuner(path, timer)
    assert tuner.tile(KEY, STATIC, timer.launch) == STATIC
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuner.tile(KEY, STATIC, timer.launch) == BEST
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tuner.tile(KEY, STATIC, timer.launch) == BEST


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: "x".join(map(str, tile)))
def test_candidates_are_the_tile_and_its_neighbours(tile: Tile) -> None:
    found = candidates(tile)
    assert found[0] == tile
    assert 4 <= len(set(found)) == len(found) <= 8
    for other in found[1:]:
        assert sum(x != y for x, y in zip(tile, other, strict=True)) == 1
        assert 16 <= min(other[:2]) <= max(other[:2]) <= 128
        assert other.num_stages > 1 or other.num_stages == tile.num_stages
        assert other.num_warps in (4, 8)


@pytest.mark.parametrize(
    "failure", [triton.runtime.errors.OutOfResources(9, 1, "shared"), triton.runtime.errors.PTXASError()]
)
def test_a_tile_that_a_gpu_cannot_hold_is_never_the_fastest(
    failure: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def do_bench(run: Callable[[], None], **_: object) -> float:
        run()
        return 1.0

    def fail() -> None:
        raise failure

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    assert tuning.benchmark(lambda: None) == 1.0
    assert tuning.benchmark(fail) == float("inf")
    with pytest.raises(RuntimeError):
        tuning.benchmark(lambda: (_ for _ in ()).throw(RuntimeError("a bug")).__next__())


def test_the_key_of_a_call() -> None:
    q, v = torch.empty(1, 100, 2, 24, dtype=torch.float16), torch.empty(1, 300, 2, 16, dtype=torch.float16)
    assert Key.of("forward", q, v, Packing("bshd", 100, 300, mask=Band(-1, 0, False))) == Key(
        "forward", "float16", 24, 16, True, False, False, 128, 512
    )
    packed = Packing("thd", 128, 129, mask=Band(3, 4, False))
    assert Key.of("backward_q", q, v, packed)[4:] == (True, True, True, 128, 256)
    beyond = Packing("bshd", 100, 300, mask=Band(400, 400, False))
    assert Key.of("forward", q, v, beyond)[4:6] == (False, False)


def cuda_tensor(dtype: torch.dtype) -> SimpleNamespace:
    """Stands for a CUDA tensor [1, 64, 2, 192]."""
    return SimpleNamespace(
        is_cuda=True,
        device=torch.device("cuda", 3),
        dtype=dtype,
        shape=(1, 64, 2, 192),
        element_size=lambda: dtype.itemsize,
    )


@pytest.mark.parametrize(("dtype", "measured"), [(torch.bfloat16, True), (torch.float16, True), (torch.float32, False)])
def test_only_two_byte_calls_on_a_gpu_are_measured(
    dtype: torch.dtype, measured: bool, path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "gpu_class_of", lambda device: "163 KiB")
    monkeypatch.setattr(tuning, "tuner", {torch.device("cuda", 3): Tuner(path, timer)}.__getitem__)
    how = Packing("bshd", 64, 64)
    q = cuda_tensor(dtype)
    static = packing.static_tile("forward", q, q)
    assert tuning.measured_tile("forward", q, q, how, timer.launch) in candidates(static)
    assert timer.timed == (list(candidates(static)) if measured else [])
    on_cpu = torch.empty(1, 64, 2, 192, dtype=dtype)
    count = len(timer.timed)
    assert tuning.measured_tile("forward", on_cpu, on_cpu, how, timer.launch) == static
    assert len(timer.timed) == count


def test_the_file_is_named_after_the_gpu_and_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA A100/80GB {device.index}")
    tuning.tuner.cache_clear()
    name = f"NVIDIA-A100-80GB-1-triton-{triton.__version__}.json"
    first = tuning.tuner(torch.device("cuda", 1))
    assert first.path == tmp_path / "mla_plugin" / name
    assert first is tuning.tuner(torch.device("cuda", 1))
    tuning.tuner.cache_clear()


def passes(dtype: torch.dtype, tuned: bool) -> list[torch.Tensor]:
    """out, lse, dq, dk, dv of a causal call."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, 70, heads, width, generator=generator).to(device, dtype)
        for heads, width in ((4, 24), (2, 24), (2, 16), (4, 16))
    )
    how = Packing("bshd", 70, 70, mask=Band(-1, 0, False))
    out, lse = prefill.forward(q, k, v, 0.2, how, tuned)
    return [out, lse, *prefill_backward.backward(q, k, v, out, lse, dout, None, 0.2, how, tuned)]


def test_what_is_measured_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def measured_tile(
        kernel: str, q: torch.Tensor, v: torch.Tensor, how: Packing, launch: Callable[[Tile], None]
    ) -> Tile:
        for tile in (Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)):
            launch(tile)
        ran.append(kernel)
        return tile

    options = []
    original = packing.launch_options
    for module in (prefill, prefill_backward):
        monkeypatch.setattr(module, "measured_tile", measured_tile)
        monkeypatch.setattr(module, "launch_options", lambda tile: options.append(tile) or original(tile))
    expected = passes(torch.float32, tuned=False)
    assert ran == []
    options.clear()
    for x, y in zip(passes(torch.float32, tuned=True), expected, strict=True):
        torch.testing.assert_close(x, y)
    assert ran == ["forward", "backward_kv", "backward_q"]
    assert set(options) == {Tile(32, 16, 4, 1), Tile(16, 32, 4, 1)}


@pytest.mark.gpu
def test_on_a_gpu_the_measured_tiles_are_right_and_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tuner", functools.partial(lambda kept, device: kept, Tuner(path)))
    for x, y in zip(passes(torch.float16, tuned=True), passes(torch.float16, tuned=False), strict=True):
        torch.testing.assert_close(x, y, rtol=2**-9, atol=2**-9)  # other tiles sum in another order: two roundings
    assert {name.split()[0] for name in json.loads(path.read_text())} == set(tiles.TABLES)
