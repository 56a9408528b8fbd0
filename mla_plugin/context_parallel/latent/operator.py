"""The torch.library operators of latent attention over a group; they take its name, as those for K and V do."""

from __future__ import annotations

from mla_plugin.context_parallel.latent import run
from mla_plugin.operations.latent.operator import Operator

latent_attention = Operator("context_parallel_latent_attention", run, {"cp_group": str, "cp_comm_type": str})
