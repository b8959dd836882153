"""Automatic SPMD strategies on the captured op graph, without layers (Rhino sections 4 and 7.5)."""
