"""From an op graph or a model profile, a cluster and a configuration to a Plan."""
