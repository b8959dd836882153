"""Built-in model profiles: the benchmark models of the papers, as JSON made by ``make.py`` from the tables beside it."""
