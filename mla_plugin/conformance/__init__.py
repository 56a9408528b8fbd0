"""The suite that any attention backend must pass: ``class TestMine(BackendConformance): backend = "mine"``."""

from mla_plugin.conformance.attention.case import Case
from mla_plugin.conformance.attention.cases import cases
from mla_plugin.conformance.attention.suite import BackendConformance
from mla_plugin.conformance.budget import ConformanceError
from mla_plugin.conformance.decode.case import DecodeCase
from mla_plugin.conformance.decode.cases import decode_cases
from mla_plugin.conformance.decode.suite import DecodeConformance

__all__ = [
    "BackendConformance",
    "Case",
    "ConformanceError",
    "DecodeCase",
    "DecodeConformance",
    "cases",
    "decode_cases",
]
