"""Python runs this in processes that tests start.  Importing TensorFlow imports Keras, which imports packages that are installed
for other tests and that no process here needs; without them it takes two thirds of the time."""
import sys

sys.modules.update(dict.fromkeys(("sklearn", "matplotlib")))  # None: their import fails
