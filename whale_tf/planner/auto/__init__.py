"""Automatic TaskGraphs (Whale sections 3.1.2 and 3.3): a model without annotations is cut into stages, placed and scored."""
