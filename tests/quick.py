"""The lane of a minute, ``python -m pytest -m quick``: one case of each test function, chosen by its name.

For fast feedback on one change; ``.ci/run`` runs everything.
"""

from __future__ import annotations

import contextlib
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.repository.project import ROOT

LEFT_OUT = (
    "tests/cli/test_demo.py",
    "tests/cli/test_terminal.py::test_a_reader_that_ends_early_is_no_error",
    "tests/compat/megatron/",
    "tests/compat/sglang/test_releases.py::test_a_release",
    "tests/compat/test_torchtitan.py",
    "tests/compat/test_transformer_engine.py",
    "tests/compat/test_transformers_attention.py::test_dropout_follows_its_argument",
    "tests/compat/test_transformers_attention.py::test_one_graph_under_torch_compile",
    "tests/compat/test_transformers_composite.py::test_tokens_drafted_by_the_models_own_layers",
    "tests/compat/test_transformers_latent_layers.py",
    "tests/compat/test_transformers_models.py::test_a_compiled_model_trains_by_the_same_forms",
    "tests/compat/test_transformers_models.py::test_generate_from_a_left_padded_batch",
    "tests/compat/test_transformers_ranks.py::test_two_ranks",
    "tests/compat/test_transformers_versions.py",
    "tests/compat/vllm/test_releases.py::test_a_release",
    "tests/conformance/test_cases.py::test_the_oracle_is_autograd_through_the_reference",
    "tests/conformance/test_pages.py",
    "tests/conformance/test_suite.py::TestCommand",
    "tests/conformance/test_suite.py::TestExactAttention",
    "tests/conformance/test_suite.py::TestNanInThePadding",
    "tests/conformance/test_suite.py::TestPlainAttention::test_compiled",
    "tests/conformance/test_suite.py::TestPlainAttention::test_surroundings",
    "tests/conformance/test_suite.py::TestPlainAttention::test_unlike_calls",
    "tests/conformance/test_suite.py::TestPlainAttention::test_unusual_values",
    "tests/conformance/test_suite.py::TestPlainDecode::test_surroundings",
    "tests/conformance/test_suite.py::TestPlainDecode::test_unlike_calls",
    "tests/conformance/test_suite.py::TestPlainDecode::test_unusual_values",
    "tests/conformance/test_suite.py::test_a_test_file_of_another_package",
    "tests/conformance/test_suite.py::test_cases_are_made_for_what_a_backend_accepts",
    "tests/conformance/test_suite.py::test_decode_cases_are_the_requests_that_the_library_makes",
    "tests/conformance/test_suite.py::test_importing_it_loads_no_kernel_library",
    "tests/conformance/test_suite.py::test_the_correct_backends_pass_what_catches_the_broken_ones",
    "tests/context_parallel/test_calls.py",
    "tests/context_parallel/test_decode.py",
    "tests/context_parallel/test_errors.py",
    "tests/context_parallel/test_explain.py::test_what_is_explained_is_what_runs",
    "tests/context_parallel/test_failures.py",
    "tests/context_parallel/test_latent.py",
    "tests/context_parallel/test_latent_calls.py",
    "tests/context_parallel/test_megatron.py",
    "tests/context_parallel/test_transformers.py",
    "tests/context_parallel/test_ways.py",
    "tests/docs/test_code_blocks.py::test_python_runs",
    "tests/docs/test_site.py",
    "tests/gpu/",
    "tests/hooks/test_pluggy_versions.py",
    "tests/hooks/test_registry.py::test_threads_that_register_unregister_and_compute",
    "tests/kernels/test_attention.py",
    "tests/kernels/test_compiler_record.py",
    "tests/kernels/test_decode.py::test_a_length_beyond_the_cache_counts_as_all_of_it",
    "tests/kernels/test_decode.py::test_an_odd_number_of_elements_over_parts",
    "tests/kernels/test_decode.py::test_descriptors_do_not_pile_up",
    "tests/kernels/test_decode.py::test_layers_with_caches_of_one_layout",
    "tests/kernels/test_decode.py::test_leftpad_with_many_rows",
    "tests/kernels/test_decode.py::test_more_pieces_than_a_step_of_the_combine_kernel",
    "tests/kernels/test_decode.py::test_one_cache_for_all_sequences_and_a_cut_one",
    "tests/kernels/test_decode.py::test_paged_cache_with_many_rows",
    "tests/kernels/test_decode.py::test_strides_that_descriptors_cannot_take",
    "tests/kernels/test_decode.py::test_tensor_descriptors",
    "tests/kernels/test_decode.py::test_tensor_descriptors_over_parts",
    "tests/kernels/test_decode.py::test_two_column_blocks_over_parts",
    "tests/kernels/test_decode_ahead_of_time.py",
    "tests/kernels/test_decode_arithmetic.py",
    "tests/kernels/test_decode_interface.py::test_compiled_equals_eager",
    "tests/kernels/test_decode_interface.py::test_the_operator_is_well_formed",
    "tests/kernels/test_decode_invariant.py",
    "tests/kernels/test_hopper_ahead_of_time.py",
    "tests/kernels/test_hopper_decode.py::test_factors_in_combination",
    "tests/kernels/test_hopper_decode.py::test_queries_that_are_views",
    "tests/kernels/test_hopper_decode.py::test_runs_agree_bit_for_bit_in_any_order_of_warps",
    "tests/kernels/test_hopper_gathering.py::test_c_kv_and_k_rope_of_unlike_strides",
    "tests/kernels/test_hopper_gathering.py::test_no_entry_behind_the_last_page_is_read",
    "tests/kernels/test_hopper_interpreted.py::test_backward",
    "tests/kernels/test_prefill_ahead_of_time.py",
    "tests/kernels/test_prefill_descriptors.py::test_gradients_by_descriptors",
    "tests/kernels/test_prefill_draws.py",
    "tests/kernels/test_shared_heads.py::test_as_by_definition",
    "tests/kernels/test_shared_heads.py::test_sums_of_copies_are_rounded_once",
    "tests/kernels/test_sources.py",
    "tests/kernels/test_tuning.py",
    "tests/plugins/test_cudnn.py::TestCudaPath::test_every_expected_refusal_names_a_case",
    "tests/plugins/test_cudnn.py::TestCudaPath::test_unusual_values",
    "tests/plugins/test_decode_conformance.py::TestFlashInferEmulated::test_every_expected_refusal_names_a_case",
    "tests/plugins/test_decode_conformance.py::TestFlashInferEmulated::test_surroundings",
    "tests/plugins/test_decode_conformance.py::TestFlashInferEmulated::test_unusual_values",
    "tests/plugins/test_decode_conformance.py::TestFlashMLAEmulated::test_every_expected_refusal_names_a_case",
    "tests/plugins/test_decode_conformance.py::TestTritonInterpreted",
    "tests/plugins/test_fa2.py::TestPyTorchs::test_unusual_values",
    "tests/plugins/test_fa3.py::TestOlderFlashAttn3",
    "tests/plugins/test_fa3_decode.py::TestOwnPackage::test_surroundings",
    "tests/plugins/test_fa3_decode.py::TestSglKernel",
    "tests/plugins/test_fa3_decode.py::TestVllm::test_surroundings",
    "tests/plugins/test_fa4.py::TestFlashAttn4::test_unusual_values",
    "tests/plugins/test_fa_random.py",
    "tests/plugins/test_flashinfer.py::test_a_page_table_for_each_step_leaves_no_plans_behind",
    "tests/plugins/test_flashinfer.py::test_the_next_step_plans_again_in_the_same_memory",
    "tests/plugins/test_sdpa.py::TestCpu::test_compiled",
    "tests/plugins/test_sdpa.py::TestCpu::test_surroundings",
    "tests/plugins/test_sdpa.py::TestCpu::test_unusual_values",
    "tests/plugins/test_sdpa.py::TestCudaPath::test_unusual_values",
    "tests/plugins/test_sdpa_batches.py::test_packed_bfloat16_takes_little_more_memory_than_pytorch",
    "tests/plugins/test_triton.py::TestInterpreter",
    "tests/plugins/test_triton_features.py::TestInterpreter",
    "tests/plugins/test_triton_rows.py",
    "tests/repository/test_environment_reader.py::test_only_the_reader_reads",
    "tests/repository/test_light_import.py",
    "tests/repository/test_readme.py",
    "tests/repository/test_warm_call.py",
    "tests/repository/test_wheel.py",
    "tests/resolver/test_resolve.py::test_nvte_debug_reaches_stderr_of_a_program_without_logging",
    "tests/resolver/test_te_cascade.py::test_every_rule_fires_and_holds_back",
    "tests/resolver/test_te_coverage.py",
    "tests/test_cache.py::test_append_is_traced_whole",
    "tests/test_decode_layout.py::test_hooks_may_be_called_by_hand",
    "tests/test_distribution.py::test_files_and_groups_stay_together",
    "tests/test_latent_attention.py::test_opcheck",
    "tests/test_ops.py::test_compiled_equals_eager_forward_and_backward",
    "tests/test_ops.py::test_gradcheck",
    "tests/test_preparation.py",
    "tests/test_quick.py::test_one_case_of_a_function_is_chosen",
    "tests/test_reference.py::test_gradients_equal_finite_differences",
    "tests/test_request.py::test_a_pickled_request_is_found_in_another_process",
    "tests/test_run.py::test_a_host_that_is_too_old_is_a_warning_unless_it_is_named",
    "tests/test_run.py::test_a_module_is_run_as_one",
    "tests/test_run.py::test_a_program_that_imports_",
    "tests/test_run.py::test_what_is_wrong_is_named",
    "tests/test_third_party.py",
)
"""What starts other processes, compiles, installs packages, needs every case, or takes seconds otherwise."""


def is_left_out(path: Path) -> bool:
    """Every test of a file or a folder is left out, so the lane need not import it."""
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return bool(name) and (name in LEFT_OUT or f"{name}/" in LEFT_OUT)


def keep_one_call(metafunc: pytest.Metafunc) -> None:
    """Keep only the chosen case of a function, before pytest makes an item of each case, which takes half a minute.

    pytest has no hook at this point, so this changes the list that it has collected, ``_calls``.
    """
    calls = metafunc._calls
    if len(calls) > 1 and not any(call.marks for call in calls):  # a mark may be one that excludes
        name = f"{metafunc.definition.nodeid}[{{}}]"
        calls[:] = [min(calls, key=lambda call: _order(name.format(call.id)))]


_made_here: dict[Any, Any] = {}


@contextlib.contextmanager
def cases_as_they_are(is_wanted: bool) -> Iterator[None]:
    """Let suites filter the cases of a backend that accepts everything, instead of generating cases for their own.

    Generating takes half a second for each suite, and all but one case of a function would be dropped. So nothing is
    selected either, and what is made here is not kept.
    """
    if not is_wanted:
        yield
        return
    from mla_plugin.conformance import base
    from mla_plugin.conformance.attention import suite as attention
    from mla_plugin.conformance.decode import suite as decode
    from mla_plugin.conformance.selection import Catalogue

    def accepted_of(every: Callable[[], tuple[Any, ...]]) -> Callable[[Callable[[Any], bool]], Catalogue[Any]]:
        return lambda accepts: Catalogue(tuple(filter(accepts, every())), (), (), ())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "catalogue_for", accepted_of(attention.cases))
        patch.setattr(decode, "decode_catalogue_for", accepted_of(decode.decode_cases))
        patch.setattr(Catalogue, "selected", lambda self, **_: self.all())
        patch.setattr(base, "_made", _made_here)
        yield


def mark(items: Iterable[pytest.Item]) -> None:
    """Give the chosen tests the mark ``quick``."""
    functions: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not item.nodeid.startswith(LEFT_OUT) and not item.get_closest_marker("gpu"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        min(cases, key=lambda item: _order(item.nodeid)).add_marker("quick")


def _order(nodeid: str) -> int:
    """A position that looks random and is the same in every run."""
    return zlib.crc32(nodeid.encode())
