"""Native CPU kernels: C++ in `csrc`, one thin module of Python for each family of operators."""
