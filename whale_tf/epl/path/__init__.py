"""The directory that makes `import epl` whale_tf.epl if it is on PYTHONPATH (whale_tf/epl/installed.py)."""
