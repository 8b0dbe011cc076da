"""Compiling the kernels for GPUs that need not be there, and what the result takes of them.

`python -m marlhf_kernels.gpu.aot` prints it; the tests hold it to limits. Not under TRITON_INTERPRET=1.
"""
