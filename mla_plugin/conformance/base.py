"""Shared by the suites of both operations: the backend, its decisions, its expected refusals."""

from __future__ import annotations

import difflib
import itertools
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch

from mla_plugin import environment
from mla_plugin.conformance import checks, settings
from mla_plugin.conformance.attention.case import PADDING_POISON
from mla_plugin.conformance.watch import check_same_in_other_environments, random_state_kept
from mla_plugin.device import platform
from mla_plugin.hooks.attention import AttentionRequest
from mla_plugin.hooks.decode import DecodeRequest
from mla_plugin.hooks.manager import BackendManager, get_manager
from mla_plugin.hooks.refusals import if_it_reads_the_cache
from mla_plugin.hooks.types import Accepted, Platform, Refused

MadeT = TypeVar("MadeT")
_made: dict[tuple[Any, ...], Any] = {}
"""The cases for each backend, cached: every test needs them, and they take thousands of decisions."""
_GPUS = (((7, 5), None, 64, 40), ((9, 0), "12.8", 227, 132), ((12, 1), "13.0", 99, 48))
_PLATFORMS = (
    Platform("cpu"),
    *(
        Platform("cuda", capability, cuda_version=cuda, shared_memory_per_block=kib << 10, multi_processor_count=count)
        for capability, cuda, kib, count in _GPUS
    ),
)
"""Those that a backend is asked about besides its own: without packages, of GPUs before and after most kernels."""
_DECIDING = ("platform", "takes", "_answer", "_manager")
"""Methods of a suite that its cases depend on, besides ``_accepts``."""


class Suite:
    """The attributes and decisions of a suite; see ``BackendConformance``."""

    backend: str = ""
    device: str = "cpu"
    refuses: Mapping[str, str] | None = MappingProxyType({})
    manager: BackendManager | None = None
    seed: int | None = None
    padding_poison: float = PADDING_POISON
    quick: bool = False
    is_slow: bool = False
    decision: Accepted | Refused | None = None
    """The answer to the last case, for the matrix."""
    _answers: dict[Any, bool] | None = None

    def platform(self) -> Platform:
        """The platform of the requests; override it if a test replaces the backend's library."""
        device = torch.device(self.device)
        return platform(device.type, device.index)

    def takes(self, request: AttentionRequest | DecodeRequest) -> bool:
        """Whether the backend accepts a request; an error counts as accepted, so that a test shows it."""
        answers = self._answers
        found = None if answers is None else answers.get(request)
        if found is not None:
            return found
        try:
            found = not isinstance(self._answer(request), Refused)
        except Exception:
            found = True
        if answers is not None:
            answers[request] = found
        return found

    def _once(self, make: Callable[[], MadeT], otherwise: Callable[[], MadeT]) -> MadeT:
        """The result of ``make``, computed once for each backend; of ``otherwise`` without such a device.

        Suites of one backend share it, if none of them replaces what decides. Meanwhile the backend is asked once for
        each request, because many rows have the same one.
        """
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            return otherwise()
        own = type(self)
        replaces = any(getattr(own, name) is not getattr(Suite, name) for name in _DECIDING)
        key = (own if replaces else own._accepts, self.backend, self.device, self.manager)
        if key not in _made:
            self._answers = {}
            try:
                _made[key] = make()
            finally:
                self._answers = None
        return cast(MadeT, _made[key])

    def _accepts(self, case: Any) -> bool:
        raise NotImplementedError

    def expected(self, labels: frozenset[str]) -> tuple[str, ...]:
        """Texts that the reasons must contain for a case of these tags."""
        return tuple(text for key, text in (self.refuses or {}).items() if labels.issuperset(key.split()))

    def check_keys(self, labels: list[frozenset[str]]) -> None:
        """Every key of ``refuses`` is a case or tags that one case has together."""
        known = sorted(frozenset().union(*labels))
        for key in self.refuses or ():
            if any(found.issuperset(key.split()) for found in labels):
                continue
            unknown = [tag for tag in key.split() if tag not in known]
            tags = [tag for tag in known if not tag.startswith(("pairs-", "alone-"))]
            close = [near for tag in unknown for near in difflib.get_close_matches(tag, tags, 2)]
            hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
            what = f"{', '.join(map(repr, unknown))} is no tag" if unknown else "each is a tag, no case has them all"
            checks.fail(
                f"refuses names {key!r}, which is neither a case nor tags that one case has together: {what}{hint} "
                f"Tags: {', '.join(tags)}"
            )

    def decide(self, request: AttentionRequest | DecodeRequest, name: str, labels: Iterable[str]) -> Accepted | None:
        """The acceptance of a case, or None after a refusal that was expected."""
        labels = frozenset(labels)
        expected = self.expected(labels)
        decision = self.decision = self._checked_answer(request)
        if isinstance(decision, Accepted):
            if expected:
                checks.fail(f"{self.backend} accepts {name}, but is expected to refuse it with {expected}")
            return decision
        checks.check_reasons(decision.reasons, request)
        if not expected and self.refuses is not None:
            checks.fail(
                f"{self.backend} refuses {name}, which it is expected to compute: {'; '.join(decision.reasons)}. "
                f"If that is meant, add to refuses the case or one of its tags: {', '.join(sorted(labels))}"
            )
        for text in expected:
            if not any(text in reason for reason in decision.reasons):
                checks.fail(f"{self.backend} refuses {name}, but {text!r} is in none of its reasons {decision.reasons}")
        return None

    def _checked_answer(self, request: AttentionRequest | DecodeRequest) -> Accepted | Refused:
        with random_state_kept(torch.device(self.device).type):
            decision = self._answer(request)
        if not isinstance(decision, Accepted | Refused):
            checks.fail(f"select_backend must return Accepted or Refused, not {decision!r}")
        check_same_in_other_environments(lambda: self._answer(request), decision)
        return decision

    def _answer(self, request: AttentionRequest | DecodeRequest) -> Any:
        return self._answer_on(request, self.platform())

    def _answer_on(self, request: AttentionRequest | DecodeRequest, on: Platform) -> Any:
        """What the backend answers on a platform. It must leave the request as it was, and the environment.

        The latter is not looked at while cases are made, of hundreds of requests, where ``takes`` hides errors.
        """
        makes_cases = self._answers is not None
        before, variables = request.replace(), {} if makes_cases else environment.variables()
        answers = self._manager().caller("select_backend", self.backend)(request=request, platform=on)
        if request != before:
            checks.fail(f"select_backend changed its request, which was {before} and is {request}")
        if not makes_cases and (now := environment.variables()) != variables:
            changed = sorted(name for name in {*variables, *now} if variables.get(name) != now.get(name))
            checks.fail(f"select_backend changed the environment variables {', '.join(changed)}")
        answer = answers[0] if len(answers) == 1 else None
        return if_it_reads_the_cache(answer, request) if isinstance(answer, Accepted | Refused) else answer

    def check_answers_under_other_settings(self, requests: Iterable[AttentionRequest | DecodeRequest]) -> None:
        """Fail unless ``select_backend`` answers each as before: its answer is kept for all calls of the request.

        It changes no setting itself, and prints nothing.
        """
        asked = list(dict.fromkeys(requests))
        answers = [self._answer(request) for request in asked]
        settings.check_settings_are_kept(lambda: [self._answer(request) for request in asked])
        with settings.unusual_settings():
            others = [self._answer(request) for request in asked]
        for request, answer, other in zip(asked, answers, others, strict=True):
            if other != answer:
                checks.fail(
                    f"select_backend answers {other} under other settings of PyTorch, otherwise {answer}; "
                    f"expected one, for {request}"
                )

    def check_every_request_is_answered(self, requests: Iterable[AttentionRequest | DecodeRequest]) -> None:
        """Fail unless each gets an answer on any platform: every backend is asked, and ``explain`` asks for others."""
        for request, on in itertools.product(requests, _PLATFORMS):
            asked = request.replace(device_type=on.device_type)
            try:
                answer = self._answer_on(asked, on)
            except checks.ConformanceError:
                raise
            except Exception as error:
                checks.fail(f"select_backend raises {error!r} for {asked} on {on}; expected Accepted or Refused")
            if not isinstance(answer, Accepted | Refused):
                checks.fail(f"select_backend answers {answer!r} for {asked} on {on}; expected Accepted or Refused")
            if isinstance(answer, Refused):
                checks.check_reasons(answer.reasons, asked)

    def _repeats(self, name: str) -> bool:
        """Whether a case makes a second call and one through the library: for a slow backend one case in four does."""
        return not self.is_slow or zlib.crc32(name.encode()) % 4 == 0

    def _goes_through_the_library(self) -> bool:
        """False where the platform is replaced: the library would judge the request for the real one."""
        return type(self).platform is Suite.platform

    def _manager(self) -> BackendManager:
        return get_manager() if self.manager is None else self.manager

    def _generator(self) -> torch.Generator:
        seed = secrets.randbits(31) if self.seed is None else self.seed
        print(f"seed = {seed}")  # pytest shows it when the test fails
        return torch.Generator().manual_seed(seed)
