"""The zoo's models as profiles: JSON that ``python -m benchmarks.profiles.make`` writes."""
