"""The suite that any attention backend must pass: ``class TestMine(BackendConformance): backend = "mine"``."""

from mla_plugin.conformance.case import Case
from mla_plugin.conformance.cases import cases
from mla_plugin.conformance.checks import ConformanceError
from mla_plugin.conformance.decode_case import DecodeCase
from mla_plugin.conformance.decode_cases import decode_cases
from mla_plugin.conformance.decode_suite import DecodeConformance
from mla_plugin.conformance.suite import BackendConformance

__all__ = [
    "BackendConformance",
    "Case",
    "ConformanceError",
    "DecodeCase",
    "DecodeConformance",
    "cases",
    "decode_cases",
]
