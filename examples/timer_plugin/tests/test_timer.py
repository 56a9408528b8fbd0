"""The wrappers take part in every call and change nothing; run it where both packages are installed."""

import mla_plugin_timer
import torch

import mla_plugin


def test_it_counts_the_calls_of_a_backend() -> None:
    q = torch.randn(1, 5, 2, 16, requires_grad=True)
    mla_plugin.attention(q, q, q, backend="sdpa").sum().backward()
    found = mla_plugin_timer.report()
    assert found["forward", "sdpa"][0] == found["backward", "sdpa"][0] == 1
    assert all(seconds > 0 for _, seconds in found.values())
