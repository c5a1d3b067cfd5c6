"""What the spec declares is proved by the conformance kit."""

from __future__ import annotations

from tokenspeed.testing import KernelContractTests, PluginTests


class TestPlugin(PluginTests):
    plugin = "tokenspeed-kernels-numpy"


class TestKernels(KernelContractTests):
    plugin = "tokenspeed-kernels-numpy"
