"""What mla_decode_attention accepts, how it shares out keys, and how it behaves under autograd and torch.compile."""

import functools
from collections.abc import Callable

import pytest
import torch
from torch.utils._pytree import tree_map

import mla_plugin
from mla_plugin import DecodeTensors
from mla_plugin.arguments import decode_checks, decode_layout
from mla_plugin.kernels import launch as kernels_launch
from mla_plugin.kernels import mla_decode_attention, tiles
from mla_plugin.kernels.decode import launch as decode_launch
from mla_plugin.kernels.decode import tiles as decode_tiles
from mla_plugin.kernels.decode.invariant import launch as invariant
from tests.kernels.decode_cases import DEVICE, Inputs, contiguous, paged
from tests.plugins.test_host_time import calls_of

SHAPE = (2, 2, 4, 64, 16, 70)


def arguments(inputs: Inputs) -> dict[str, object]:
    names = ("q_nope_abs", "q_rope", "c_kv", "k_rope")
    return dict(zip(names, inputs.tensors(), strict=True)) | inputs.options()


def spoil(name: str, change: Callable[[torch.Tensor], object]) -> Callable[[dict[str, object]], None]:
    def apply(given: dict[str, object]) -> None:
        given[name] = change(given[name])  # type: ignore[arg-type]

    return apply


WRONG = {
    "rank of q": (spoil("q_nope_abs", lambda x: x[0]), ValueError, r"q_nope_abs .*3 dimensions.*\[B, S_q, H, R\]"),
    "rank of cache": (spoil("c_kv", lambda x: x[0]), ValueError, r"c_kv .*2 dimensions.*\[pages, page_size, R\]"),
    "heads": (spoil("q_rope", lambda x: x[:, :, :3]), ValueError, r"q_rope \[2, 2, 3, 16\] differ in \[B, S_q, H\]"),
    "tokens": (spoil("k_rope", lambda x: x[:, 1:]), ValueError, "one row per token"),
    "B": (
        lambda given: given.update(c_kv=given["c_kv"][:1], k_rope=given["k_rope"][:1]),
        ValueError,
        r"c_kv \[1, 70, 64\] has 1 sequences, q_nope_abs \[2, 2, 4, 64\] has 2",
    ),
    "R": (spoil("c_kv", lambda x: x[..., :32]), ValueError, "R=64, c_kv has R=32.*W_UK"),
    "Dr": (spoil("k_rope", lambda x: x[..., :8]), ValueError, "Dr=16, k_rope has Dr=8.*qk_rope_head_dim"),
    "dtype": (spoil("k_rope", lambda x: x.float()), TypeError, "k_rope torch.float32.*bfloat16, float16, float32"),
    "integers": (spoil("q_nope_abs", lambda x: x.int()), TypeError, "q_nope_abs torch.int32"),
    "last stride": (
        spoil("c_kv", lambda x: x.mT.contiguous().mT),
        ValueError,
        r"c_kv has stride \d+.*c_kv.contiguous\(\)",
    ),
    "device": (spoil("q_rope", lambda x: x.to("meta")), ValueError, "q_rope on meta.*one device"),
    "scale": (spoil("softmax_scale", lambda x: -1.0), ValueError, "softmax_scale=-1.0.*positive"),
    "infinite scale": (spoil("softmax_scale", lambda x: float("inf")), ValueError, "softmax_scale=inf.*positive"),
    "no number": (spoil("softmax_scale", lambda x: float("nan")), ValueError, "softmax_scale=nan.*positive"),
    "text for a scale": (spoil("softmax_scale", str), TypeError, "softmax_scale=.* is str"),
    "no scale": (spoil("softmax_scale", lambda x: None), TypeError, "softmax_scale=.* is NoneType"),
    "a scale with a gradient": (
        spoil("softmax_scale", lambda x: torch.tensor(x, requires_grad=True)),
        TypeError,
        r"softmax_scale is a torch.Tensor.*no gradient.*float\(softmax_scale\)",
    ),
    "a number for causal": (
        lambda given: given.update(is_causal=1),
        TypeError,
        "is_causal=1 is int; expected True or False",
    ),
    "None for return_lse": (lambda given: given.update(return_lse=None), TypeError, "return_lse=None is NoneType"),
    "numpy": (
        spoil("q_nope_abs", lambda x: x.cpu().numpy()),
        TypeError,
        "q_nope_abs is ndarray; expected a torch.Tensor",
    ),
    "a list of lengths": (
        spoil("seqlens_kv", lambda x: [70, 9]),
        TypeError,
        "seqlens_kv is list; expected a torch.Tensor",
    ),
    "sparse": (spoil("k_rope", lambda x: x.to_sparse()), TypeError, "k_rope has the memory layout torch.sparse_coo"),
    "nested": (
        spoil("c_kv", lambda x: torch.nested.nested_tensor(list(x))),
        TypeError,
        "c_kv is a nested tensor.*padded or packed",
    ),
    "float64": (
        lambda given: given.update({name: given[name].double() for name in ("q_nope_abs", "q_rope", "c_kv", "k_rope")}),
        TypeError,
        "q_nope_abs torch.float64.*one of bfloat16, float16, float32",
    ),
    "stride of the queries": (
        spoil("q_nope_abs", lambda x: x.mT.contiguous().mT),
        ValueError,
        r"q_nope_abs has stride 4.*q_nope_abs.contiguous\(\)",
    ),
    "lengths of another batch": (
        spoil("seqlens_kv", lambda x: torch.ones(3, dtype=torch.int32, device=DEVICE)),
        ValueError,
        r"seqlens_kv has shape \[3\].*B=2",
    ),
    "lengths in int64": (
        spoil("seqlens_kv", lambda x: torch.ones(2, dtype=torch.int64, device=DEVICE)),
        TypeError,
        r"seqlens_kv has dtype torch.int64.*seqlens_kv.to\(torch.int32\)",
    ),
    "padding of another batch": (
        spoil("leftpad_kv", lambda x: torch.ones(3, dtype=torch.int32, device=DEVICE)),
        ValueError,
        r"leftpad_kv has shape \[3\].*B=2",
    ),
    "too wide": (
        lambda given: given.update(arguments(contiguous((1, 1, 2, 640, 0, 4), torch.float16))),
        ValueError,
        "640 columns.*at most 576",
    ),
}


@pytest.mark.parametrize(("apply", "error", "message"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(
    apply: Callable[[dict[str, object]], None], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(contiguous(SHAPE, torch.float16))
    mla_decode_attention(**given)
    monkeypatch.setattr(decode_launch.Launch, "__call__", lambda *_, **__: pytest.fail("launched"))
    apply(given)
    with pytest.raises(error, match=message):
        mla_decode_attention(**given)


WRONG_PAGES = {
    "other batch": (spoil("page_table", lambda x: x[:1]), ValueError, r"page_table has shape \[1, \d+\].*B=2"),
    "one dimension": (spoil("page_table", lambda x: x[0]), ValueError, r"page_table has shape \[\d+\].*\[B, n\]"),
    "int64": (spoil("page_table", lambda x: x.long()), TypeError, r"page_table has dtype torch.int64.*int32"),
    "stride": (spoil("page_table", lambda x: x.mT.contiguous().mT), ValueError, "page_table has stride 2"),
    "no lengths": (spoil("seqlens_kv", lambda x: None), ValueError, "page_table without seqlens_kv"),
    "no table": (spoil("page_table", lambda x: None), ValueError, r"c_kv \[13, 16, 64\] has 13 sequences.*page_table"),
    "page size 0": (
        lambda given: given.update(c_kv=given["c_kv"][:, :0], k_rope=given["k_rope"][:, :0]),
        ValueError,
        "page_size 0",
    ),
}


@pytest.mark.parametrize(("apply", "error", "message"), WRONG_PAGES.values(), ids=WRONG_PAGES)
def test_wrong_page_tables(
    apply: Callable[[dict[str, object]], None], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = arguments(paged(SHAPE, 16, torch.float16, [70, 9]))
    mla_decode_attention(**given)
    monkeypatch.setattr(decode_launch.Launch, "__call__", lambda *_, **__: pytest.fail("launched"))
    apply(given)
    with pytest.raises(error, match=message):
        mla_decode_attention(**given)


@pytest.fixture
def values_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU they always are."""
    monkeypatch.setenv("MLA_PLUGIN_CHECK", "1")


@pytest.mark.usefixtures("values_are_read")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": 13}, r"page_table\[0\] begins with .*13.*; the cache has pages 0 to 12"),
        ({"page_table": -1}, r"page_table\[0\] begins with .*-1.*; the cache has pages 0 to 12"),
        ({"seqlens_kv": 7 * 16 + 1}, r"seqlens_kv=\[113, 9\]; the cache has room for 0 to 112 keys"),
        ({"seqlens_kv": -1}, r"seqlens_kv=\[-1, 9\]; the cache has room"),
    ],
)
def test_values_that_are_wrong(changes: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages outside of the cache and lengths beyond it, after a right call of the same layout."""
    inputs = paged(SHAPE, 16, torch.float16, [70, 9])
    given = arguments(inputs)
    mla_decode_attention(**given)
    monkeypatch.setattr(decode_launch.Launch, "__call__", lambda *_, **__: pytest.fail("launched"))
    for name, value in changes.items():
        given[name] = given[name].clone()  # type: ignore[attr-defined]
        given[name].view(-1)[0] = value  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        mla_decode_attention(**given)
    operands = (*inputs.tensors(), inputs.softmax_scale, False, given["page_table"], given["seqlens_kv"], None)
    with pytest.raises(ValueError, match=message):
        torch.ops.mla_plugin_kernels.decode_attention(*operands)


@pytest.mark.usefixtures("values_are_read")
def test_lengths_beyond_a_contiguous_cache() -> None:
    given = arguments(contiguous(SHAPE, torch.float16, [70, 9]))
    given["seqlens_kv"] = torch.tensor([70, 71], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"seqlens_kv=\[70, 71\]; the cache has room for 0 to 70 keys"):
        mla_decode_attention(**given)


def test_softmax_scale_has_no_default() -> None:
    with pytest.raises(TypeError, match="softmax_scale"):
        mla_decode_attention(*contiguous(SHAPE, torch.float16).tensors())


def test_without_lse_only_out_returns() -> None:
    inputs = contiguous(SHAPE, torch.float16)
    out = mla_decode_attention(*inputs.tensors(), **inputs.options())
    both = mla_decode_attention(*inputs.tensors(), return_lse=True, **inputs.options())
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, both[0])


@pytest.mark.parametrize("name", ["q_nope_abs", "q_rope", "c_kv", "k_rope"])
def test_gradients_are_refused_not_dropped(name: str) -> None:
    given = arguments(contiguous(SHAPE, torch.float32))
    given[name] = given[name].detach().requires_grad_()  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="decode has no derivative"):
        mla_decode_attention(**given)
    with torch.no_grad():
        assert not mla_decode_attention(**given).requires_grad


@pytest.mark.parametrize("page_size", [0, 16])
def test_compiled_equals_eager(page_size: int) -> None:
    def step(
        q_nope_abs: torch.Tensor, q_rope: torch.Tensor, c_kv: torch.Tensor, k_rope: torch.Tensor, **options: object
    ) -> torch.Tensor:
        out, lse = mla_decode_attention(q_nope_abs * 2, q_rope, c_kv, k_rope, return_lse=True, **options)
        return out.float().sin() + lse.mT[..., None]

    compiled = torch.compile(step, fullgraph=True, dynamic=True)
    for seqlen_kv in (33, 34):
        shape = (*SHAPE[:-1], seqlen_kv)
        in_pages = paged(shape, page_size or 1, torch.float16, [33, 1])
        inputs = in_pages if page_size else contiguous(shape, torch.float16)
        options = inputs.options() | {"is_causal": True}
        torch.testing.assert_close(compiled(*inputs.tensors(), **options), step(*inputs.tensors(), **options))


def test_errors_reach_a_compiled_caller() -> None:
    given = arguments(contiguous(SHAPE, torch.float16))
    given["k_rope"] = given["k_rope"][..., :8]  # type: ignore[index]
    with pytest.raises(Exception, match="k_rope has Dr=8"):
        torch.compile(mla_decode_attention, fullgraph=True)(**given)


@pytest.mark.parametrize("page_size", [0, 16])
def test_the_operator_is_well_formed(page_size: int) -> None:
    inputs = contiguous(SHAPE, torch.float32)
    if page_size:
        inputs = paged(SHAPE, page_size, torch.float32, [70, 9])
    arguments = (*inputs.tensors(), inputs.softmax_scale, True, inputs.page_table, inputs.seqlens_kv, None)
    torch.library.opcheck(torch.ops.mla_plugin_kernels.decode_attention.default, arguments)


def test_a_fake_tensor_goes_through_the_operator() -> None:
    """Outside of torch.compile too: no kernel sees a tensor without memory."""
    with torch._subclasses.FakeTensorMode():
        q_nope_abs, cache = torch.empty(2, 1, 4, 64), torch.empty(2, 70, 80)
        out = mla_decode_attention(
            q_nope_abs, torch.empty(2, 1, 4, 16), cache[..., :64], cache[..., 64:], softmax_scale=0.1
        )
    assert isinstance(out, torch._subclasses.FakeTensor)
    assert out.shape == (2, 1, 4, 64)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own; operators compute on the tensor that it holds."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Wrapper":
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        def plain(x: object) -> object:
            return x.held if isinstance(x, Wrapper) else x

        return function(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@pytest.mark.parametrize("other", [torch._neg_view, Wrapper], ids=["negated view", "subclass"])
@pytest.mark.parametrize("name", ["q_nope_abs", "q_rope", "c_kv", "k_rope"])
@pytest.mark.parametrize("backend", ["triton", "sdpa"])
def test_one_tensor_whose_memory_does_not_hold_its_values(
    backend: str, name: str, other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Also after a call of the same layout. ``x.conj().imag`` is a negated view."""
    given = arguments(contiguous(SHAPE, torch.float32))
    changed = given | {name: other(given[name])}

    def results(given: dict[str, object]) -> list[torch.Tensor]:
        q_nope_abs, q_rope, c_kv, k_rope, scale = list(given.values())[:5]
        found = [mla_plugin.decode(q_nope_abs, q_rope, (c_kv, k_rope), softmax_scale=scale, backend=backend)]
        return found + [mla_decode_attention(**given)] * (backend == "triton")

    results(given)
    wanted = results(given | {name: changed[name].clone()})
    assert all(torch.equal(x, y) for x, y in zip(results(changed), wanted, strict=True))


class Recorder:
    """A kernel that notes how it is launched, as Triton's two launchers would be called."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel: object) -> None:
        self.arg_names = kernel.arg_names
        self.launches: list[tuple[str, tuple[object, ...]]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., object]:
        def launch(*arguments: object, **options: int) -> object:
            self.launches.append(("first" if options else "again", arguments))
            return self

        return launch

    def run(self, *arguments: object) -> None:
        """After the grid, the stream, the function, its metadata, and nothing for profilers."""
        assert arguments[4:9] == ("function", "metadata", None, None, None)
        self.launches.append(("again", arguments[9:]))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """In the place of the attention kernel, with no kernel after it, which would read its results."""
    found = Recorder(decode_launch.decode_kernel)
    monkeypatch.setattr(decode_launch, "decode_kernel", found)
    monkeypatch.setattr(decode_launch, "choose_parts", lambda *_: 1)
    monkeypatch.setattr(decode_layout, "_known", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return found


def test_a_call_takes_few_steps_on_the_host(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Function calls are counted, because time differs between machines; on a GPU check_values reads no values."""
    monkeypatch.setattr(decode_checks, "check_values", lambda tensors: None)
    monkeypatch.setattr(kernels_launch, "make_context_current", lambda: None)  # Triton's real launcher does not need it
    inputs = paged(SHAPE, 16, torch.float16, [70, 9])
    q_nope_abs, q_rope, *cache = inputs.tensors()
    names = ("softmax_scale", "page_table", "seqlens_kv")
    options = {name: value for name, value in inputs.options().items() if name in names}
    found = calls_of(lambda: mla_plugin.decode(q_nope_abs, q_rope, tuple(cache), backend="triton", **options))
    assert [kind for kind, _ in recorder.launches] == ["first", *["again"] * 3]
    assert found <= 108, found


def test_a_compiled_kernel_is_launched_directly_from_the_second_call(recorder: Recorder) -> None:
    """With the same arguments in the same places; an odd address goes through Triton's own look every time."""
    names = recorder.arg_names
    inputs = contiguous(SHAPE, torch.float16)
    for scale in (1, 0.5, 2):
        mla_decode_attention(*inputs.tensors(), softmax_scale=scale)
    kinds, arguments = zip(*recorder.launches, strict=True)
    assert kinds == ("first", "again", "again")
    assert {len(given) for given in arguments} == {len(names)}
    # a whole number would be compiled in as a constant
    scales = [given[names.index("softmax_scale")] for given in arguments]
    assert scales == [1.0, 0.5, 2.0]
    assert all(isinstance(scale, float) for scale in scales)
    recorder.launches.clear()
    buffer = torch.zeros(2 * 70 * 80 + 1, dtype=torch.float16, device=DEVICE)[1:].view(2, 70, 80)
    for _ in range(2):
        mla_decode_attention(*inputs.tensors()[:2], buffer[..., :64], buffer[..., 64:], **inputs.options())
    assert [kind for kind, _ in recorder.launches] == ["first", "first"]


@pytest.mark.parametrize("row_tiles", [0, 1, 2, 7, 132, 1000])
def test_programs_are_as_many_as_run_at_a_time(row_tiles: int) -> None:
    parts = decode_launch.choose_parts(row_tiles, 132)
    assert parts >= 1
    assert parts == 1 or parts * max(row_tiles, 1) <= 132 < (parts + 1) * max(row_tiles, 1)


def test_more_tiles_than_the_plan_can_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts in 32 bits. A cache of one row, as wide as it takes through its strides, costs no memory."""
    monkeypatch.setattr(decode_launch.Launch, "__call__", lambda *_, **__: pytest.fail("launched"))
    monkeypatch.setattr(decode_layout, "_known", {})
    batch, page_size = 2**15, 2**22
    cache = torch.zeros(1, 1, 80, dtype=torch.float16, device=DEVICE).expand(1, page_size, 80)
    with pytest.raises(ValueError, match=r"batch=32768.*4194304 keys.*2\*\*31.*smaller batch"):
        mla_decode_attention(
            *(torch.zeros(batch, 1, 1, width, dtype=torch.float16, device=DEVICE) for width in (64, 16)),
            cache[..., :64],
            cache[..., 64:],
            softmax_scale=0.1,
            page_table=torch.zeros(batch, 1, dtype=torch.int32, device=DEVICE),
            seqlens_kv=torch.ones(batch, dtype=torch.int32, device=DEVICE),
        )


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_rows_than_the_kernels_can_count(batch_invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 32 bits. Queries that are all the same one cost no memory."""
    monkeypatch.setattr(decode_launch.Launch, "__call__", lambda *_, **__: pytest.fail("launched"))
    query = torch.zeros(1, 1, 1, 16, dtype=torch.float16, device=DEVICE).expand(1, 2**26, 32, 16)
    tensors = DecodeTensors(query, query[..., :0], *(query[:, :1, 0, :width] for width in (16, 0)), 0.1)
    make = functools.partial(invariant.make_launches, chunk=128) if batch_invariant else decode_launch.make_launches
    with pytest.raises(ValueError, match=r"67108864 queries of 32 heads.*rows.*fewer queries"):
        make(tensors)


@pytest.mark.parametrize(
    ("capability", "memory", "kind"),
    [
        ((8, 0), 166912, "163 KiB"),
        ((8, 6), 101376, "99 KiB"),
        ((8, 9), 101376, "99 KiB"),
        ((9, 0), 232448, "Hopper"),
        ((10, 0), 232448, "227 KiB"),
        ((10, 3), 232448, "227 KiB"),
        ((12, 0), 101376, "99 KiB"),
    ],
)
def test_gpu_classes(capability: tuple[int, int], memory: int, kind: str) -> None:
    assert tiles.gpu_class(capability, memory) == kind


def test_a_gpu_with_too_little_shared_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="65536 bytes"):
        tiles.gpu_class((7, 5), 65536)


@pytest.mark.parametrize(("rows", "block_m"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (128, 64), (512, 64)])
def test_tiles_hold_the_rows_with_little_padding(rows: int, block_m: int) -> None:
    """Hopper's products are of 64 rows; of a wide cache they are faster than those of 32 even with 17."""
    wide = 64 if block_m == 32 else block_m
    assert decode_tiles.tile_for("Hopper", 2, 576, rows).block_m == wide
    assert decode_tiles.tile_for("Hopper", 2, 320, rows).block_m == block_m
    assert decode_tiles.tile_for("99 KiB", 2, 576, rows).block_m == min(block_m, 32)


@pytest.mark.parametrize(
    ("page_size", "stages"), [(0, 2), (1, 3), (7, 3), (8, 3), (16, 2), (32, 2), (48, 3), (64, 2), (128, 2)]
)
def test_stages_follow_what_a_tile_looks_up(page_size: int, stages: int) -> None:
    """More where every key's page is fetched by itself."""
    assert decode_tiles.stages_for(decode_tiles.tile_for("Hopper", 2, 576, 64), page_size) == stages


@pytest.mark.parametrize(
    ("page_size", "batch", "capacity", "expected"),
    [
        (1, 64, 264 * 32, (64, 3)),
        (48, 64, 264 * 32, (64, 3)),
        (1, 64, 263 * 32, (32, 6)),
        (1, 63, 2**20, (32, 6)),
        (16, 512, 2**20, (32, 6)),
        (0, 512, 2**20, (32, 3)),
    ],
)
def test_large_batches_gather_larger_tiles(
    page_size: int, batch: int, capacity: int, expected: tuple[int, int]
) -> None:
    tile = decode_tiles.for_batch(decode_tiles.tile_for("Hopper", 2, 576, 16), page_size, batch, capacity, 264)
    assert (tile.block_n, decode_tiles.stages_for(tile, page_size)) == expected
    other = decode_tiles.tile_for("99 KiB", 2, 576, 16)
    assert decode_tiles.for_batch(other, page_size, batch, capacity, 264) is other


def test_narrow_caches_take_the_narrow_entry() -> None:
    for kind, itemsize in decode_tiles.DECODE:
        wide = decode_tiles.tile_for(kind, itemsize, 576, 16)
        narrow = decode_tiles.tile_for(kind, itemsize, 80, 16)
        assert narrow.num_stages >= wide.num_stages
