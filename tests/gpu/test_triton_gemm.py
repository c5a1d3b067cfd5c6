"""The interpreted cases of `triton_cases.gemm`, compiled, on this GPU."""

from triton_cases.gemm import *  # noqa: F403
