"""What the spec declares is proved by the conformance kit."""

from __future__ import annotations

import torch
from tokenspeed_kernels_int8.gemm import linear, prepare, quantise

from tokenspeed.testing import KernelContractTests, PluginTests


class TestPlugin(PluginTests):
    plugin = "tokenspeed-kernels-int8"


class TestKernels(KernelContractTests):
    plugin = "tokenspeed-kernels-int8"


def test_the_format_loses_no_more_than_half_a_step() -> None:
    weight = torch.randn(7, 50)
    parts, read = quantise(weight)
    assert ((weight - read).abs() <= parts["weight_scale"].unsqueeze(-1) * 0.5001).all()
    x = torch.randn(3, 50)
    torch.testing.assert_close(linear(x, prepare(parts)), x @ read.T, rtol=1e-4, atol=1e-4)
