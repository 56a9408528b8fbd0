"""Megatron-Core in one process: a world of one rank, on the CPU where there is no GPU."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state


@pytest.fixture(scope="package", autouse=True)
def one_rank():
    """Groups of one rank, without a port. Megatron asks CUDA for its device; the answer is the CPU without a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        yield
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
