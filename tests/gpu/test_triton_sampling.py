"""The interpreted cases of `triton_cases.sampling`, compiled, on this GPU."""

from triton_cases.sampling import *  # noqa: F403
