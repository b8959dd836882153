"""What the papers print of their algorithms, and the baselines they compare with, beside the package's exact solvers."""
