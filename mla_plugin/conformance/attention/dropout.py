"""Dropout: refused, or the right share of the weights by the seed, each on its own, the same ones in both passes.

With the unit matrix as each sequence's V, out shows which weights were dropped. The values are then those of the oracle
with these weights dropped, so that a rate below a percent is seen in every dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.conformance import checks
from mla_plugin.conformance.attention.call import Call
from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.oracle import Oracle
from mla_plugin.conformance.attention.special import call_of
from mla_plugin.hooks.attention import AttentionOutput, Plan
from mla_plugin.hooks.types import Accepted, Refused

if TYPE_CHECKING:
    from mla_plugin.conformance.attention.suite import BackendConformance

DROPOUTS = (0.25, 0.1, 0.003)
"""The last is less than what 8 bits of a random number tell apart."""
_DTYPES = (torch.float32, torch.bfloat16)
_LOW = (torch.float32, torch.bfloat16, torch.float16)
_OTHER_SEEDS = (1, 2**32, 2**48, 2**61)
"""Bits of the seed: a change of each must give other weights."""
_MORE = 4
"""Times the sequences of a low rate: in bfloat16 the roundings of fewer explain a factor of 0.997."""
_HEAD_DIMS = ((192, 128), (128, 128), (64, 64))
_NARROW = 64
"""Keys below which a low rate drops too little to count: a plain case of narrower heads gets others."""
_APART = (1, 2, 4, 8, 16, 32, 64)
"""Queries or keys whose weights must not be dropped together: rows, and tiles of them."""
_TILES_APART = (64, 128, 256)
_LONG = 300
"""Queries and keys of a sequence of several tiles."""
_BESIDE: tuple[dict[str, Any], ...] = (
    {"num_heads": 4, "num_kv_heads": 2},
    {"attn_mask_type": "causal", "return_lse": True},
    {"window_size": (50, 9)},
    {"attn_mask_type": "causal_bottom_right", "seqlens_q": (41, 41)},
    {"attn_mask_type": "arbitrary", "mask_shape": "bhss"},
    *(
        {"bias_type": bias_type, "bias_shape": "bhss", "bias_requires_grad": True}
        for bias_type in ("post_scale_bias", "pre_scale_bias")
    ),
    {"deterministic": True},
    {"rows_q": (3, 1), "rows_kv": (0, 5)},
    {},
)
"""What the draws of the two passes may follow; in each layout unequal lengths too. Rows are those behind sequences."""
_WIDE: tuple[dict[str, Any], ...] = tuple(
    {"window_size": (12, 0), "head_dim_qk": dim, "head_dim_v": dim} for dim in (128, 256)
)
"""The same in the plainest layout alone."""


def check_dropout(suite: BackendConformance) -> None:
    """Each rate with and without a backward, dense and packed; then one rate in other layouts and beside others."""
    plain = [_with_square_scores(_wide(suite, case)) for case in suite.plain_cases()]
    firsts = list({case.is_packed: case for case in reversed(plain)}.values())[::-1]
    for case in firsts[: 1 if suite.is_slow else None]:
        lengths: Any = case.seqlens_q * _MORE
        many = [
            replace(case, dtype=dtype, seqlens_q=lengths, seqlens_kv=lengths)
            for dtype in dict.fromkeys((case.dtype, *_DTYPES))
        ]
        seed = _seed(suite)  # of all rates: what is kept by the seed alone is of another rate
        others = itertools.cycle(seed ^ bit for bit in _OTHER_SEEDS)
        for dropout_p, is_training in itertools.product(DROPOUTS, (True, False)):
            for each in many if dropout_p == DROPOUTS[-1] else (case,):
                _check(suite, each, dropout_p, (seed, next(others)), is_training=is_training)
    if not suite.is_slow:
        for case in _others(suite, plain, firsts):
            seed = _seed(suite)
            _check(suite, case, DROPOUTS[0], (seed, seed ^ 1), is_training=True)
        for case in plain:
            seed = _seed(suite)
            _check(suite, case, DROPOUTS[0], (seed, seed ^ 1), is_training=True, is_partial=True)
        for case in firsts:
            long = replace(case, name=f"{case.name} of {_LONG} tokens", seqlens_q=(_LONG,), seqlens_kv=(_LONG,))
            _check_tiles(suite, long, DROPOUTS[0])


def _seed(suite: BackendConformance) -> int:
    return int(torch.randint(2**62, (), generator=suite._generator()))


def _others(suite: BackendConformance, plain: list[Case], firsts: list[Case]) -> Iterator[Case]:
    yield from (case for case in plain if case not in firsts)
    for case in plain:
        keys = case.seqlens_kv[0]
        unequal: dict[str, Any] = {"seqlens_q": (keys, -(-keys // 2)), "seqlens_kv": (keys - min(5, keys // 2), keys)}
        if not case.is_packed:
            unequal |= {"rows_q": (keys,) * 2, "rows_kv": (keys,) * 2, "attn_mask_type": "padding"}
        yield replace(case, name=f"{case.name} with unequal lengths", **unequal)
    generator = suite._generator()
    for case, beside in itertools.product(plain, _BESIDE):
        found = _beside(case, beside)
        order = torch.randperm(len(_LOW), generator=generator).tolist()  # any dtype may be beside any option
        of_dtypes = [replace(found, dtype=dtype) for dtype in (*(_LOW[i] for i in order), case.dtype)] if found else ()
        taken = (each for each in of_dtypes if suite.takes(each.request(suite.device).replace(dropout_p=DROPOUTS[0])))
        yield from itertools.islice(taken, 1)
    for case, beside in itertools.product(plain[:1], _WIDE):
        found = replace(case, name=f"{case.name} with {beside}", **beside)
        yield _with_square_scores(found, most=found.head_dim_v)


def _beside(case: Case, beside: dict[str, Any]) -> Case | None:
    """The case with other options; None where its layout has no such thing."""
    given = dict(beside)
    if case.is_packed:
        if "bias_type" in given or given.get("attn_mask_type") == "arbitrary":
            return None
        if "attn_mask_type" in given:
            given["attn_mask_type"] = f"padding_{given['attn_mask_type']}"
    for side in ("q", "kv"):
        if (behind := given.get(f"rows_{side}")) is not None:
            if not case.is_packed:
                return None
            lengths = getattr(case, f"seqlens_{side}")
            given[f"rows_{side}"] = tuple(length + more for length, more in zip(lengths, behind, strict=True))
    return replace(case, name=f"{case.name} with {beside}", **given)


def _wide(suite: BackendConformance, case: Case) -> Case:
    """The case, with the first wider heads that are accepted where its V is narrow: each column shows one key."""
    if case.head_dim_v < _NARROW:
        for dim_qk, dim_v in _HEAD_DIMS:
            wide = replace(case, head_dim_qk=dim_qk, head_dim_v=dim_v)
            if suite.takes(_with_square_scores(wide).request(suite.device).replace(dropout_p=DROPOUTS[0])):
                return wide
    return case


def _with_square_scores(plain: Case, most: int = 96) -> Case:
    keys = min(plain.head_dim_v, most)
    square: dict[str, Any] = {"seqlens_q": (keys,) * 2, "seqlens_kv": (keys,) * 2, "rows_q": None, "rows_kv": None}
    heads: dict[str, Any] = {} if plain.num_heads != plain.num_kv_heads else {"num_heads": 4, "num_kv_heads": 4}
    return replace(plain, **square, **heads, scores="normal", lead=0, lead_kv=None, tail=0, return_lse=False)


def _check(
    suite: BackendConformance,
    case: Case,
    dropout_p: float,
    seeds: tuple[int, int],
    *,
    is_training: bool,
    is_partial: bool = False,
) -> None:
    plan = _plan(suite, case, dropout_p, is_training=is_training, is_partial=is_partial)
    if plan is None:
        return
    call = _with_unit_matrix(call_of(suite, case, plan.request.replace(dropout_p=0.0)))
    calls = [_with_seed(call, value) for value in (*seeds, seeds[0])]
    try:
        outputs = [checks.check_types(case, suite.hooks().forward(plan, each), call.expected()) for each in calls]
        first, other, again = (_Dropped.of(call, [output]) for output in outputs)
        if not all(map(torch.equal, first.dropped, again.dropped)):
            checks.fail("two calls with the same dropout_seed drop different weights; expected the same")
        _check_shares(first, dropout_p)
        _check_independence(first, other, dropout_p)
        _check_values(suite, plan, calls[0], outputs[0], first)
    except checks.ConformanceError as error:
        checks.fail(f"dropout_p={dropout_p} in {case.name} and {case.dtype}: {error}")


def _check_tiles(suite: BackendConformance, case: Case, dropout_p: float) -> None:
    """A sequence of several tiles of queries and of keys, no two of which drop alike.

    Each of several calls with the same seed shows as many keys as V has columns.
    """
    plan = _plan(suite, case, dropout_p, is_training=True)
    if plan is None:
        return
    call, seed = call_of(suite, case, plan.request.replace(dropout_p=0.0)), _seed(suite)
    calls = [_with_seed(_with_unit_matrix(call, key), seed) for key in range(0, _LONG, case.head_dim_v)]
    try:
        outputs = [checks.check_types(case, suite.hooks().forward(plan, each), each.expected()) for each in calls]
        found = _Dropped.of(call, outputs)
        _check_shares(found, dropout_p)
        _check_likely(dict(_counts_apart(found, dropout_p, _TILES_APART)))
        _check_values(suite, plan, calls[0], outputs[0], found)
    except checks.ConformanceError as error:
        checks.fail(f"dropout_p={dropout_p} in {case.name}: {error}")


def _plan(
    suite: BackendConformance, case: Case, dropout_p: float, *, is_training: bool, is_partial: bool = False
) -> Plan | None:
    """None where the case with dropout is refused."""
    request = case.request(suite.device, is_training=is_training).replace(dropout_p=dropout_p, partial=is_partial)
    decision = suite._answer(request)
    if isinstance(decision, Refused):
        checks.check_reasons(decision.reasons, request)
    if not isinstance(decision, Accepted):
        return None
    return Plan(request, suite.platform(), suite.backend, decision.backward_by or suite.backend)


def _with_seed(call: Call, seed: int) -> Call:
    return replace(call, tensors=replace(call.tensors, dropout_seed=torch.tensor([seed], dtype=torch.int64)))


def _check_values(suite: BackendConformance, plan: Plan, call: Call, output: AttentionOutput, found: _Dropped) -> None:
    """out, lse and the gradients of a softmax whose weights were dropped as the forward's out shows it."""
    share, call = 1 - plan.request.dropout_p, replace(call)  # what a call must give is cached
    oracle = Oracle(call.request, call.tensors, [kept / share for kept in found.kept])
    vars(call)["oracle"] = oracle
    try:
        checks.check_output(call.case, call.inputs, output, oracle.forward())
    except checks.ConformanceError as error:
        checks.fail(f"with the weights that are kept divided by 1 - dropout_p = {share}: {error}")
    if not plan.request.is_training:
        return
    others = None
    if plan.request.partial:
        _, output = call.partial(suite._generator())
        others = output
    gradients = suite.hooks().backward(plan, call, output)
    try:
        wanted = call.expected_gradients(others)
        checks.check_gradients(call.case, call.inputs, gradients, call.expected()[1].exact, wanted)
    except checks.ConformanceError as error:
        checks.fail(f"{error}. The backward must drop what the forward did, and divide by as much")


def _with_unit_matrix(call: Call, key: int = 0) -> Call:
    """The call with the unit matrix as V of each sequence, from a key on; V of the others is 0."""
    layout = call.request.layout
    v = layout.to_bhsd(torch.zeros_like(call.tensors.v, memory_format=torch.contiguous_format))
    for part in call.oracle._parts:
        of_sequence = v[part.row, :, part.columns]
        of_sequence[:, key:].diagonal(dim1=1, dim2=2).fill_(1.0)
    v = layout.from_bhsd(v).contiguous().requires_grad_(call.tensors.v.requires_grad)
    return Call(call.case, call.request, replace(call.tensors, v=v), call.dout, call.dlse)


@dataclass(frozen=True)
class _Dropped:
    """What a forward dropped, for each sequence [H, S_q, S_kv].

    Attributes:
        kept: weights that are in out.
        seen: those that are large enough to tell.
        dropped: which of these are not in out.
    """

    kept: list[torch.Tensor]
    seen: list[torch.Tensor]
    dropped: list[torch.Tensor]

    @classmethod
    def of(cls, call: Call, outputs: Sequence[AttentionOutput]) -> _Dropped:
        """``outputs`` show the keys one after another, each as many as V has columns."""
        layout, lse = call.request.layout, call.expected()[1].exact
        lse = lse[None] if layout.is_packed else lse
        out = torch.cat([layout.to_bhsd(output.out) for output in outputs], -1)
        found = cls([], [], [])
        for part in call.oracle._parts:
            weights = part.weights(lse[part.row, :, part.rows])
            found.kept.append(out[part.row, :, part.rows, : weights.shape[-1]] != 0)
            found.seen.append(weights > 1e-3)
            found.dropped.append(found.seen[-1] & ~found.kept[-1])
        return found


_Mask = tuple[torch.Tensor, torch.Tensor]
"""Which weights were dropped, and which are seen."""


def _is_likely(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Whether independent draws give such counts; once in 10**9 they do not."""
    return (found - expected).abs() <= 7 * expected.sqrt() + 5


def _of_diagonals(mask: torch.Tensor) -> torch.Tensor:
    """The sums over heads and over all places with one distance of query and key."""
    _, queries, keys = mask.shape
    places = torch.arange(keys, device=mask.device) - torch.arange(queries, device=mask.device)[:, None] + queries - 1
    return torch.zeros(queries + keys - 1, device=mask.device).index_add_(
        0, places.flatten(), mask.sum(0).flatten().float()
    )


_SUMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a head": lambda mask: mask.sum((1, 2)),
    "a query": lambda mask: mask.sum((0, 2)),
    "a key": lambda mask: mask.sum((0, 1)),
    "a diagonal": _of_diagonals,
}


def _check_shares(found: _Dropped, dropout_p: float) -> None:
    """Of all weights, and of those of each head, query, key and diagonal."""
    for words, summed in _SUMS.items():
        for dropped, seen in zip(found.dropped, found.seen, strict=True):
            counts, of_all = summed(dropped), summed(seen)
            if not bool(_is_likely(counts, dropout_p * of_all).all()):
                shares = (counts / of_all).nan_to_num()
                checks.fail(f"of {words}'s weights {shares.min():.4f} to {shares.max():.4f} are dropped")
    count, of = (sum(float(x.sum()) for x in each) for each in (found.dropped, found.seen))
    if not abs(count - dropout_p * of) <= 6 * (dropout_p * of) ** 0.5 + 5 + of * min(1e-3, dropout_p / 10):
        checks.fail(f"{count / of:.4f} of the weights are dropped")


def _check_independence(first: _Dropped, other: _Dropped, dropout_p: float) -> None:
    """Weights of two heads, sequences, seeds, queries or keys are dropped together as often as chance says."""
    by_head, of_other = (_by_head(x, first) for x in (first, other))
    counted = {"dropout_seeds, of any heads and sequences,": _together(by_head, of_other, dropout_p)}
    both, expected = _together(by_head, by_head, dropout_p)
    unlike = ~torch.eye(len(both), dtype=torch.bool, device=both.device)
    counted["heads or sequences"] = both[unlike], expected[unlike]
    _check_likely(counted | dict(_counts_apart(first, dropout_p, _APART)))


def _check_likely(counted: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """``counted``: how many weights the named two drop both, and how many chance says."""
    for words, (both, expected) in counted.items():
        if not bool(_is_likely(both, expected).all()):
            worst = int((both - expected).abs().argmax())
            checks.fail(
                f"two {words} drop {int(both.flatten()[worst])} of the same weights, {expected.flatten()[worst]:.1f} "
                "are expected; each weight must be dropped independently, and by another dropout_seed others"
            )


def _by_head(found: _Dropped, like: _Dropped) -> _Mask:
    """The weights of each head of each sequence as a row, so many queries and keys as all sequences have."""
    rows, columns = (min(x.shape[axis] for x in like.seen) for axis in (1, 2))
    dropped, seen = (
        torch.cat([x[:, :rows, :columns].flatten(1) for x in masks]).float() for masks in (found.dropped, found.seen)
    )
    return dropped, seen


def _together(one: _Mask, other: _Mask, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """How many weights each row of one and each of the other drop both, and how many chance says."""
    return one[0] @ other[0].T, one[1] @ other[1].T * dropout_p**2


def _counts_apart(
    found: _Dropped, dropout_p: float, distances: Sequence[int]
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    masks = list(zip(found.dropped, found.seen, strict=True))
    for apart in distances:
        for words, axis in (("queries", 1), ("keys", 2)):
            longer = [each for each in masks if each[0].shape[axis] > apart]
            pairs = [(_from(each, axis, apart, 0), _from(each, axis, apart, apart)) for each in longer]
            counts = [((x & y).sum(), (seen_x & seen_y).sum()) for (x, seen_x), (y, seen_y) in pairs]
            if counts:
                both, seen = (torch.stack(each) for each in zip(*counts, strict=True))
                yield f"{words} {apart} apart", (both, seen * dropout_p**2)


def _from(mask: _Mask, axis: int, apart: int, start: int) -> _Mask:
    """All queries or keys but so many, from one on."""
    dropped, seen = (x.narrow(axis, start, x.shape[axis] - apart) for x in mask)
    return dropped, seen
