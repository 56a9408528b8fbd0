"""Training over two ranks, by DDP and FSDP2 on gloo, and a decode step of the model that was sharded."""

from __future__ import annotations

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.fsdp import fully_shard

from mla_plugin.compat.transformers import latent, latent_steps
from tests.compat.latent_models import fresh, prefill, step
from tests.compat.test_transformers_models import VERSION, tokens_of

WORLD = 2
WAYS = ("ddp", "fsdp2")


def steps_of(kind: str, rank: int) -> torch.Tensor:
    """Losses of three steps and the logits of a decode step [2, n], with the plugin and with sdpa."""
    mine = tokens_of("none")[0][rank : rank + 2]
    found, absorbed = [], []
    for implementation in ("mla_plugin", "sdpa"):
        model = wrapped = fresh("DeepseekV3", implementation).train()
        if kind == "ddp":
            wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        else:
            for layer in model.model.layers:
                fully_shard(layer, reshard_after_forward=True)
            fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = wrapped(input_ids=mine, labels=mine, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach()[None])
        model.eval()
        found.append(step(model, prefill(model)).flatten())
        absorbed += [steps.absorbed for steps in latent_steps(model).values()]
    assert absorbed == [1, 1] * (Version("5.15") <= VERSION)  # of the plugin's layers
    return torch.cat(found).view(2, -1)


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    latent.LEAST_KEYS = 0
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    torch.save({kind: steps_of(kind, rank) for kind in WAYS}, f"{folder}/{rank}")
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    torch.multiprocessing.spawn(one_rank, (str(tmp_path),), WORLD)
    for rank in range(WORLD):
        for found, expected in torch.load(tmp_path / str(rank)).values():
            assert len(found) > 3
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
