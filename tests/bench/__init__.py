"""Benchmarks: each `bench_*` module has `rows()`, and every row stands beside its baseline, measured in the same run."""
