"""The zoo's models as profiles: JSON that ``python -m whale_tf.simulator.zoo.make`` writes."""
