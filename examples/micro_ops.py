"""Capture a function of small tensors and see how much quicker than eager it is: python examples/micro_ops.py."""

from __future__ import annotations

import timeit

import torch

import outlast


def step(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """48 small operators, as in a control loop or one layer of a small model."""
    for _ in range(16):
        x = torch.relu(x * scale + shift)
    return x


with torch.no_grad():
    inputs = torch.randn(64), torch.rand(64), torch.randn(64)
    replay = outlast.capture(step, *inputs)  # runs once, plans, compiles what it fuses
    torch.testing.assert_close(replay(*inputs), step(*inputs))
    eager, captured = (min(timeit.repeat(lambda f=f: f(*inputs), number=500)) / 500 for f in (step, replay))
print(f"eager {1e6 * eager:.1f} us, captured {1e6 * captured:.1f} us a call: {eager / captured:.0f}x quicker")
