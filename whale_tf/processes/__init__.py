"""One of several training processes: TensorFlow's server, the watch over the others, the share of the data."""
