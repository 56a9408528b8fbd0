"""What depends on Triton's version in the tests of the kernels."""

import pytest
import triton

from mla_plugin.kernels.hopper.device import CAPABILITY, unfit_device_because

IS_RECORDED = unfit_device_because(CAPABILITY, triton.__version__) is None
"""Stated figures of registers are those of the versions that compile the Hopper kernels.

With 3.9 plain kernels spill up to 60 stores more.
"""

needs_hopper_kernels = pytest.mark.skipif(not IS_RECORDED, reason="the rule leaves this Triton out")
