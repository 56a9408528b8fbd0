"""Megatron-Core in one process: a world of one rank, without a port."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from megatron.core import parallel_state


@pytest.fixture(scope="package", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
