import os
import sys
import threading

import pytest

from mla_plugin import environment
from mla_plugin.cli import main
from mla_plugin.environment import EnvironmentVariableError
from mla_plugin.variables import VARIABLES

INTEGERS = [v.name for v in VARIABLES if v.accepted.startswith("an integer")]
ONES = [v.name for v in VARIABLES if v.accepted.startswith('exactly "1"; anything')]
READ_BY_SELECTION = {
    "NVTE_FLASH_ATTN",
    "NVTE_FLASH_ATTN_V2",
    "NVTE_FLASH_ATTN_V3",
    "NVTE_FLASH_ATTN_V4",
    "NVTE_FUSED_ATTN",
    "NVTE_UNFUSED_ATTN",
    "NVTE_MLA_TRITON",
    "MLA_PLUGIN_BACKEND",
    "MLA_PLUGIN_BLOCK",
    "MLA_PLUGIN_STRICT_TE",
    "MLA_PLUGIN_TE",
}


def test_the_table_holds_every_variable_that_transformer_engine_reads() -> None:
    names = {v.name for v in VARIABLES}
    assert names >= READ_BY_SELECTION | {
        "NVTE_FUSED_ATTN_BACKEND",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "NVTE_DEBUG",
        "NVTE_DEBUG_LEVEL",
        "NVTE_FUSED_ATTN_USE_FAv2_BWD",
        "NVTE_APPLY_QK_LAYER_SCALING",
        "NVTE_BATCH_MHA_P2P_COMM",
        "NVTE_UnfusedDPA_Emulate_FP8",
        "NVTE_DISABLE_TRITON_AUTOTUNING",
    }


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("text", ["true", "on", "False", "", "1.0"])
def test_texts_that_int_rejects_are_errors_naming_variable_value_and_remedy(name: str, text: str) -> None:
    with pytest.raises(EnvironmentVariableError) as caught:
        environment.parse(name, {name: text})
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "integer" in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(("text", "on"), [(" 1 ", True), ("00", False), ("-1", True), ("2", True), ("0", False)])
def test_texts_that_int_accepts(name: str, text: str, on: bool) -> None:
    assert bool(environment.parse(name, {name: text})) is on


@pytest.mark.parametrize("name", ONES)
@pytest.mark.parametrize("text", ["true", "", "2", " 1", "01", "yes"])
def test_equality_with_one_never_raises(name: str, text: str) -> None:
    assert environment.parse(name, {name: text}) is False
    assert environment.parse(name, {name: "1"}) is True


@pytest.mark.parametrize(("text", "names"), [("", ()), ("fa2", ("fa2",)), (" fa2, cudnn ,", ("fa2", "cudnn"))])
def test_blocked_names(text: str, names: tuple[str, ...]) -> None:
    assert environment.parse("MLA_PLUGIN_BLOCK", {"MLA_PLUGIN_BLOCK": text}) == names


@pytest.mark.parametrize(("text", "requested"), [(None, False), ("1", False), ("", False), ("no", False), ("0", True)])
def test_autotuning_is_on_at_exactly_zero(text: str | None, requested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if text is not None:
        monkeypatch.setenv("NVTE_DISABLE_TRITON_AUTOTUNING", text)
    assert environment.is_autotuning_requested() == requested


@pytest.mark.parametrize("text", ["100", "0", "", "8192", "256.0", "all"])
def test_chunks_of_other_sizes_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_PLUGIN_BATCH_INVARIANT_CHUNK", text)
    with pytest.raises(EnvironmentVariableError, match="expected one of 128, 256, 512, 1024, 2048, 4096"):
        environment.batch_invariant_chunk()


def test_explain_refuses_them_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLA_PLUGIN_BATCH_INVARIANT_CHUNK", "100")
    assert main(["explain", "--decode", "--batch-invariant", "--capability", "9.0"]) == 2
    assert "expected one of 128, 256, 512, 1024, 2048, 4096" in capsys.readouterr().err
    described = ["explain", "--decode", "--batch-invariant", "--capability", "9.0", "--env"]
    assert main([*described, "MLA_PLUGIN_BATCH_INVARIANT_CHUNK=128"]) == 0
    monkeypatch.delenv("MLA_PLUGIN_BATCH_INVARIANT_CHUNK")
    assert main([*described, "MLA_PLUGIN_BATCH_INVARIANT_CHUNK=100"]) == 2


def test_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLA_PLUGIN_BATCH_INVARIANT_CHUNK", raising=False)
    assert environment.batch_invariant_chunk() == 256
    monkeypatch.setenv("MLA_PLUGIN_BATCH_INVARIANT_CHUNK", "2048")
    assert environment.batch_invariant_chunk() == 2048


def test_defaults_when_unset() -> None:
    for variable in VARIABLES:
        assert environment.parse(variable.name, {}) == variable.default


def test_an_unknown_variable_is_a_programming_error() -> None:
    with pytest.raises(KeyError):
        environment.parse("NVTE_NO_SUCH_THING", {})


@pytest.mark.parametrize("name", sorted(READ_BY_SELECTION))
def test_gates_see_a_variable_come_change_and_go(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = environment.gates()
    assert name not in dict(before)
    monkeypatch.setenv(name, "0")
    assert dict(environment.gates())[name] == "0"
    monkeypatch.setenv(name, "1")
    assert dict(environment.gates())[name] == "1"
    monkeypatch.delenv(name)
    assert environment.gates() == before


def test_gates_without_the_dictionary_behind_os_environ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NVTE_FLASH_ATTN": "0", "PATH": "x"})
    assert environment.gates() == (("NVTE_FLASH_ATTN", "0"),)


def test_the_markdown_table_has_a_row_for_each_variable() -> None:
    lines = environment.markdown_table().splitlines()
    assert len(lines) == 2 + len(VARIABLES)
    assert all(line.count("|") == 6 for line in lines)


@pytest.mark.parametrize("snapshot", [environment.gates, environment.assignments, environment.cuda_homes])
def test_a_variable_may_go_while_the_environment_is_read(snapshot: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread removes it between two look-ups: a switch of threads at the worst moment, at every one of them."""
    names = ("NVTE_FLASH_ATTN", "MLA_PLUGIN_BLOCK", "CUDA_HOME")

    class Vanishing(dict):
        """Each variable that is found, or listed, is gone at the next look."""

        def _found(self, key: object, found: object) -> object:
            if key in map(os.environ.encodekey, names):
                self.pop(key, None)
            return found

        def __contains__(self, key: object) -> bool:
            return self._found(key, super().__contains__(key))

        def __getitem__(self, key: object) -> object:
            return self._found(key, super().__getitem__(key))

        def __iter__(self) -> object:
            keys = list(super().__iter__())
            self.clear()
            return iter(keys)

    for name in names:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("NVTE_MLA_TRITON", "1")
    before = dict(os.environ._data)
    monkeypatch.setattr(os.environ, "_data", Vanishing(before))
    found = snapshot()
    monkeypatch.setattr(os.environ, "_data", before)
    if snapshot is environment.gates:
        assert found == (("NVTE_MLA_TRITON", "1"),)
    else:
        assert not set(names) & set(found)


def test_gates_while_other_threads_set_and_remove() -> None:
    stop, errors, seen = threading.Event(), [], set()

    def change() -> None:
        while not stop.is_set():
            os.environ["NVTE_FLASH_ATTN"] = "0"
            del os.environ["NVTE_FLASH_ATTN"]

    thread = threading.Thread(target=change)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(20000):
            seen.add(environment.gates())
    except KeyError as error:
        errors.append(error)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
    assert seen <= {(), (("NVTE_FLASH_ATTN", "0"),)}


@pytest.mark.parametrize(("text", "wanted"), [(None, False), ("1", True), ("0", False), ("", False), ("true", False)])
def test_the_check_of_values_is_asked_for_by_1_alone(
    text: str | None, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        monkeypatch.setenv("MLA_PLUGIN_CHECK", text)
    assert environment.is_value_check_requested() is wanted


def test_recorded_are_the_reads_of_others_alone() -> None:
    """The suite compares all variables around each question; each that a backend reads costs four more."""
    with environment.recorded_reads() as names:
        before = environment.variables()
        os.environ.get("HOME")
        assert environment.variables() == before == dict(os.environ)
    assert names[0] == "HOME"
    assert sorted(names[1:]) == sorted(os.environ)
