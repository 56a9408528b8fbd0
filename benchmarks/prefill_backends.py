"""Every attention backend side by side on this GPU, forward and backward, and how far the resolver's choice is behind.

    python -m benchmarks.prefill_backends             every shape
    python -m benchmarks.prefill_backends --quick     a few shapes
    python -m benchmarks.prefill_backends --between   shapes between those
    python -m benchmarks.prefill_backends --drawn     shapes drawn at random
    python -m benchmarks.prefill_backends --check     exit 1 where the choice is below 0.95 of the best
    python -m benchmarks.prefill_backends --again triton   after a change of one backend's [--forward-only] [--only RE]
    python -m benchmarks.prefill_backends --merge FILE     put what --again wrote into the kept results; needs no GPU

bfloat16. Each backend's ``forward`` and ``backward`` hook is called alone, all of them on the same out and lse, so the
two passes are compared apart. Milliseconds of the GPU, from events around short bursts; the backends take turns in a
shuffled order, because a GPU's clock drifts and a model never runs one kernel for a long time. A pass whose error
against float64, in the first and the last head, is more than twice that of plain PyTorch in bfloat16 is not timed.
dk and dv are not looked at. ``--again`` times the backends that are installed; ``--merge`` keeps the one named, times
what the others took when the kept result was measured over what they took now, so that both are of one GPU's state. A
time that was not taken again is of code that has changed: it is set aside as ``superseded``. With ``--rest-unchanged``
it stays, for a change that reaches only some calls.
``choice`` is what the resolver takes for the forward and for the backward. Writes
benchmarks/results/prefill_backends_<gpu>.json after each shape, prints a table last.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import mla_plugin
from benchmarks.common import RESULTS, error, in_shuffled_turns, parser, write
from benchmarks.prefill_cases import BETWEEN, CASES, DRAWN, QUICK, Case, lengths_of
from mla_plugin import AttentionRequest, AttentionTensors, Plan, device
from mla_plugin.hooks.attention import Residuals
from mla_plugin.operations.attention import dispatch

BACKENDS = ("triton", "fa3", "fa4", "fa2", "cudnn", "sdpa")
WITHIN = 0.95


KEPT = ("prefill_backends", "prefill_backends_between", "prefill_backends_drawn")
"""Names of the results that the resolver's tables are made of."""


class Problem:
    """The tensors of a case, its request, and exact results of two heads of its first sequence."""

    def __init__(self, case: Case) -> None:
        generator = torch.Generator("cuda").manual_seed(0)
        self.case = case
        self._plain: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self.lengths = lengths_of(case) if case.packed else [case.seqlen] * case.batch

        def draw(heads: int, width: int) -> torch.Tensor:
            leading = (sum(self.lengths),) if case.packed else (case.batch, case.seqlen)
            return torch.randn(*leading, heads, width, device="cuda", dtype=torch.bfloat16, generator=generator)

        dim_qk, dim_v = case.dims
        q, k, v = draw(case.heads, dim_qk), draw(case.kv_heads, dim_qk), draw(case.kv_heads, dim_v)
        self.dout = draw(case.heads, dim_v)
        options: dict[str, Any] = {"attn_mask_type": "no_mask" if case.mask == "full" else "causal_bottom_right"}
        given: dict[str, torch.Tensor] = {}
        if isinstance(case.mask, int):
            options["window_size"] = (case.mask, 0)
        if case.packed:
            sums = [sum(self.lengths[:i]) for i in range(case.batch + 1)]
            offsets = torch.tensor(sums, device="cuda", dtype=torch.int32)
            given = {"cu_seqlens_q": offsets, "cu_seqlens_kv": offsets}
            options |= {"qkv_format": "thd", "max_seqlen_q": max(self.lengths), "max_seqlen_kv": max(self.lengths)}
        self.tensors = AttentionTensors(q, k, v, dim_qk**-0.5, **given)
        self.requests = {
            name: AttentionRequest.of(
                self.tensors, **options, is_training=name == "backward", deterministic=case.deterministic
            )
            for name in ("forward", "backward")
        }

    def plain(self, head: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """out and dq of one query head by plain PyTorch; dk and dv are of grouped heads together, so left out."""
        if (head, dtype) not in self._plain:
            self._plain[head, dtype] = self._computed_plainly(head, dtype)
        return self._plain[head, dtype]

    def _computed_plainly(self, head: int, dtype: torch.dtype) -> list[torch.Tensor]:
        case, t = self.case, self.tensors
        kv_head = head // (case.heads // case.kv_heads)
        tokens = self.lengths[0]
        pick = (lambda x, h: x[:tokens, h]) if case.packed else (lambda x, h: x[0, :, h])
        q, k, v = pick(t.q, head).to(dtype), pick(t.k, kv_head).to(dtype), pick(t.v, kv_head).to(dtype)
        scores = (q @ k.T) * t.softmax_scale
        distance = torch.arange(tokens, device="cuda")[:, None] - torch.arange(tokens, device="cuda")
        if case.mask != "full":
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if isinstance(case.mask, int):
            scores = scores.masked_fill(distance > case.mask, -torch.inf)
        p = scores.softmax(-1)
        out = p @ v
        dout = pick(self.dout, head).to(dtype)
        ds = p * (dout @ v.T - (dout * out).sum(-1, keepdim=True))
        return [out, (ds @ k) * t.softmax_scale]

    def call(self, backend: str, kind: str, residuals: Residuals | None) -> Callable[[], Any]:
        """One pass of one backend, which the resolver must accept."""
        request = self.requests[kind]
        mla_plugin.resolve(request, backend=backend)
        plan = Plan(request, device.platform("cuda", torch.cuda.current_device()), backend, backend)
        if kind == "forward":
            return functools.partial(dispatch.forward, plan, self.tensors)
        assert residuals is not None
        return functools.partial(dispatch.backward, plan, residuals, self.dout, None)

    def is_right(self, which: int, found: torch.Tensor) -> bool:
        """Whether out (0) or dq (1) is within twice plain PyTorch's error, in two heads."""
        tokens = self.lengths[0]
        for head in {0, self.case.heads - 1}:
            exact = self.plain(head, torch.float64)[which]
            limit = 2 * error(self.plain(head, torch.bfloat16)[which], exact)
            rows = found[:tokens, head] if self.case.packed else found[0, :, head]
            if not error(rows, exact) <= limit:
                return False
        return True


def passes(
    problem: Problem,
    row: dict[str, Any],
    kinds: Sequence[str] = ("forward", "backward"),
    backends: Sequence[str] = BACKENDS,
) -> dict[str, dict[str, Callable[[], Any]]]:
    """The calls of the passes that are right, by backend; why the others are not timed is noted in ``row``."""
    calls: dict[str, dict[str, Callable[[], Any]]] = {kind: {} for kind in kinds}
    residuals = None
    for kind, found in calls.items():
        for name in backends:
            try:
                call = problem.call(name, kind, residuals)
                result = call()
                right = problem.is_right(*((0, result.out) if kind == "forward" else (1, result.dq)))
            except Exception as reason:  # of a library, of any type
                row["refused"][f"{name} {kind}"] = str(reason)[:300]
                continue
            if not right:
                row["refused"][f"{name} {kind}"] = "its error is more than twice plain PyTorch's"
                continue
            found[name] = call
            if residuals is None:
                residuals = Residuals(problem.tensors, result.out, result.lse)
    return calls


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row of the table."""
    problem = Problem(case)
    row: dict[str, Any] = {**case._asdict(), "longest": max(problem.lengths), "refused": {}}
    plan = mla_plugin.resolve(problem.requests["backward"])
    inference = mla_plugin.resolve(problem.requests["forward"]).forward_backend
    row["choice"] = {"forward": inference, "training": [plan.forward_backend, plan.backward_backend]}
    for kind, calls in passes(problem, row).items():
        row[kind] = in_shuffled_turns(calls, rounds)
    return row


def measure_again(backend: str, options: argparse.Namespace) -> None:
    """Times in every shape, to be merged."""
    rows = []
    cases = [case for case in (*CASES, *BETWEEN, *DRAWN) if re.search(options.only or "", case.name)]
    if not cases:
        raise SystemExit(f"--only {options.only!r} matches no shape")
    kinds = ("forward",) if options.forward_only else ("forward", "backward")
    with torch.no_grad():
        for case in cases:
            row: dict[str, Any] = {**case._asdict(), "refused": {}}
            for kind, calls in passes(Problem(case), row, kinds).items():
                row[kind] = in_shuffled_turns(calls, options.rounds)
            rows.append(row)
            print(
                case.name, {kind: {name: round(ms, 4) for name, ms in row[kind].items()} for kind in kinds}, flush=True
            )
            packages = dict(device.installed_packages())
            path = write("prefill_again", {"backend": backend, "packages": packages, "rows": rows}, options.commit)
            torch.cuda.empty_cache()
    print(path)


def merge(again: dict[str, Any], *, rest_unchanged: bool) -> None:
    """Into the kept results of the same GPU; each row says at which commit it was measured again."""
    backend = again["backend"]
    now = {_case_of(row): row for row in again["rows"]}
    kinds = [kind for kind in ("forward", "backward") if kind in again["rows"][0]]
    for name in KEPT:
        path = RESULTS / f"{name}_{again['gpu'].replace(' ', '_')}.json"
        if not path.exists():  # not every GPU has all
            continue
        record = json.loads(path.read_text())
        for row, kind in itertools.product(record["rows"], kinds):
            found, kept = now.get(_case_of(row), {kind: {}})[kind], row[kind]
            common = [kept[other] / found[other] for other in kept if other in found and other != backend]
            if backend in found and common:
                kept[backend] = found[backend] * statistics.geometric_mean(common)
                row.get("superseded", {}).pop(f"{backend} {kind}", None)
                row.setdefault("again", {})[f"{backend} {kind}"] = again["commit"]
            elif backend in kept and not rest_unchanged:
                row.setdefault("superseded", {})[f"{backend} {kind}"] = kept.pop(backend)
            if not row.get("superseded", True):
                del row["superseded"]
        record.setdefault("packages_again", {})[again["commit"]] = again.get("packages", {})
        path.write_text(json.dumps(record, indent=1) + "\n")


def _case_of(row: dict[str, Any]) -> Case:
    return Case(*(row[name] if name != "dims" else tuple(row[name]) for name in Case._fields))


def shares(row: dict[str, Any]) -> dict[str, float]:
    """Speed of the choice by that of the best: of each pass, and of both compared with the best single backend.

    The choice is the one made when the row was first measured. A share is left out where the choice has no time: it was
    refused or wrong, or ``merge`` set the time aside.
    """
    forward, backward = row["forward"], row["backward"]
    first, second = row["choice"]["training"]
    single = min((forward[name] + backward[name] for name in forward if name in backward), default=math.nan)
    both = forward.get(first, math.nan) + backward.get(second, math.nan)
    found = {
        "forward": min(forward.values()) / forward.get(row["choice"]["forward"], math.nan),
        "training forward": min(forward.values()) / forward.get(first, math.nan),
        "backward": min(backward.values()) / backward.get(second, math.nan),
        "of the best single one": single / both,
    }
    return {name: share for name, share in found.items() if not math.isnan(share)}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds of both passes, the choice in bold, its speed as a share of the best."""
    lines = [f"| shape | {' | '.join(BACKENDS)} | share forward, backward, both |", "|---" * (len(BACKENDS) + 2) + "|"]
    for row in rows:
        case = _case_of(row)
        cells = []
        for name in BACKENDS:
            chosen = row["choice"]["training"]
            texts = []
            for index, kind in enumerate(("forward", "backward")):
                text = f"{row[kind][name]:.3f}" if name in row[kind] else "-"
                texts.append(f"**{text}**" if name == chosen[index] else text)
            cells.append(" ".join(texts))
        share = shares(row)
        names = ("training forward", "backward", "of the best single one")
        both = " ".join(f"{share[name]:.2f}" if name in share else "-" for name in names)
        lines.append(f"| {case.name} | {' | '.join(cells)} | {both} |")
    return "\n".join(lines)


def main() -> None:
    """Measure every case, write, print."""
    arguments = parser(__doc__)
    arguments.add_argument("--quick", action="store_true", help="a few shapes")
    arguments.add_argument("--between", action="store_true", help="shapes between those")
    arguments.add_argument("--drawn", action="store_true", help="shapes drawn at random")
    arguments.add_argument("--check", action="store_true", help="exit 1 where the choice is below 0.95 of the best")
    arguments.add_argument("--again", choices=BACKENDS, help="in every shape, after a change of this backend's")
    arguments.add_argument("--forward-only", action="store_true", help="with --again")
    arguments.add_argument(
        "--only", metavar="RE", help="with --again: shapes whose name this matches; then --merge with --rest-unchanged"
    )
    arguments.add_argument("--merge", type=Path, metavar="FILE", help="put what --again wrote into the kept results")
    arguments.add_argument("--rest-unchanged", action="store_true", help="with --merge: keep times not taken again")
    options = arguments.parse_args()
    if options.only is not None and not options.again:
        arguments.error("--only needs --again")
    if options.merge:
        return merge(json.loads(options.merge.read_text()), rest_unchanged=options.rest_unchanged)
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to time")
    if options.again:
        return measure_again(options.again, options)
    rows: list[dict[str, Any]] = []
    kind, cases = "", CASES
    if options.quick:
        kind, cases = "_quick", QUICK
    elif options.between:
        kind, cases = "_between", BETWEEN
    elif options.drawn:
        kind, cases = "_drawn", DRAWN
    with torch.no_grad():
        for case in cases:
            rows.append(measure(case, options.rounds))
            packages = dict(device.installed_packages())
            path = write(f"prefill_backends{kind}", {"packages": packages, "rows": rows}, options.commit)
            torch.cuda.empty_cache()
    print(path)
    print(table(rows))
    single = "of the best single one"
    found = [shares(row) for row in rows]
    both = [share[single] for share in found if single in share]
    print(f"of the best single backend, both passes, geometric mean: {statistics.geometric_mean(both):.3f}")
    behind = [share for share in found if len(share) < 4 or min(share.values()) < WITHIN]
    print(f"{len(behind)} of {len(rows)} shapes have a choice below {WITHIN} of the best")
    if options.check and behind:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
