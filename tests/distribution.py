"""Which process runs which tests under ``pytest -n 2 --dist loadgroup``, and which start first.

xdist hands out every test without a group by itself. What a file makes once is then made by each process, and its
scheduler, which counts all that it has handed out after each test, takes half a minute. So the tests of a file stay
together here. What takes longest starts first, so that no process is left with it at the end.
"""

from __future__ import annotations

from xdist.scheduler.loadgroup import LoadGroupScheduling
from xdist.workermanage import WorkerController

LONGEST: tuple[str, ...] = (
    "tests/conformance/test_suite.py",
    "tests/compat/test_transformer_engine.py",
    "tests/plugins/test_sdpa.py",
    "tests/test_third_party.py",
    "tests/compat/test_transformers_versions.py",
    "tests/compat/megatron/test_versions.py",
    "tests/plugins/test_decode_conformance.py",
    "context_parallel",
    "megatron",
    "tests/plugins/test_fa3.py",
    "tests/test_ops.py",
    "tests/plugins/test_fa2.py",
    "compiler",
    "tests/kernels/test_hopper_gathering.py",
    "tests/plugins/test_flashinfer.py",
    "tests/plugins/test_triton.py",
    "tests/plugins/test_triton_features.py",
    "tests/kernels/test_decode.py",
    "tests/test_run.py",
    "tests/compat/vllm/test_releases.py",
    "tests/compat/sglang/test_releases.py",
    "tests/plugins/test_fa4.py",
    "tests/docs/test_code_blocks.py",
    "tests/kernels/test_attention.py",
    "tests/compat/test_transformers_models.py",
    "tests/hooks/test_pluggy_versions.py",
    "tests/compat/test_transformers_latent_layers.py",
    "tests/plugins/test_sdpa_nan.py",
    "tests/kernels/test_prefill_draws.py",
    "tests/repository/test_wheel.py",
    "tests/kernels/test_sources.py",
    "tests/test_preparation.py",
    "tests/compat/test_transformers_ranks.py",
    "tests/conformance/test_many_seeds.py",
    "tests/kernels/test_decode_arithmetic.py",
    "tests/compat/test_torchtitan.py",
    "tests/resolver/test_te_coverage.py",
)
"""Groups and files that take more than five seconds, in this order; the others follow by their number of tests."""


class ByFile(LoadGroupScheduling):
    """``xdist_group`` marks what several files share; the rest is grouped by file."""

    def _split_scope(self, nodeid: str) -> str:
        """The group of a test, or its file."""
        group = super()._split_scope(nodeid)
        return nodeid.partition("::")[0] if group == nodeid else group

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Hand out what takes longest of the rest."""
        self.workqueue.move_to_end(min(self.workqueue, key=self._order), last=False)
        super()._assign_work_unit(node)

    def _order(self, scope: str) -> tuple[int, int]:
        return LONGEST.index(scope) if scope in LONGEST else len(LONGEST), -len(self.workqueue[scope])
