"""DAPPLE (Fan et al. 2021): hybrids of pipeline and data parallelism with the least pipeline latency."""
