"""One of several training processes: its TensorFlow server, monitoring of the others, and its share of the data."""
