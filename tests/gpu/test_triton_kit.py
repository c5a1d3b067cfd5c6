"""The conformance kit on every Triton kernel, on this GPU, at its full size."""

from triton_cases.kit import *  # noqa: F403
