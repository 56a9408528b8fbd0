"""Which kernel computes a forward, and that ``explain`` says it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from mla_plugin import AttentionTensors, Plan, Platform
from mla_plugin.arguments.mask import Band
from mla_plugin.hooks.types import Accepted
from mla_plugin.kernels.hopper import common, latent, rule
from mla_plugin.kernels.prefill import launch_backward, launch_forward
from mla_plugin.kernels.prefill.packing import Kind, Packing
from mla_plugin.plugins import triton
from tests.requests import A100, H100, mla_request

GOOD = {
    "capability": (9, 0),
    "version": "3.6.0",
    "dtype": torch.bfloat16,
    "head_dim_qk": 192,
    "head_dim_v": 128,
}


@pytest.mark.parametrize(
    "change",
    [{}, {"version": "3.7.1"}, {"version": "3.7.0+git"}, {"dtype": torch.float16}]
    + [{"head_dim_qk": qk, "head_dim_v": v} for qk, v in (*rule.TILES, rule.LATENT)]
    + [{"window_left": 100}],
)
def test_what_the_hopper_kernel_takes(change: dict) -> None:
    assert rule.plain_kernel_because(**{**GOOD, **change}) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": None}, "compute capability None, the Hopper kernel needs (9, 0)"),
        ({"capability": (8, 0)}, "compute capability (8, 0), the Hopper kernel needs (9, 0)"),
        ({"capability": (10, 0)}, "compute capability (10, 0), the Hopper kernel needs (9, 0)"),
        ({"version": "3.5.1"}, "Triton 3.5.1, the Hopper kernel needs 3.6 or 3.7"),
        ({"version": "3.60.0"}, "Triton 3.60.0, the Hopper kernel needs 3.6 or 3.7"),
        ({"version": None}, "Triton None, the Hopper kernel needs 3.6 or 3.7"),
        ({"dtype": torch.float32}, "torch.float32, the Hopper kernel needs bfloat16 or float16"),
        ({"head_dim_qk": 256}, "head dimensions 256/128, the Hopper kernel has "),
        ({"batch_invariant": True}, "batch_invariant=True: strides"),
        (
            {"head_dim_qk": 576, "head_dim_v": 512, "window_left": 100},
            "a window with left=100, which the Hopper kernel of 576/512 does not have",
        ),
    ],
)
def test_what_goes_to_the_plain_kernel(change: dict, reason: str) -> None:
    assert rule.plain_kernel_because(**{**GOOD, **change}).startswith(reason)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The rule as on a Hopper GPU with Triton 3.6."""
    monkeypatch.setattr(rule, "_capability", lambda device: (9, 0))
    monkeypatch.setattr("triton.__version__", "3.6.0")
    caches = (rule.plain_kernel_for, rule.plain_dkv_for, rule.plain_dq_for)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def kind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Kind:
    return Kind.of(q, k, v, 0.1, Packing("bshd", q.shape[1], k.shape[1], mask=Band(-1, 0, True)))


def tensors(**changes: torch.Tensor) -> list[torch.Tensor]:
    found = {
        name: torch.zeros(2, 8, 4, width, dtype=torch.bfloat16)
        for name, width in zip("qkv", (192, 192, 128), strict=True)
    }
    return [(found | changes)[name] for name in "qkv"]


def test_tensors_that_can_be_copied_by_tiles(hopper: None) -> None:
    assert rule.plain_kernel_for(kind(*tensors())) is None
    spaced = torch.zeros(2, 8, 4, 200, dtype=torch.bfloat16)[..., :192]
    assert rule.plain_kernel_for(kind(*tensors(q=spaced))) is None
    one_head = torch.zeros(2, 8, 192, dtype=torch.bfloat16).as_strided((2, 8, 1, 192), (1536, 192, 0, 1))
    assert rule.plain_kernel_for(kind(*tensors(q=one_head))) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"v": torch.zeros(2, 8, 1, 128, dtype=torch.bfloat16).expand(2, 8, 4, 128)},
            r"v has strides .*multiples of 8",
        ),
        ({"k": torch.zeros(2, 8, 4, 196, dtype=torch.bfloat16)[..., :192]}, r"k has strides .*multiples of 8"),
        (
            {
                "k": torch.zeros(2, 0, 4, 192, dtype=torch.bfloat16),
                "v": torch.zeros(2, 0, 4, 128, dtype=torch.bfloat16),
            },
            r"k is empty: \(2, 0, 4, 192\)",
        ),
    ],
)
def test_tensors_that_cannot(changes: dict[str, torch.Tensor], reason: str, hopper: None) -> None:
    found = rule.plain_kernel_for(kind(*tensors(**changes)))
    assert found is not None
    assert re.match(reason, found)


def latents() -> tuple[torch.Tensor, torch.Tensor]:
    q, k = (torch.zeros(2, 8, heads, 576, dtype=torch.bfloat16) for heads in (4, 1))
    return q, k


def test_over_latents_v_has_to_lie_in_k(hopper: None) -> None:
    q, k = latents()
    assert rule.plain_kernel_for(kind(q, k, k[..., :512])) is None
    cache = torch.zeros(2, 8, 576, dtype=torch.bfloat16)  # a head of its own for each: strides of 576 and 512
    assert rule.plain_kernel_for(kind(q, cache[:, :, None], cache[..., :512][:, :, None])) is None
    elsewhere = "v is not k[..., :512] in k's memory, as the Hopper kernel of 576/512 needs it"
    for v in (k[..., :512].clone(), k[..., 64:], k.clone()[..., :512], k[:, :, :, :512].contiguous()):
        assert rule.plain_kernel_for(kind(q, k, v)) == elsewhere
    window = Packing("bshd", 8, 8, mask=Band(3, 0, True))
    assert rule.plain_kernel_for(Kind.of(q, k, k[..., :512], 0.1, window)).startswith("a window with left=3")
    none = Packing("bshd", 8, 8, mask=Band(100, 0, True))  # beyond every key
    assert rule.plain_kernel_for(Kind.of(q, k, k[..., :512], 0.1, none)) is None
    for rule_of in (rule.plain_dkv_for, rule.plain_dq_for):
        found = rule_of(kind(q, k, k[..., :512]), q.stride())
        assert found == "the Hopper kernels have no backward for head dimensions 576/512"


def test_the_kernel_over_latents_is_that_of_the_rule() -> None:
    head_dim_qk, head_dim_v = rule.LATENT
    assert head_dim_qk == latent.PANELS.value * common.PANEL.value
    assert head_dim_v == 2 * latent.HALF.value
    assert common.ROWS.value == rule.LATENT_QUERIES


def test_v_stays_in_k_where_rows_are_copied(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that begin anywhere are copied to begin on 16 bytes, k and v together."""
    launched = []
    monkeypatch.setattr(launch_forward, "_hopper", lambda: lambda kind: lambda q, k, v, *_: launched.append((k, v)))
    monkeypatch.setattr(launch_forward, "_forward_launch", None)
    monkeypatch.setattr(launch_forward, "with_aligned_rows", lambda x: x.clone())
    q, k = latents()
    kept: dict = {}
    launch_forward.forward(q, k, k[..., :512], 0.1, Packing("bshd", 8, 8), kept=kept)
    ((copied, v),) = launched
    assert copied.data_ptr() == v.data_ptr() != k.data_ptr()
    assert v.shape[-1] == 512
    assert kept == {}


def test_kept_launches_of_v_in_k_are_not_those_of_v_elsewhere(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(launch_forward, "_hopper", lambda: lambda kind: lambda *given: launched.append("hopper"))
    monkeypatch.setattr(launch_forward, "_forward_launch", lambda kind, tile: lambda *given: launched.append("plain"))
    q, k = latents()
    other, kept = torch.empty_like(k)[..., :512], {}
    for _ in range(2):
        for v in (k[..., :512], other):
            launch_forward.forward(q, k, v, 0.1, Packing("bshd", 8, 8), kept=kept)
    assert launched == ["hopper", "plain"] * 2
    assert len(kept) == 2


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_the_forward_launches_the_kernel_that_the_rule_says(
    is_packed: bool, is_kept: bool, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Hopper kernel writes every row, so nothing is filled for it."""
    calls = []

    def launch(q, k, v, out, lse, *offsets):
        calls.append((tuple(out.shape), tuple(lse.shape), len(offsets)))
        out.fill_(3.0)
        lse.fill_(4.0)

    monkeypatch.setattr(launch_forward, "_hopper", lambda: lambda kind: launch)
    monkeypatch.setattr(launch_forward, "output_like", None)
    if is_packed:
        q, k, v = (torch.zeros(10, 4, width, dtype=torch.bfloat16) for width in (192, 192, 128))
        cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
        packing = Packing("thd", 6, 6, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    else:
        q, k, v = tensors()
        packing = Packing("bshd", 8, 8)
    kept: dict | None = {} if is_kept else None
    for n in range(1, 3):
        out, lse = launch_forward.forward(q, k, v, 0.1, packing, kept=kept)
        assert (out == 3).all()
        assert (lse == 4).all()
        assert calls == [((*q.shape[:-1], 128), packing.layout.lse_shape(q.shape), 4)] * n


def test_bits_that_may_not_depend_on_strides_come_from_the_plain_kernel(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    monkeypatch.setattr(launch_forward, "_hopper", lambda: pytest.fail("the Hopper kernel"))
    monkeypatch.setattr(launch_forward, "_forward_launch", lambda kind, tile: lambda *given: launched.append(kind))
    q, k, v = tensors()
    request = mla_request(dtype=torch.bfloat16, batch_invariant=True, max_seqlen_q=8, max_seqlen_kv=8)
    given = AttentionTensors(q, k, v, 0.1)
    triton.forward(Plan(request, H100, "triton", "triton"), given)
    assert len(launched) == 1


NEEDS = "torch.float32, the Hopper kernel needs bfloat16 or float16"
BACKWARD = "backward by the Hopper kernels"


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize(
    ("platform", "changes", "notes"),
    [
        (H100, {}, ("forward by the Hopper kernel", BACKWARD)),
        (
            H100,
            {"dtype": torch.float32},
            (f"forward by the plain kernel: {NEEDS}", f"backward by the plain kernels: {NEEDS}"),
        ),
        (
            H100,
            {"head_dim_qk": 64, "head_dim_v": 64},
            (
                "forward by the Hopper kernel",
                f"{BACKWARD}, dQ by the plain kernel: it is faster at head dimensions 64/64",
            ),
        ),
        (
            H100,
            {"head_dim_qk": 576, "head_dim_v": 512},
            (
                "forward by the Hopper kernel if v is k[..., :512] in k's memory, otherwise by the plain kernel",
                "backward by the plain kernels: the Hopper kernels have no backward for head dimensions 576/512",
            ),
        ),
        (
            H100,
            {"head_dim_qk": 576, "head_dim_v": 512, "window_size": (64, 0)},
            (
                "forward by the plain kernel: a window with left=64, which the Hopper kernel of 576/512 does not have",
                "backward by the plain kernels: the Hopper kernels have no backward for head dimensions 576/512",
            ),
        ),
        (A100, {}, ()),
    ],
)
def test_the_backend_says_which_kernels_run(
    platform: Platform, changes: dict, notes: tuple[str, ...], is_training: bool
) -> None:
    accepted = triton.select_backend(mla_request(is_training=is_training, **changes), platform)
    assert isinstance(accepted, Accepted)
    assert accepted.notes == (notes if is_training else notes[:1])


STRIDED = torch.zeros(2, 8, 4, 132, dtype=torch.bfloat16)[..., :128]


@pytest.mark.parametrize(
    ("dout", "reason"),
    [
        (torch.zeros(2, 8, 4, 128, dtype=torch.bfloat16), None),
        (torch.zeros(2, 8, 4, 136, dtype=torch.bfloat16)[..., :128], None),
        (STRIDED, r"dout has strides .*multiples of 8"),
        (torch.zeros(2, 8, 1, 128, dtype=torch.bfloat16).expand(2, 8, 4, 128), r"dout has strides .*multiples of 8"),
    ],
)
def test_dout_can_be_copied_by_tiles(dout: torch.Tensor, reason: str | None, hopper: None) -> None:
    for rule_of in (rule.plain_dkv_for, rule.plain_dq_for):
        found = rule_of(kind(*tensors()), dout.stride())
        assert found is None if reason is None else re.match(reason, found)


def test_what_the_forward_does_not_take_the_backward_does_not(hopper: None) -> None:
    given = tensors(v=torch.zeros(2, 8, 1, 128, dtype=torch.bfloat16).expand(2, 8, 4, 128))
    for rule_of in (rule.plain_dkv_for, rule.plain_dq_for):
        assert rule_of(kind(*given), (4096, 512, 128, 1)).startswith("v has strides")


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("widths", [(192, 128), (64, 64)])
@pytest.mark.parametrize("tuned", [False, True])
def test_the_backward_launches_the_kernels_that_the_rule_says(
    widths: tuple[int, int], is_packed: bool, tuned: bool, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the Hopper kernels write is not filled beforehand; dQ of 64/64 comes from the plain kernel."""
    launched = []

    class Launches:
        def calls_kv(self, inputs, rows, gradients, offsets):
            return [(lambda *_: [x.fill_(3.0) for x in gradients], ())]

        def calls_q(self, inputs, rows, dq, offsets):
            return [(lambda *_: dq.fill_(4.0), ())]

    def plain(name):
        return lambda kind, tile: lambda *arguments: launched.append(name)

    filled = []
    monkeypatch.setattr(launch_backward, "_hopper", lambda: lambda *kind: Launches())
    monkeypatch.setattr(launch_backward, "_kv_launch", plain("kv"))
    monkeypatch.setattr(launch_backward, "_q_launch", plain("q"))
    monkeypatch.setattr(launch_backward, "_delta_launch", lambda kind: lambda *_: launched.append("delta"))
    monkeypatch.setattr(
        launch_backward, "output_like", lambda x, width, layout, dtype=None: filled.append(width) or torch.zeros_like(x)
    )
    rows = (10, 4) if is_packed else (2, 8, 4)
    q, k = (torch.zeros(*rows, widths[0], dtype=torch.bfloat16) for _ in range(2))
    v, out, dout = (torch.zeros(*rows, widths[1], dtype=torch.bfloat16) for _ in range(3))
    packing = Packing("bshd", 8, 8)
    if is_packed:
        cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32)
        packing = Packing("thd", 6, 6, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    lse = torch.zeros(packing.layout.lse_shape(q.shape))
    dq, dk, dv = launch_backward.backward(q, k, v, out, lse, dout, None, 0.1, packing, tuned)
    assert (dk == 3).all()
    assert (dv == 3).all()
    has_plain_dq = widths == (64, 64)
    assert (dq == (0 if has_plain_dq else 4)).all()
    assert launched == ["delta", *(["q"] if has_plain_dq else [])]
    assert filled == ([64] if has_plain_dq else [])


def test_gradients_without_keys_are_contiguous_zeros() -> None:
    """As the operator's fake kernel says, also of a q in another order of memory."""
    q = torch.randn(2, 4, 8, 192, dtype=torch.bfloat16).transpose(1, 2)
    k, v = (torch.randn(2, 0, 4, width, dtype=torch.bfloat16) for width in (192, 128))
    out = torch.zeros(2, 8, 4, 128, dtype=torch.bfloat16)
    packing = Packing("bshd", 8, 0)
    found = launch_backward.backward(q, k, v, out, torch.zeros(2, 4, 8), out, None, 0.1, packing)
    for x, gradient in zip((q, k, v), found, strict=True):
        assert gradient.shape == x.shape
        assert gradient.is_contiguous()
        assert not gradient.any()
