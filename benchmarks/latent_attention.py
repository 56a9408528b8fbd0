"""Latent attention on one GPU and over the GPUs of one host: errors, time and memory versus attention on K and V.

    torchrun --nproc-per-node 1 -m benchmarks.latent_attention --tokens 32768 131072 --heads 16 128
    torchrun --nproc-per-node 2 -m benchmarks.latent_attention --tokens 131072 --heads 128 --append

DeepSeek-V3's dims: heads of 192 and 128 over a latent of 512 + 64, bfloat16, causal, batch 1. First the errors against
float64 at a small size, of one GPU and of each way; a way whose error is beyond ERROR_LIMITS times one GPU's is not
timed. Then, for each size, attention on K and V that are there already (one GPU: the ideal times the ranks),
latent_attention on one GPU, and each way over all ranks: milliseconds of the slowest rank, and GiB at the peak of
forward and backward, inputs and gradients included. Rank 0 writes benchmarks/results/latent_attention_xN_GPU.json.
Without a GPU it runs over gloo, to try the script itself, and only prints.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.distributed as dist

import mla_plugin
from benchmarks.context_parallel import Machine, one_gpu, say
from mla_plugin import reference
from mla_plugin.arguments.attention import AttentionTensors
from mla_plugin.context_parallel import shard
from mla_plugin.hooks.attention import AttentionRequest

NOPE, ROPE, HEAD_DIM_V, RANK = 128, 64, 128, 512
WAYS = ("all_gather", "a2a")
NAMES = ("out", "dq", "dc_kv", "dk_rope", "dweight")
ERROR_LIMITS = {"out": 1.3} | dict.fromkeys(NAMES[1:], 1.5)
"""Largest error of a way over one GPU's."""

Tensors = tuple[torch.Tensor, ...]


def draw(tokens: int, heads: int, device: torch.device, seed: int) -> Tensors:
    """q, c_kv, k_rope, the up-projection's weight, dout."""
    torch.manual_seed(seed)
    shapes = [(1, tokens, heads, NOPE + ROPE), (1, tokens, RANK), (1, tokens, ROPE)]
    shapes += [(heads * (NOPE + HEAD_DIM_V), RANK), (1, tokens, heads, HEAD_DIM_V)]
    found = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    found[3] *= RANK**-0.5
    return tuple(found)


def cut(tensors: Tensors, machine: Machine) -> Tensors:
    """This rank's tokens, and the whole weight."""
    size, rank = machine.size, machine.rank
    return tuple(x if number == 3 else shard(x, size, rank) for number, x in enumerate(tensors))


def views(weight: torch.Tensor, heads: int) -> Tensors:
    """W_UK and W_UV."""
    return weight.unflatten(0, (heads, -1)).split((NOPE, HEAD_DIM_V), dim=1)


def train(tensors: Tensors, **options: Any) -> Tensors:
    """out, and the gradients of q, c_kv, k_rope and the weight, of which a rank has its share."""
    leaves = [x.detach().requires_grad_() for x in tensors[:4]]
    out = mla_plugin.latent_attention(*leaves[:3], *views(leaves[3], leaves[0].shape[2]), **options)
    assert isinstance(out, torch.Tensor)
    return (out.detach(), *torch.autograd.grad(out, leaves, tensors[4]))


def infer(tensors: Tensors, **options: Any) -> None:
    """The forward alone."""
    with torch.no_grad():
        mla_plugin.latent_attention(*tensors[:3], *views(tensors[3], tensors[0].shape[2]), **options)


def exact(tensors: Tensors) -> Tensors:
    """What ``train`` must give, in float64."""
    q, c_kv, k_rope, weight = leaves = [x.double().requires_grad_() for x in tensors[:4]]
    w_uk, w_uv = views(weight, q.shape[2])
    k_nope, v = (torch.einsum("bsr,hdr->bshd", c_kv, w) for w in (w_uk, w_uv))
    k = torch.cat([k_nope, k_rope.unsqueeze(2).expand(*k_nope.shape[:3], -1)], -1)
    given = AttentionTensors(q, k, v, softmax_scale=(NOPE + ROPE) ** -0.5)
    out = reference.attention(AttentionRequest.of(given, attn_mask_type="causal"), given).out
    return (out.detach(), *torch.autograd.grad(out, leaves, tensors[4].double()))


def errors(machine: Machine, tokens: int, heads: int) -> dict[str, dict[str, float]]:
    """Relative errors in the Frobenius norm over all ranks' tokens."""
    whole = draw(tokens, heads, machine.device, seed=7)
    true = exact(whole)

    def over_all(found: Tensors) -> dict[str, float]:
        sums = []
        for name, x, wanted in zip(NAMES, found, true, strict=True):
            x = x.double()
            if name == "dweight":
                dist.all_reduce(x)  # of the ranks' shares
            else:
                wanted = shard(wanted, machine.size, machine.rank)
            sums += [(x - wanted).norm() ** 2, wanted.norm() ** 2]
        squares = torch.stack(sums)
        dist.all_reduce(squares)
        return {name: float((squares[2 * i] / squares[2 * i + 1]).sqrt()) for i, name in enumerate(NAMES)}

    one = train(whole)
    own = [
        x / machine.size if n == "dweight" else shard(x, machine.size, machine.rank)
        for n, x in zip(NAMES, one, strict=True)
    ]
    found = {"one GPU": over_all(tuple(own))}
    for way in WAYS if machine.size > 1 else ():
        found[way] = over_all(train(cut(whole, machine), cp_group=machine.group, cp_comm_type=way))
    return found


def timed(machine: Machine, tensors: Tensors, rounds: int, *, together: bool, **options: Any) -> dict[str, float]:
    """Milliseconds of forward, and of forward and backward, and GiB."""
    forward = machine.milliseconds(lambda: infer(tensors, **options), rounds, together=together)
    both = machine.milliseconds(lambda: train(tensors, **options), rounds, together=together)
    return {"forward_ms": forward, "both_ms": both, "peak_gib": machine.peak(lambda: train(tensors, **options))}


def measure(machine: Machine, tokens: int, heads: int, ways: list[str], rounds: int) -> list[dict[str, Any]]:
    """One record for one GPU and for each way."""
    ideal = one_gpu(machine, tokens, heads, rounds)
    alone = torch.zeros(3, dtype=torch.float64, device=machine.device)
    if machine.rank == 0:
        found = timed(machine, draw(tokens, heads, machine.device, seed=1), rounds, together=False)
        alone = torch.tensor(list(found.values()), dtype=torch.float64, device=machine.device)
    dist.broadcast(alone, 0)
    records: list[dict[str, Any]] = [{"way": "one GPU", **dict(zip(ideal, alone.tolist(), strict=True))}]
    for way in ways:
        if machine.has_gpu:
            torch.cuda.empty_cache()
        tensors = draw(tokens // machine.size, heads, machine.device, seed=machine.rank)
        found = timed(machine, tensors, rounds, together=True, cp_group=machine.group, cp_comm_type=way)
        (found["peak_gib"],) = machine.largest(found["peak_gib"])
        records.append({"way": way, **found})
    for record in records:
        ranks = 1 if record["way"] == "one GPU" else machine.size
        record |= {"tokens": tokens, "heads": heads, "on_k_and_v": ideal}
        record |= {f"{n}_over_ideal": record[f"{n}_ms"] * ranks / ideal[f"{n}_ms"] for n in ("forward", "both")}
        say(machine, json.dumps(record))
    return records


def keep(machine: Machine, content: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the file, with what it held of other sizes under ``--append``."""
    from benchmarks import common  # it needs a GPU

    name = f"latent_attention_x{machine.size}"
    path = common.RESULTS / f"{name}_{torch.cuda.get_device_name().replace(' ', '_')}.json"
    if arguments.append and path.exists():
        measured = {(x["tokens"], x["heads"]) for x in content["times"]}
        old = json.loads(path.read_text())["times"]
        content["times"] += [x for x in old if (x["tokens"], x["heads"]) not in measured]
    say(machine, str(common.write(name, {"ranks": machine.size, **content}, arguments.commit)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="*", type=int, default=[32768, 131072])
    parser.add_argument("--heads", nargs="*", type=int, default=[16, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check-tokens", type=int, default=2048)
    parser.add_argument("--check-heads", type=int, default=8)
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--commit", help="recorded in the result; default: of this checkout")
    arguments = parser.parse_args()
    machine = Machine()
    found = errors(machine, arguments.check_tokens, arguments.check_heads)
    say(machine, json.dumps(found, indent=1))
    one = found["one GPU"]
    ways = [way for way in found if way in WAYS and all(found[way][n] <= ERROR_LIMITS[n] * one[n] for n in NAMES)]
    for way in found.keys() - {"one GPU", *ways}:
        say(machine, f"{way} is off by more than {ERROR_LIMITS} times one GPU's error; not timed")
    times = []
    for heads in arguments.heads:
        for tokens in arguments.tokens:
            times += measure(machine, tokens, heads, ways, arguments.rounds)
    if machine.has_gpu and machine.rank == 0:
        keep(machine, {"errors": found, "times": times}, arguments)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
