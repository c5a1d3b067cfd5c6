"""The interpreted cases of `triton_cases.rows`, compiled, on this GPU."""

from triton_cases.rows import *  # noqa: F403
