"""A request: made of tensors or by hand, it is checked and has one spelling for each meaning."""

from __future__ import annotations

import itertools
import pickle
import subprocess
import sys

import pytest
import torch

import mla_plugin
from mla_plugin import AttentionRequest, AttentionTensors
from mla_plugin.arguments.layout import LAYOUTS, Layout
from mla_plugin.arguments.mask import ATTN_MASK_TYPES, Band
from tests.requests import mla_request

Q, K, V = torch.randn(2, 3, 4, 24), torch.randn(2, 5, 2, 24), torch.randn(2, 5, 2, 16)
TENSORS = AttentionTensors(Q, K, V, 0.2)


def by_hand(**changes: object) -> AttentionRequest:
    """A request without defaults of a test: only what has none."""
    return AttentionRequest("bshd", torch.float32, "cpu", 2, 4, 2, 3, 5, 24, 16, **changes)


@pytest.mark.parametrize("attn_mask_type", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (2, 3), (2, -1)])
def test_made_by_hand_and_of_tensors_are_equal(attn_mask_type: str, window_size: tuple[int, int]) -> None:
    of_tensors = AttentionRequest.of(TENSORS, attn_mask_type=attn_mask_type, window_size=window_size)
    assert by_hand(attn_mask_type=attn_mask_type, window_size=window_size) == of_tensors


def test_explain_describes_the_call_that_attention_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    unfilled = by_hand(attn_mask_type="causal")
    assert (unfilled.window_size, unfilled.bottom_right_diagonal) == ((-1, 0), False)
    assert mla_plugin.explain(unfilled) == mla_plugin.explain(AttentionRequest.of(TENSORS))
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert "deterministic" in mla_plugin.explain(unfilled)


def test_alike_calls_share_one_request() -> None:
    first = AttentionRequest.of(TENSORS)
    assert AttentionRequest.of(AttentionTensors(Q.clone(), K, V, 0.2)) is first
    assert AttentionRequest.of(TENSORS, window_size=[-1, -1]) == first
    assert AttentionRequest.of(TENSORS, max_seqlen_q=3) == first


FACTS = {
    "q": {"q": torch.randn(2, 3, 8, 24)},
    "k": {"k": torch.randn(2, 5, 4, 24), "v": torch.randn(2, 5, 4, 16)},
    "v": {"v": torch.randn(2, 5, 2, 8)},
    "dtype": {"q": Q.half(), "k": K.half(), "v": V.half()},
    "device": {"q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")},
    "bias": {"bias": torch.zeros(3, 5)},
    "requires_grad": {"q": Q.clone().requires_grad_()},
}


@pytest.mark.parametrize("fact", FACTS)
def test_what_tensors_say_makes_another_request(fact: str) -> None:
    changes = FACTS[fact]
    fields = {"q": Q, "k": K, "v": V, "softmax_scale": 0.2, **changes}
    options = {"bias_type": "post_scale_bias"} if fact == "bias" else {}
    assert AttentionRequest.of(TENSORS) != AttentionRequest.of(AttentionTensors(**fields), **options)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_seqlen_q": 3.0}, "max_seqlen_q=3.0; expected an int"),
        ({"max_seqlen_kv": True}, "max_seqlen_kv=True; expected an int"),
        ({"dropout_p": None}, "dropout_p=None; expected a number"),
        ({"dropout_p": "0.1"}, "dropout_p='0.1'; expected a number"),
        ({"window_size": (-1.0, 3.0)}, r"window_size=\(-1.0, 3.0\)"),
        ({"deterministic": "yes"}, "deterministic='yes'; expected True or False"),
        ({"return_lse": 1}, "return_lse=1; expected True or False"),
        ({"pad_between_seqs": "no"}, "pad_between_seqs='no'; expected True or False"),
        ({"bottom_right_diagonal": "yes"}, "bottom_right_diagonal='yes'; expected True, False or None"),
        ({"qkv_format": None}, "qkv_format=None; expected one of bshd"),
        ({"attn_mask_type": 3}, "attn_mask_type=3; expected one of no_mask"),
        ({"host": 1}, "host=1; expected one of direct"),
        ({"bias_type": "relative"}, "'relative'; expected one of no_bias"),
    ],
)
def test_values_of_another_type_are_errors_whatever_was_called_before(changes: dict[str, object], words: str) -> None:
    AttentionRequest.of(TENSORS, max_seqlen_q=3, window_size=(-1, 3))  # 3.0 == 3: what was found must not answer for it
    AttentionRequest.of(TENSORS, window_size=(-1, 3))
    with pytest.raises((TypeError, ValueError), match=words):
        AttentionRequest.of(TENSORS, **changes)
    mla_plugin.attention(TENSORS.q, TENSORS.k, TENSORS.v, max_seqlen_q=3, window_size=(-1, 3))
    mla_plugin.attention(TENSORS.q, TENSORS.k, TENSORS.v, window_size=(-1, 3))
    arguments = {"core_attention_bias_type" if name == "bias_type" else name: value for name, value in changes.items()}
    with pytest.raises((TypeError, ValueError), match=words):
        mla_plugin.attention(TENSORS.q, TENSORS.k, TENSORS.v, **arguments)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 1), (1, -1), (0, 0), (2, 1)])
def test_every_query_sees_a_key_is_never_claimed_in_vain(window: tuple[int, int], bottom_right: bool) -> None:
    for lengths in itertools.product((0, 1, 2, 5), repeat=2):
        dense = mla_request(
            max_seqlen_q=lengths[0],
            max_seqlen_kv=lengths[1],
            attn_mask_type="no_mask",
            window_size=window,
            bottom_right_diagonal=bottom_right,
        )
        rows, offset = torch.arange(lengths[0])[:, None], dense.band.offset(*lengths)
        hidden = dense.band.hides(rows, torch.arange(lengths[1]), offset)
        seen = torch.ones(lengths, dtype=torch.bool) if hidden is None else ~hidden
        if lengths[0]:
            assert dense.every_query_sees_a_key == bool(seen.any(1).all())
        same = dense.replace(qkv_format="thd", attn_mask_type="padding", window_size=window)
        assert same.every_query_sees_a_key
        assert not same.replace(lengths_may_differ=True).every_query_sees_a_key


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attn_mask_type": "casual"}, "'casual'; expected"),
        ({"attn_mask_type": "causal", "bottom_right_diagonal": True}, "contradicts"),
        ({"softmax_type": "sigmoid"}, "'sigmoid'; expected"),
        ({"is_training": 1}, "is_training=1"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'; expected a torch.dtype"),
        ({"device_type": None}, "device_type=None"),
        ({"window_size": (0.5, 0)}, r"window_size=\(0.5, 0\)"),
    ],
)
def test_a_request_by_hand_is_checked_too(changes: dict[str, object], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        by_hand().replace(**changes)
    with pytest.raises(ValueError, match="must be a multiple"):
        mla_request(num_kv_heads=3)


@pytest.mark.parametrize("attn_mask_type", ATTN_MASK_TYPES)
def test_replace_of_the_mask_takes_the_window_and_the_diagonal_along(attn_mask_type: str) -> None:
    for before in ("no_mask", "causal", "padding_causal_bottom_right"):
        changed = by_hand(attn_mask_type=before).replace(attn_mask_type=attn_mask_type)
        assert changed == by_hand(attn_mask_type=attn_mask_type)
    windowed = by_hand(attn_mask_type="causal", window_size=(2, 0)).replace(attn_mask_type=attn_mask_type)
    assert windowed == by_hand(attn_mask_type=attn_mask_type, window_size=(2, -1))


def test_a_pickled_request_is_found_in_another_process() -> None:
    request = by_hand(attn_mask_type="causal")
    assert hash(request) == hash(request.replace())
    program = (
        "import pickle, sys, torch; from mla_plugin import AttentionRequest\n"
        "read = pickle.load(sys.stdin.buffer)\n"
        "made = AttentionRequest('bshd', torch.float32, 'cpu', 2, 4, 2, 3, 5, 24, 16, attn_mask_type='causal')\n"
        "assert read == made and hash(read) == hash(made) and {made: 1}[read] == 1 and read.band == made.band\n"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=pickle.dumps(request),
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_axes_of_a_layout(layout: object) -> None:
    shape = layout.shape(2, 3, 5, 7)
    assert len(shape) == layout.num_dims == layout.axes.count(",") + 1
    assert layout.pick(shape) == ((0, 3, 5) if layout.is_packed else (2, 3, 5))
    assert layout.lse_shape(shape) == ((3, 5) if layout.is_packed else (2, 3, 5))
    x = torch.randn(shape)
    assert layout.to_bhsd(x).shape == (1 if layout.is_packed else 2, 3, 5, 7)
    assert torch.equal(layout.from_bhsd(layout.to_bhsd(x)), x)
    names = {"B": 2, "S": 5, "T": 5, "H": 3, "D": 7}
    assert shape == tuple(names[letter] for letter in layout.axes.strip("[]").split(", "))


def test_a_new_layout_is_traced() -> None:
    """Before Python 3.12 torch.compile cannot trace the first access to a cached property."""
    layout = Layout("one", "[B, S, H, D]", 0, 2, 1)
    compiled = torch.compile(lambda x: x + layout.is_packed, fullgraph=True, backend="eager")
    assert compiled(torch.ones(1)).tolist() == [1.0]


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (0, 0), (1, 2), (3, -1), (-1, 2)])
@pytest.mark.parametrize(("len_q", "len_kv"), [(4, 4), (3, 6), (6, 3), (1, 5)])
def test_a_band_by_its_definition(left: int, right: int, bottom_right: bool, len_q: int, len_kv: int) -> None:
    band = Band(left, right, bottom_right)
    offset = len_kv - len_q if bottom_right else 0
    sees = [
        [(left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right) for j in range(len_kv)]
        for i in range(len_q)
    ]
    hidden = band.hides(torch.arange(len_q)[:, None], torch.arange(len_kv), band.offset(len_q, len_kv))
    found = torch.ones(len_q, len_kv, dtype=torch.bool) if hidden is None else ~hidden
    assert found.tolist() == sees
    assert band.is_open == (left < 0 and right < 0)
    keys = band.keys(slice(0, len_q), band.offset(len_q, len_kv), len_kv)
    seen = [j for j in range(len_kv) if any(row[j] for row in sees)]
    assert seen == list(range(len_kv))[keys] or not seen
