"""Known faults in backends that take few calls: general tests must find some that they take, and not pass for lack of any."""

from __future__ import annotations

from dataclasses import replace

from tests.conformance import broken_gaps, broken_hidden
from tests.conformance.broken_beside import NARROWER, NARROWER_DECODE
from tests.conformance.mutants import Broken


def _of(table: list[Broken], name: str, narrower: str) -> Broken:
    """The fault of this name in a backend that takes only what the other name says."""
    fault = next(fault for fault in table if fault.name == name)
    before = (NARROWER | NARROWER_DECODE)[narrower]
    return replace(fault, name=f"{name}_with_{narrower}_alone", before=(*before, *fault.before), refuses_more=True)


ATTENTION = [
    *(_of(broken_gaps.ATTENTION, "hidden_scores_are_-30000", name) for name in ("inference", "one_kv_head")),
    *(_of(broken_hidden.ATTENTION, "weights_shared_by_threads", name) for name in ("inference", "heads_by_fours")),
]
DECODE = [
    _of(broken_gaps.DECODE, "hidden_keys_of_left_padding_have_-30000", "one_query"),
    *(_of(broken_hidden.DECODE, "weights_shared_by_threads", name) for name in ("fp8", "heads_by_sixteens")),
]
