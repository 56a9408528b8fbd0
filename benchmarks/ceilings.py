"""The most that this GPU reaches: a large product in bfloat16, a read and a copy. The figures draw ceilings of them.

    python -m benchmarks.ceilings           writes benchmarks/results/ceilings_<gpu>.json

The product is cuBLAS's of two matrices of 8192 x 8192, in bursts as short as those of ``prefill_backends``: a longer
burst would slow the GPU's clock. The read is PyTorch's sum of 4 GiB of float32. The copy is an elementwise kernel's of
as many; bytes read and bytes written count.
"""

from __future__ import annotations

import torch

from benchmarks.common import in_shuffled_turns, parser, write

SIDE = 8192
NUMBERS = 2**30


def main() -> None:
    """Measure, write, print."""
    options = parser(__doc__).parse_args()
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = torch.empty_like(a)
    source, target = torch.ones(NUMBERS, device="cuda"), torch.empty(NUMBERS, device="cuda")
    calls = {
        "product": lambda: torch.mm(a, b, out=product),
        "read": lambda: torch.sum(source),
        "copy": lambda: torch.mul(source, 2.0, out=target),
    }
    ms = in_shuffled_turns(calls, max(options.rounds, 9))
    found = {
        "product_tflop_per_s": 2 * SIDE**3 / (ms["product"] / 1e3) / 1e12,
        "read_gb_per_s": 4 * NUMBERS / (ms["read"] / 1e3) / 1e9,
        "copy_gb_per_s": 8 * NUMBERS / (ms["copy"] / 1e3) / 1e9,
    }
    print(write("ceilings", found, options.commit), found)


if __name__ == "__main__":
    main()
