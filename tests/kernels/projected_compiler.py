"""Compile the kernels of W_UK and W_UV around a decode, no GPU: ``python -m tests.kernels.projected_compiler``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.kernels.compiler import PER_BLOCK, Program, print_results

DEEPSEEK, GLM, MINICPM, WIDE = (512, 64, 128, 128), (512, 64, 192, 256), (256, 32, 64, 64), (512, 64, 1024, 512)
"""R, Dr, D_nope and D_v."""


@dataclass(frozen=True)
class Job:
    """One kernel for one compute capability; ``heads``: a head of few is divided among more programs."""

    capability: int
    kernel: str
    dims: tuple[int, int, int, int] = DEEPSEEK
    heads: int = 128

    @property
    def name(self) -> str:
        return f"sm{self.capability} {self.kernel} {'/'.join(map(str, self.dims))} H {self.heads}"


JOBS = (
    *(Job(capability, kernel) for capability in PER_BLOCK for kernel in ("absorb", "values")),
    *(Job(86, kernel, dims, 16) for dims in (GLM, MINICPM, WIDE) for kernel in ("absorb", "values")),
)


def program(job: Job) -> Program:
    """The kernel as ``step_of`` launches it."""
    from mla_plugin.kernels.decode.projected import kernels
    from mla_plugin.kernels.decode.projected import launch as projected

    rank, _, dim_nope, dim_v = job.dims
    blocks = projected.blocks_of(job.heads, rank, dim_nope, dim_v)
    constants: dict[str, Any] = {"R": rank, "D_NOPE": dim_nope, "D_V": dim_v, "ROWS": projected.ROWS}
    constants |= {"DEPENDENT": job.capability >= 90}
    types = dict.fromkeys(("Q", "W", "Q_nope_abs", "Parts", "Latent", "Out"), "*bf16")
    if job.kernel == "absorb":
        types |= {"Plan": "*i32", "Ranges": "*i32", "Lengths": "*i32"}
        constants |= {"NOPE": projected.padded(dim_nope), "BLOCK_R": blocks.rank, "BLOCK_N": 64}
        constants |= {"PLANNED": True, "HAS_PADDING": True}
        kernel = kernels.absorb_kernel
    else:
        constants |= {"COLUMNS": projected.padded(rank), "BLOCK_V": blocks.values, "BLOCK_PIECES": projected.PIECES}
        constants |= {"COMBINES": True}
        kernel = kernels.values_kernel
    options = {"num_warps": projected.WARPS} | ({"launch_pdl": True} if job.capability >= 90 else {})
    return Program(job.capability, kernel, types, constants, options)


if __name__ == "__main__":
    print_results(program, JOBS)
