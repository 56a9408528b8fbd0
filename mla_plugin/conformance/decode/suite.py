"""The suite that every backend must pass that computes decode; see docs/conformance.md."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mla_plugin.arguments.cache_format import FP8, FP8_DS_MLA, TOKEN_BYTES
from mla_plugin.arguments.decode import DecodeLengths, DecodeTensors
from mla_plugin.arguments.layout import LAYOUTS, lse_dtype
from mla_plugin.arguments.options import HOSTS
from mla_plugin.conformance import checks, spoilt
from mla_plugin.conformance.attention.library import as_the_process_manager
from mla_plugin.conformance.base import Suite
from mla_plugin.conformance.budget import Yardstick
from mla_plugin.conformance.decode import drawn, mixed, values
from mla_plugin.conformance.decode.alone import check_batch_invariance
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.cases import (
    decode_cases,
    decode_catalogue_for,
    quantised_cases,
    whole_decode_catalogue,
)
from mla_plugin.conformance.decode.many import check_many_sequences
from mla_plugin.conformance.decode.oracle import expected
from mla_plugin.conformance.memory import check_memory, not_run_without_memory
from mla_plugin.conformance.watch import Kept, as_the_library, check_no_graph, check_not_shared, nothing_changed
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeOutput, DecodePlan
from mla_plugin.hooks.types import Accepted, Refused
from mla_plugin.operations.decode.api import decode

if TYPE_CHECKING:
    import pytest


class DecodeConformance(Suite):
    """Subclass it in a test file, name the backend and what it refuses; pytest collects the rest.

    The attributes are those of ``BackendConformance``; the tags that ``refuses`` may name are ``DecodeCase.tags``.

    Attributes:
        lowest_score: the score of every key in the call that tests hidden keys; higher for a library that takes lower
            scores for hidden.
    """

    lowest_score: float = -65536.0

    def cases(self) -> tuple[DecodeCase, ...]:
        """The cases to run, made for what the backend accepts; override it to add your own."""
        made = self._once(lambda: decode_catalogue_for(self._accepts), whole_decode_catalogue)
        small = made.selected(is_quick=self.quick, is_slow=self.is_slow)
        quantised = tuple(case for case in quantised_cases() if self._accepts(case))
        on_cuda = torch.device(self.device).type == "cuda" and not self.quick
        return small + quantised + (decode_cases(large=True) if on_cuda else ())

    def _accepts(self, case: DecodeCase) -> bool:
        return self.takes(case.request(self.device))

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test for each case."""
        if "decode_case" in metafunc.fixturenames:
            metafunc.parametrize("decode_case", self.cases(), ids=str)

    def test_every_expected_refusal_names_a_case(self) -> None:
        """A key of ``refuses`` that fits no case is a misspelling, or left over."""
        self.check_keys([case.tags | {case.name} for case in self.cases()])

    def test_something_is_computed(self) -> None:
        """A backend that refuses every case has shown nothing."""
        given = self.cases()
        if self.refuses is not None and not any(map(self._accepts, given)):
            checks.fail(f"{self.backend} refuses all {len(given)} cases, so nothing of it was tested")

    def test_attention_is_answered(self) -> None:
        """A backend of decode answers a request for attention too."""
        device_type = torch.device(self.device).type
        request = AttentionRequest("bshd", torch.bfloat16, device_type, 2, 4, 4, 8, 8, 192, 128)
        if not isinstance(answer := self._answer(request), Accepted | Refused):
            checks.fail(f"select_backend of {self.backend} answers an AttentionRequest with {answer!r}; return Refused")

    def test_every_request_is_answered(self) -> None:
        """On any platform, from any host, for the smallest cache and the largest."""
        plain = DecodeCase("").request(self.device)
        sizes: tuple[dict[str, Any], ...] = ({}, {"batch_size": 0}, {"seqlen_q": 0}, {"max_seqlen_kv": 2**40})
        hosts = ({"host": host} for host in HOSTS)
        self.check_every_request_is_answered([plain.replace(**changes) for changes in (*sizes, *hosts)])

    def test_batch_invariance(self) -> None:
        """Asked for ``batch_invariant``, refuse, or give each query the bits that it has alone."""
        check_batch_invariance(self)

    def test_decode(self, decode_case: DecodeCase) -> None:
        """Refuse with reasons, or compute out and lse: for two calls at once, again, and in the same memory.

        Each call's results are kept while the next ones run. The second has other data and other lengths, the last one
        has them in the memory of the first, as the next step of a generation has, and then fills the cache; one query
        has NaN there, first in its rope and then in the rest.
        """
        plan = self._plan(decode_case)
        if plan is None:
            return
        generator, other = self._generator(), decode_case.other()
        first = decode_case.tensors(self.device, generator, self.padding_poison)
        second = other.tensors(self.device, generator, self.padding_poison, is_guarded=False)
        calls, output = [(decode_case, first, expected(first))], self.forward(plan, first)
        _check_output(decode_case, output, calls[0][2])
        kept = Kept("of one call", out=output.out, lse=output.lse)
        if self._repeats(decode_case.name):
            calls.append((other, second, expected(second)))
            _check_output(other, self.forward(plan, second), calls[1][2])
        kept.check()
        for _ in range(2 if self._repeats(decode_case.name) else 1):  # a fault may come at every second call
            again = self.forward(plan, first)
            for name, x in output._asdict().items():
                if x is not None and not torch.equal(x, getattr(again, name)):
                    checks.fail(f"{name} differs between two calls with the same tensors")
        if self._goes_through_the_library() and self._repeats(decode_case.name):
            for call in calls:
                self._check_library(*call)
        longer = _with_lengths(decode_case, (decode_case.capacity,) * len(decode_case.lengths))
        cases = (other, longer) if decode_case.has_seqlens_kv and self._repeats(decode_case.name) else (other,)
        for case, q in zip(
            cases, (first.q_rope if decode_case.rope else first.q_nope_abs, first.q_nope_abs), strict=False
        ):
            _copy(first, case.tensors(self.device, generator, self.padding_poison))
            self._check_spoilt(plan, case, first, q, generator)
        kept.check()
        if torch.device(self.device).type == "cuda" and decode_case.has_seqlens_kv:
            self._check_captured_graph(plan, decode_case, first)
        if not isinstance(self._answer(plan.request), Accepted):
            checks.fail(
                "select_backend answers a request differently after the call; the answer is cached and must not change"
            )

    def test_unusual_values(self) -> None:
        """Zeros, scores far below zero, no keys at all, NaN."""
        values.check_values(self)

    def test_surroundings(self) -> None:
        """Other settings of PyTorch, another thread, inference mode; memory is given back."""
        values.check_surroundings(self)

    def test_unlike_calls(self) -> None:
        """Calls of other sizes and dtypes one after the other."""
        values.check_unlike_calls(self)

    def test_at_the_same_time(self) -> None:
        """Two threads that compute the same kind of call."""
        if not self.is_slow:
            values.check_at_the_same_time(self)

    def test_sizes_beside_features(self) -> None:
        """Long, wide and many beside everything else, each once."""
        mixed.check(self)

    def test_every_size(self) -> None:
        """One call of each width, size of pages and number of heads, sequences and keys, beside options of this run."""
        if not self.is_slow:
            values.check_every_size(self)

    def test_drawn_calls(self) -> None:
        """Sizes and options of this run alone; what the backend refuses is drawn again."""
        drawn.check_drawn_calls(self)

    def test_more_than_two_billion_elements(self) -> None:
        """With 8 GiB of free memory: rows of the cache beyond what 32 bits count."""
        if self.quick or self.is_slow:
            return
        check_memory(self.device, 8 << 30)
        with not_run_without_memory():
            self.check_far_rows(2**31 + 2**24)
        if torch.device(self.device).type == "cuda":
            torch.cuda.empty_cache()  # other processes may share the device

    def test_many_sequences(self) -> None:
        """Thousands of sequences in one call."""
        if not self.quick and not self.is_slow:
            for case, _ in values.plain_calls(self, of_any_format=True):
                check_many_sequences(self, case)

    def check_far_rows(self, elements: int) -> None:
        """Sequences in the last pages of a cache of so many elements, and as the last of a contiguous one's."""
        generator, device = self._generator(), torch.device(self.device)
        for page_size in (64, None):
            case = DecodeCase(
                "", torch.bfloat16, (130, 1, 97), 2, 16, 512, 64, page_size=page_size, has_host_lengths=True
            )
            request = case.request(device)
            if not isinstance(self._answer(request), Accepted):
                continue
            small, width = case.tensors(device, generator, self.padding_poison), case.rank + case.rope
            rows = -(-elements // width)
            if page_size is None:
                batch = len(case.lengths)
                cache = _untouched((batch, -(-rows // batch), width), case.dtype, device)
                cache[:, : case.capacity, : case.rank] = small.c_kv
                cache[:, : case.capacity, case.rank :] = small.k_rope
                far = small._replace(c_kv=cache[..., : case.rank], k_rope=cache[..., case.rank :])
            else:
                assert small.page_table is not None
                cache = _untouched((-(-rows // page_size), page_size, width), case.dtype, device)
                pages, first = len(small.c_kv), len(cache) - len(small.c_kv)
                cache[-pages:, :, : case.rank], cache[-pages:, :, case.rank :] = small.c_kv, small.k_rope
                far = small._replace(
                    c_kv=cache[..., : case.rank], k_rope=cache[..., case.rank :], page_table=small.page_table + first
                )
            request = request.replace(max_seqlen_kv=cache.shape[1]) if page_size is None else request
            output = self.run(DecodePlan(request, self.platform(), self.backend), far)
            self.check_output(case, far, output)

    def check_once(self, case: DecodeCase, words: str) -> None:
        """A case, unwatched; nothing where the backend refuses it."""
        request = case.request(self.device)
        if not self.takes(request):
            return
        tensors = case.tensors(self.device, self._generator(), self.padding_poison)
        try:
            self.check_output(case, tensors, self.run(DecodePlan(request, self.platform(), self.backend), tensors))
        except checks.ConformanceError as error:
            checks.fail(f"{words}, in {case!r}: {error}")

    def check_output(self, case: DecodeCase, tensors: DecodeTensors, output: DecodeOutput) -> None:
        """Shapes and dtypes, zeros and -inf where no key is seen, errors in budget."""
        _check_output(case, output, expected(tensors))

    def check_results(self, case: DecodeCase, output: DecodeOutput, wanted: tuple[Yardstick, Yardstick]) -> None:
        """``check_output`` against results that are known."""
        _check_output(case, output, wanted)

    def drops_nan(self, plan: DecodePlan) -> bool:
        """See ``Accepted``."""
        answer = self._answer(plan.request)
        return isinstance(answer, Accepted) and answer.drops_nan

    def _check_spoilt(
        self, plan: DecodePlan, case: DecodeCase, tensors: DecodeTensors, q: torch.Tensor, generator: torch.Generator
    ) -> None:
        """A call one of whose queries gets NaN in ``q``, if that is possible."""
        wanted, layout = expected(tensors), LAYOUTS["bshd"]
        place = spoilt.spoil(q, wanted[1].exact, layout, generator)
        output = self.forward(plan, tensors)
        if place is not None:
            spoilt.repair(place, output.out, output.lse, wanted, layout, self.drops_nan(plan))
        _check_output(case, output, wanted)

    def _check_library(self, case: DecodeCase, tensors: DecodeTensors, wanted: tuple[Yardstick, Yardstick]) -> None:
        """The same call through ``mla_plugin.decode``."""
        with as_the_process_manager(self._manager()):
            result = decode(
                tensors.q_nope_abs,
                tensors.q_rope,
                _whole(tensors),
                softmax_scale=tensors.softmax_scale,
                page_table=tensors.page_table,
                seqlens_kv=tensors.lengths or tensors.seqlens_kv,
                leftpad_kv=tensors.leftpad_kv,
                causal=tensors.causal,
                return_lse=tensors.return_lse,
                backend=self.backend,
                kv_cache_format=tensors.kv_cache_format,
                kv_scale=tensors.kv_scale if tensors.kv_cache_format == FP8 else None,
            )
        out, lse = result if isinstance(result, tuple) else (result, None)
        _check_output(case, DecodeOutput(out, lse), wanted)

    def _check_captured_graph(self, plan: DecodePlan, decode_case: DecodeCase, tensors: DecodeTensors) -> None:
        """A CUDA graph of a call, replayed with other lengths, pages and numbers in the same memory."""
        generator = self._generator()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.run(plan, tensors)
        lengths = [torch.randint(0, decode_case.capacity + 1, (1,), generator=generator).item() for _ in tensors[0]]
        for each in (lengths, decode_case.lengths):
            other = _with_lengths(decode_case, tuple(int(length) for length in each))
            _copy(tensors, other.tensors(self.device, generator, self.padding_poison))
            graph.replay()
            self.check_output(other, tensors, output)

    def _plan(self, case: DecodeCase) -> DecodePlan | None:
        """A plan for the case, or None after a refusal that was expected."""
        request = case.request(self.device)
        if self.decide(request, str(case), case.tags | {case.name}) is None:
            return None
        return DecodePlan(request, self.platform(), self.backend)

    def forward(self, plan: DecodePlan, tensors: DecodeTensors) -> DecodeOutput:
        """Call the hook and watch what it does to memory and, once it has planned, to the host."""
        device_type = torch.device(self.device).type
        inputs = {name: x for name, x in tensors._asdict().items() if isinstance(x, torch.Tensor)}
        if tensors.host_lengths is not None:
            inputs["lengths.host"] = tensors.host_lengths
        if device_type == "cuda":
            self.run(plan, tensors)
        living = [plan, plan.request] if tensors.lengths is None else [plan, plan.request, tensors.lengths]
        state = None if tensors.lengths is None else tensors.lengths._state()
        with nothing_changed(*living), as_the_library(device_type, inputs, is_poisoned=True):
            output = self.run(plan, tensors)
        if tensors.lengths is not None and tensors.lengths._state() != state:
            checks.fail("the hook updated the DecodeLengths of the call, which drops what other layers keep there")
        check_no_graph(out=output.out, lse=output.lse)
        check_not_shared(output._asdict(), inputs)
        return output

    def run(self, plan: DecodePlan, tensors: DecodeTensors) -> DecodeOutput:
        """Call the hook, unwatched."""
        output = self._manager().caller("forward", self.backend)(plan=plan, tensors=tensors)
        if not isinstance(output, DecodeOutput):
            checks.fail(f"forward must return a DecodeOutput for DecodeTensors, not {type(output).__name__}")
        return output


def _untouched(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU memory of this size comes from the system, which gives pages of zeros when they are touched."""
    make = torch.empty if device.type == "cpu" and math.prod(shape) >= 2**30 else torch.zeros
    return make(shape, dtype=dtype, device=device)


def _whole(tensors: DecodeTensors) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The cache as ``mla_plugin.decode`` takes it."""
    if tensors.kv_cache_format != FP8_DS_MLA:
        return tensors.c_kv, tensors.k_rope
    c_kv = tensors.c_kv  # the first bytes of each token
    return c_kv.as_strided((*c_kv.shape[:2], TOKEN_BYTES), c_kv.stride())


def _with_lengths(case: DecodeCase, lengths: tuple[int, ...]) -> DecodeCase:
    """The case with other lengths in a cache of the same size."""
    values = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return DecodeCase(**(values | {"lengths": lengths, "rows": case.capacity}))


def _copy(target: DecodeTensors, source: DecodeTensors) -> None:
    """New contents for the same memory; lengths that the host holds are updated last, as a plan takes all the rest."""
    for name, x in source._asdict().items():
        if isinstance(x, torch.Tensor) and (name != "seqlens_kv" or target.host_lengths is None):
            there = getattr(target, name).data  # no version counter says it
            for axis in range(there.dim()):
                if there.stride(axis) == 0:
                    there, x = there.narrow(axis, 0, 1), x.narrow(axis, 0, 1)
            there.copy_(x)
    if isinstance(target.lengths, DecodeLengths) and source.lengths is not None:
        target.lengths.update(source.host_lengths)


def _check_output(case: DecodeCase, output: DecodeOutput, wanted: tuple[Yardstick, Yardstick]) -> None:
    out, lse = wanted
    rows = lse.exact.isneginf().transpose(1, 2)[..., None]
    checks.check_tensor("out", output.out, out.exact, case.dtype)
    checks.check_zero("out", output.out, rows)
    checks.check_error("out", output.out, out)
    if case.return_lse:
        checks.check_tensor("lse", output.lse, lse.exact, lse_dtype(case.dtype))
        assert output.lse is not None
        checks.check_lse(output.lse, lse)
    elif output.lse is not None:
        checks.fail("lse is a tensor although return_lse=False; expected None")
