"""Benchmarks with nccl-tests' flags and columns: ``collectivesrun -np 2 python -m benchmarks.allreduce``."""
