"""Every rule of TransformerEngine's selection, on both sides of its condition."""

import pytest

from tests.resolver.te_cases import choose
from tests.resolver.te_rule_cases import CASES, Case


def removals(case: Case, changes: dict) -> set[str]:
    """The backends of the case that its rule removes."""
    found = choose(case.release, **changes).removals
    return {removal.backend for removal in found if removal.rule == case.rule and removal.backend in case.backends}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{'-'.join(case.backends)}")
def test_a_rule_fires_and_holds_back(case: Case) -> None:
    assert removals(case, case.fires) == set(case.backends)
    for changes in case.spares:
        assert removals(case, changes) == set(), changes
