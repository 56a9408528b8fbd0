"""The variables that switch built-in backends off, read alike for prefill and decode."""

from __future__ import annotations

import itertools

import pytest
import torch

from mla_plugin import DecodeRequest, NoBackendError, resolve
from mla_plugin.environment import EnvironmentVariableError
from mla_plugin.hooks.manager import BUILTIN_BACKENDS
from mla_plugin.resolver import survey, survey_decode
from mla_plugin.resolver.switches import switched_off
from tests.requests import CPU, mla_request

DECODE = DecodeRequest(torch.bfloat16, "cuda", 8, 1, 128, 512, 64, max_seqlen_kv=4096)
REQUESTS = pytest.mark.parametrize("request_", [mla_request(), DECODE], ids=["prefill", "decode"])
SWITCHES = {
    "NVTE_MLA_TRITON": {"triton"},
    "NVTE_FLASH_ATTN": {"fa2", "fa3", "fa4"},
    "NVTE_FLASH_ATTN_V2": {"fa2"},
    "NVTE_FLASH_ATTN_V3": {"fa3"},
    "NVTE_FLASH_ATTN_V4": {"fa4"},
    "NVTE_FUSED_ATTN": {"cudnn"},
    "NVTE_UNFUSED_ATTN": {"sdpa"},
}
LOCAL = {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
"""What Megatron-Core sets for ``attention_backend=local``."""


@REQUESTS
@pytest.mark.parametrize(("variable", "backends"), SWITCHES.items())
def test_a_variable_switches_off_what_it_names_and_is_named(variable, backends, request_) -> None:
    for name in BUILTIN_BACKENDS:
        assert switched_off(name, request_, {variable: "0"}) == ((f"{variable}=0",) if name in backends else ())
        assert switched_off(name, request_, {variable: "1"}) == ()


@REQUESTS
def test_only_the_first_variable_that_is_off_is_read(request_) -> None:
    assert switched_off("fa3", request_, {"NVTE_FLASH_ATTN": "0", "NVTE_FLASH_ATTN_V3": "on"}) == ("NVTE_FLASH_ATTN=0",)
    with pytest.raises(EnvironmentVariableError, match="NVTE_FLASH_ATTN_V3='on'"):
        switched_off("fa3", request_, {"NVTE_FLASH_ATTN_V3": "on"})
    assert switched_off("fa2", request_, {"NVTE_FLASH_ATTN_V3": "on"}) == ()


@REQUESTS
@pytest.mark.parametrize("values", [*itertools.product("01", repeat=3)], ids="".join)
def test_megatrons_local_attention_keeps_the_fallback(values, request_) -> None:
    environ = dict(zip(LOCAL, values, strict=True))
    is_off = environ["NVTE_UNFUSED_ATTN"] == "0"
    for host in ("direct", "megatron"):
        stays = host == "megatron" and environ == LOCAL
        off = switched_off("sdpa", request_.replace(host=host), environ)
        assert off == (("NVTE_UNFUSED_ATTN=0",) if is_off and not stays else ())
    assert switched_off("cudnn", request_.replace(host="megatron"), LOCAL) == ("NVTE_FUSED_ATTN=0",)


def test_transformer_engines_rules_have_no_such_exception_and_never_decide_decode() -> None:
    strict = LOCAL | {"MLA_PLUGIN_STRICT_TE": "1"}
    prefill = survey(mla_request(host="megatron", device_type="cpu"), platform=CPU, environ=strict)
    (entry,) = (entry for entry in prefill.trace if entry.backend == "sdpa")
    assert (entry.accepted, entry.layer, entry.reasons) == (False, "environment", ("NVTE_UNFUSED_ATTN=0",))
    for environ in (LOCAL, strict):
        decode = survey_decode(DECODE.replace(host="megatron", device_type="cpu"), platform=CPU, environ=environ)
        assert decode.plan is not None
        assert decode.plan.forward_backend == "sdpa"
    assert survey_decode(DECODE.replace(device_type="cpu"), platform=CPU, environ=LOCAL).plan is None


def test_a_backend_requested_by_name_runs_whatever_the_variables_say() -> None:
    off = dict.fromkeys(SWITCHES, "0")
    for request in (mla_request(device_type="cpu"), DECODE.replace(device_type="cpu")):
        assert resolve(request, backend="sdpa", platform=CPU, environ=off).forward_backend == "sdpa"
        by_variable = off | {"MLA_PLUGIN_BACKEND": "sdpa"}
        assert resolve(request, platform=CPU, environ=by_variable).forward_backend == "sdpa"
        blocked = by_variable | {"MLA_PLUGIN_BLOCK": "sdpa"}
        with pytest.raises(NoBackendError, match=r"sdpa +off +excluded by MLA_PLUGIN_BLOCK"):
            resolve(request, platform=CPU, environ=blocked)
