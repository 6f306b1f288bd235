"""One training in three ways that survive the death of a rank, for `benchmarks.elastic_peers`.

The three programs hold what their users write; what they share is in `common`.
"""
