"""AMP (Li et al. 2022): degrees of pipeline, data and tensor parallelism, placement and layer assignment by a cost model."""
