"""The interpreted cases of `triton_cases.attention`, compiled, on this GPU."""

from triton_cases.attention import *  # noqa: F403
