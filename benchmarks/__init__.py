"""Benchmarks of `marlhf_kernels` against what else there is. `README.md` says how to run and read them."""
