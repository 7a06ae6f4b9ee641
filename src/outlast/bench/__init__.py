"""Benchmarks and the demonstration: `outlast bench NAME`, `outlast demo`.

A benchmark is a module with `run(arguments) -> dict` and, for options of its own, `configure(parser)`. It runs its
baseline in the same run and says what it compares with; the other modules here are parts of several benchmarks.
"""
