"""Cases of the Triton kernels, for two places: interpreted on a CPU (`test_triton_interpreted.py`) and on a GPU.

They are ordinary pytest modules without a `test_` in their names, so that they are collected only where Triton can run
them: the interpreter has to be chosen (TRITON_INTERPRET=1) before Triton is imported.
"""
