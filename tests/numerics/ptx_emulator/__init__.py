"""Runs compiled Triton kernels without a GPU: a driver for Triton whose device interprets PTX in NumPy.

Triton's own interpreter runs the source of a kernel. This package runs what the compiler made of it, for a GPU of
choice: `kernel[grid](...)` specialises, compiles and launches as it does on a machine with that GPU, and takes tensors
of the CPU. So it sees what the interpreter cannot: specialisation, layouts, reductions over lanes and warps,
pipelining, tensor descriptors and matrix fragments, and every address that a thread touches.

    program        PTX text to instructions and basic blocks
    operands       what an operand stands for
    machine        threads, registers, divergence and barriers
    arithmetic     what an instruction computes for each thread
    warps          what the threads of a warp tell each other
    memory         parameters, global and shared memory
    copies         copies on the side, and their barriers
    matrix         fragments: ldmatrix, stmatrix, mma.sync, wgmma
    tensor_memory  where tcgen05 computes
    driver         what Triton asks of a device

It refuses an instruction that it does not know, an address outside every tensor, a misaligned one, a barrier that not
all threads reach, and shared memory that two warps use between the same barriers unless both only read.

What it cannot see: ptxas, the hardware's timing (every copy happens where it is issued or awaited), orders of memory
that only a fence keeps. The inside of a matrix instruction and of `ex2.approx` are models: the first as others have
measured it (`matrix`), the second correctly rounded.

Sources: PTX ISA 9.x (instructions, fragment layouts, matrix descriptors), CUDA driver API (tensor maps),
arXiv:2511.10909 (matrix units).
"""
