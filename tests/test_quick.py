"""The lane of a minute names what exists."""

from pathlib import Path

import pytest

from mla_plugin.conformance import BackendConformance, DecodeConformance
from tests import quick
from tests.repository.project import ROOT


@pytest.mark.parametrize("name", quick.LEFT_OUT)
def test_what_is_left_out_is_there(name: str) -> None:
    path, *names = name.split("::")
    assert (ROOT / path).exists()
    for part in names:
        is_inherited = hasattr(BackendConformance, part) or hasattr(DecodeConformance, part)
        assert is_inherited or f" {part}" in Path(ROOT / path).read_text()


def test_one_case_of_a_function_is_chosen(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "from tests import quick\n\ndef pytest_collection_modifyitems(items):\n    quick.mark(items)\n\n"
        "pytest_collection_modifyitems.tryfirst = True\n"
    )
    pytester.makeini("[pytest]\nmarkers =\n    quick\n    gpu\n")
    pytester.makepyfile(
        "import pytest\n@pytest.mark.parametrize('n', range(5))\ndef test_a(n): pass\ndef test_b(): pass\n"
        "@pytest.mark.gpu\ndef test_c(): pass\n"
    )
    chosen = [pytester.runpytest_inprocess("-m", "quick", "-p", "no:cacheprovider") for _ in range(2)]
    for result in chosen:
        result.assert_outcomes(passed=2, deselected=5)


pytest_plugins = ("pytester",)
