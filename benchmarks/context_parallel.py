"""Context parallelism over the GPUs of one host: errors, then time against one GPU's time divided by the ranks.

    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --tokens 32768 131072 --heads 16 128
    torchrun --nproc-per-node 2 -m benchmarks.context_parallel --ways p2p --tokens 262144 --heads 16 --append

DeepSeek-V3's head dims, 192 and 128, bfloat16, causal, batch 1. First each way's errors against float64 at a small
size, compared with those of one GPU with the same backend; a way with more than ERROR_LIMITS times one GPU's error is
not timed. Then for each size the time of one GPU (rank 0, the others wait), and of every way: the slowest rank's,
forward, and forward and backward, over the one GPU's divided by the ranks; 1 is ideal. Rank 0 writes
benchmarks/results/context_parallel_xN_GPU.json; ``--append`` keeps what is there of other sizes and ways, and notes the
commit at the new ones. Without a GPU it runs over gloo, to try the script itself, and only prints.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import mla_plugin
from mla_plugin import reference
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.context_parallel import shard
from mla_plugin.hooks.attention import AttentionRequest

HEAD_DIM_QK, HEAD_DIM_V = 192, 128
WAYS = ("p2p", "all_gather", "a2a")
ERROR_LIMITS = {"out": 1.3, "dq": 1.5, "dk": 1.5, "dv": 1.5}
"""Largest error of a way over one GPU's."""
NAMES = tuple(ERROR_LIMITS)

Tensors = tuple[torch.Tensor, ...]


class Machine:
    """The ranks, and what differs between GPUs and the CPU."""

    def __init__(self, *, has_priority: bool = False) -> None:
        self.has_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.has_gpu else torch.device("cpu")
        if self.has_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("nccl" if self.has_gpu else "gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD
        if has_priority and self.has_gpu:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            self.group = dist.new_group(pg_options=options)

    def wait(self) -> None:
        """Until the GPU is idle."""
        if self.has_gpu:
            torch.cuda.synchronize()

    def largest(self, *values: float) -> list[float]:
        """The largest of each value over the ranks."""
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [float(x) for x in found]

    def milliseconds(self, call: Callable[[], Any], rounds: int, *, together: bool) -> float:
        """Median over rounds of a call; of all ranks' calls the slowest."""
        found = []
        for number in range(rounds + 1):
            if together:
                dist.barrier()
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            taken = 1000 * (time.perf_counter() - start)
            if number:  # the first call compiles and compares
                found.append(self.largest(taken)[0] if together else taken)
        return statistics.median(found)

    def peak(self, call: Callable[[], Any]) -> float:
        """GiB that are allocated at most while the call runs, inputs included; of all ranks the most."""
        if not self.has_gpu:
            call()
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() / 2**30


def draw(tokens: int, heads: int, device: torch.device, seed: int | None = None) -> Tensors:
    """q, k, v, dout of [1, tokens, heads, D]."""
    if seed is not None:
        torch.manual_seed(seed)
    widths = (HEAD_DIM_QK, HEAD_DIM_QK, HEAD_DIM_V, HEAD_DIM_V)
    return tuple(torch.randn(1, tokens, heads, width, device=device, dtype=torch.bfloat16) for width in widths)


def train(tensors: Tensors, **options: Any) -> Tensors:
    """out, dq, dk, dv."""
    q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
    out = mla_plugin.attention(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3]))


def errors(machine: Machine, ways: list[str], tokens: int, heads: int) -> dict[str, dict[str, float]]:
    """Relative errors of one GPU and of each way, in the Frobenius norm over all ranks' tokens."""
    whole = draw(tokens, heads, machine.device, seed=7)
    tensors = AttentionTensors(*whole[:3], softmax_scale=HEAD_DIM_QK**-0.5)
    request = AttentionRequest.of(tensors, attn_mask_type="causal")
    output, gradients = reference.attention_with_gradients(request, tensors, whole[3])
    exact = (output.out, gradients.dq, gradients.dk, gradients.dv)
    local = tuple(shard(x, machine.size, machine.rank) for x in whole)

    def over_all(found: Tensors) -> dict[str, float]:
        own = [shard(x, machine.size, machine.rank) for x in exact]
        squares = [x for a, b in zip(found, own, strict=True) for x in ((a.double() - b).norm() ** 2, b.norm() ** 2)]
        sums = torch.stack(squares)
        dist.all_reduce(sums)
        return {name: float((sums[2 * i] / sums[2 * i + 1]).sqrt()) for i, name in enumerate(NAMES)}

    one = train(whole)
    found = {"one GPU": over_all(tuple(shard(x, machine.size, machine.rank) for x in one))}
    for way in ways:
        found[way] = over_all(train(local, cp_group=machine.group, cp_comm_type=way))
    return found


def one_gpu(machine: Machine, tokens: int, heads: int, rounds: int) -> dict[str, float]:
    """Milliseconds and GiB of the plain call on rank 0; the other ranks wait."""
    found = torch.zeros(3, dtype=torch.float64, device=machine.device)
    if machine.rank == 0:
        tensors = draw(tokens, heads, machine.device)
        forward = machine.milliseconds(lambda: plain_forward(tensors), rounds, together=False)
        both = machine.milliseconds(lambda: train(tensors), rounds, together=False)
        found = torch.tensor([forward, both, machine.peak(lambda: train(tensors))], dtype=torch.float64)
        found = found.to(machine.device)
        del tensors
    dist.broadcast(found, 0)
    return dict(zip(("forward_ms", "both_ms", "peak_gib"), found.tolist(), strict=True))


def plain_forward(tensors: Tensors, **options: Any) -> None:
    with torch.no_grad():
        mla_plugin.attention(*tensors[:3], **options)


def one_way(machine: Machine, way: str, tokens: int, heads: int, rounds: int) -> dict[str, float]:
    """The same of a way over all ranks: of the slowest, and of the one that needs most."""
    tensors = draw(tokens // machine.size, heads, machine.device)
    options = {"cp_group": machine.group, "cp_comm_type": way}
    forward = machine.milliseconds(lambda: plain_forward(tensors, **options), rounds, together=True)
    both = machine.milliseconds(lambda: train(tensors, **options), rounds, together=True)
    (peak,) = machine.largest(machine.peak(lambda: train(tensors, **options)))
    return {"forward_ms": forward, "both_ms": both, "peak_gib": peak}


def measure(machine: Machine, arguments: argparse.Namespace, ways: list[str]) -> list[dict[str, Any]]:
    """One record for each size and way."""
    records = []
    for heads in arguments.heads:
        for tokens in arguments.tokens:
            if tokens * heads > arguments.most:
                say(machine, f"{tokens} tokens x {heads} heads are beyond --most {arguments.most}; left out")
                continue
            one = one_gpu(machine, tokens, heads, arguments.rounds)
            say(machine, f"{tokens} x {heads}: one GPU {one}")
            for way in ways:
                if machine.has_gpu:
                    torch.cuda.empty_cache()
                found = one_way(machine, way, tokens, heads, arguments.rounds)
                ratios = {
                    f"{name}_over_ideal": found[f"{name}_ms"] * machine.size / one[f"{name}_ms"]
                    for name in ("forward", "both")
                }
                records.append({"tokens": tokens, "heads": heads, "way": way, **found, **ratios, "one_gpu": one})
                say(machine, f"{tokens} x {heads} {way}: {found} {ratios}")
    return records


def say(machine: Machine, text: str) -> None:
    if machine.rank == 0:
        print(text, flush=True)


def keep(machine: Machine, content: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the file, with what it held of other sizes and ways under ``--append``."""
    from benchmarks import checkout, common  # it needs a GPU

    name = f"context_parallel_x{machine.size}" + ("_high_priority" if arguments.high_priority else "")
    path = common.RESULTS / f"{name}_{torch.cuda.get_device_name().replace(' ', '_')}.json"
    commit = checkout.commit(arguments.commit)
    if arguments.append and path.exists():
        old = json.loads(path.read_text())
        measured = {(x["tokens"], x["heads"], x["way"]) for x in content["times"]}
        kept = [x for x in old["times"] if (x["tokens"], x["heads"], x["way"]) not in measured]
        content["times"] = [*({**x, "commit": commit} for x in content["times"]), *kept]
        content["errors"] = {**old["errors"], **content["errors"]}
        commit = old["commit"]
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    say(machine, str(common.write(name, {"nccl": version, "ranks": machine.size, **content}, commit)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS)
    parser.add_argument("--tokens", nargs="*", type=int, default=[32768, 65536, 131072, 262144])
    parser.add_argument("--heads", nargs="*", type=int, default=[16, 128])
    parser.add_argument("--most", type=int, default=131072 * 128, help="most tokens x heads for one GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check-tokens", type=int, default=4096)
    parser.add_argument("--check-heads", type=int, default=8)
    parser.add_argument("--high-priority", action="store_true", help="messages on NCCL streams of high priority")
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--commit", help="recorded in the result; default: of this checkout")
    arguments = parser.parse_args()
    machine = Machine(has_priority=arguments.high_priority)
    found = errors(machine, arguments.ways, arguments.check_tokens, arguments.check_heads)
    say(machine, json.dumps(found, indent=1))
    ways = [w for w in arguments.ways if all(found[w][n] <= ERROR_LIMITS[n] * found["one GPU"][n] for n in NAMES)]
    for way in set(arguments.ways) - set(ways):
        say(machine, f"{way} is off by more than {ERROR_LIMITS} times one GPU's error; not timed")
    times = measure(machine, arguments, ways)
    if machine.has_gpu and machine.rank == 0:
        keep(machine, {"errors": found, "times": times}, arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
