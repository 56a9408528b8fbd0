"""What depends on Triton's version in the tests of the kernels."""

import pytest
import triton

from mla_plugin.kernels.hopper.rule import CAPABILITY, TRITON_VERSIONS, unfit_device_because

needs_hopper_kernels = pytest.mark.skipif(
    unfit_device_because(CAPABILITY, triton.__version__) is not None, reason="the rule leaves this Triton out"
)

IS_RECORDED = ".".join(triton.__version__.split(".")[:2]) in TRITON_VERSIONS
"""Stated figures of registers are those of these versions; 3.9 spills up to 60 stores more in a kernel."""
