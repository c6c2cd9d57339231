"""Benchmarks: each `bench_*` module has `rows()`; every row stands beside a baseline measured in the same run."""
