"""Independent NumPy oracles of the published bit orders (`docs/design/bits.md`).

They share no code with the kernels and walk every order one operation at a time, vectorised only over independent
outputs. Slow and obvious on purpose: a kernel is right when its bits are these.
"""
