"""What the FlashAttention backends share: options of a call, missing packages, a gradient of lse."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from mla_plugin import Platform
from mla_plugin.conformance import Case
from mla_plugin.hooks.types import Accepted
from mla_plugin.plugins import cudnn, fa3, fa4
from mla_plugin.plugins.shared.flash_family import Options, imported, not_installed
from mla_plugin.plugins.shared.packed import Rows
from mla_plugin.plugins.shared.refusals import accepted_without_dlse, refuse_dlse
from tests.plugins.flash_libraries import install
from tests.requests import mla_request


def test_options_of_a_dense_call() -> None:
    request = mla_request(window_size=(7, 0), deterministic=True)
    options = Options.of(request, 0.5, Rows(request, None, None))
    assert options == Options(0.5, True, (7, 0), 2048, 2048, deterministic=True)
    assert options.offsets == {}
    assert options.named("causal", "softmax_scale") == {"causal": True, "softmax_scale": 0.5}


@pytest.mark.parametrize(
    ("window_size", "expected"),
    [((2**31 - 2, 5), (-1, 5)), ((5, 2**31 - 2), (5, -1)), ((141, 141), (-1, -1)), ((140, 140), (140, 140))],
)
def test_a_side_of_the_window_that_hides_no_key_is_unlimited(
    window_size: tuple[int, int], expected: tuple[int, int]
) -> None:
    request = mla_request(attn_mask_type="no_mask", max_seqlen_q=83, max_seqlen_kv=141, window_size=window_size)
    assert Options.of(request, 0.5, Rows(request, None, None)).window_size == expected


def test_options_of_a_packed_call() -> None:
    case = Case("", "thd", torch.bfloat16, (2, 3), (4, 1), (4, 4), (5, 5), attn_mask_type="padding")
    request, tensors = case.request(), case.tensors()
    options = Options.of(request, 0.5, Rows.of(request, tensors))
    assert options.causal is False
    assert (options.max_seqlen_q, options.max_seqlen_k) == (3, 4)
    assert [x.tolist() for x in options.named("cu_seqlens_q", "cu_seqlens_k").values()] == [[0, 4, 8], [0, 5, 10]]
    assert [x.tolist() for x in options.named("seqused_q", "seqused_k").values()] == [[2, 3], [4, 1]]
    assert set(options.offsets) == {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}


def test_a_missing_package_is_named() -> None:
    bare, one = Platform("cuda", (9, 0)), Platform("cuda", (9, 0), (("b", "1"),))
    assert list(not_installed(bare, "X", "a")) == ["a is not installed"]
    assert list(not_installed(bare, "X", "a", "b")) == ["X is not installed: none of a, b"]
    assert list(not_installed(one, "X", "a", "b")) == []


def test_an_import_keeps_the_random_state_of_numpy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """JAX, which FlashAttention 4's packages import, draws from it."""
    (tmp_path / "drawing_when_imported.py").write_text("import numpy\nnumpy.random.rand(5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    numpy.random.seed(7)
    expected = numpy.random.rand()
    numpy.random.seed(7)
    imported("x 1", "drawing_when_imported", "")
    assert numpy.random.rand() == expected


def test_an_import_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"p 1 is installed, but no\.such cannot be imported \(.*\): do this"):
        imported("p 1", "no.such", "do this")
    module = install(monkeypatch, "tests_family.module", here=1)
    assert imported("p 1", "tests_family.module", "do this", "here") is module
    with pytest.raises(RuntimeError, match="another package's, without there: do this"):
        imported("p 1", "tests_family.module", "do this", "there")


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_who_takes_no_gradient_of_lse_hands_its_backward_on(is_training: bool, return_lse: bool) -> None:
    """One answer for all of them."""
    request = mla_request(is_training=is_training, return_lse=return_lse)
    expected = "sdpa" if is_training and return_lse else None
    packages = (("flash-attn-3", "3.0.0"), ("flash-attn-4", "4.0.0b36"))
    platform = Platform("cuda", (9, 0), packages, (9, 13, 0), "13.0")
    notes = set()
    for plugin in (cudnn, fa3, fa4):
        decision = plugin.select_backend(request, platform)
        assert isinstance(decision, Accepted)
        assert decision.backward_by == expected
        notes.add(decision.notes[-1:] if expected else ())
    assert len(notes) == 1
    assert accepted_without_dlse(request, "a").notes[0] == "a"


def test_an_unplanned_gradient_of_lse_is_an_error() -> None:
    refuse_dlse("x", None)
    with pytest.raises(ValueError, match="x's backward takes no dlse; plan the request with return_lse=True"):
        refuse_dlse("x", torch.zeros(1))
