"""The built-in model profiles that planners read (``whale_tf/profiler/builtin``), and the command that makes them."""
