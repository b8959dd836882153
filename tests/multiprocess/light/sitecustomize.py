"""Python runs this in the process that is forked for tests.  Importing TensorFlow imports Keras, which imports packages that are
installed for other tests and that Keras does not need; without them it takes two thirds of the time."""
import sys

sys.modules.update(dict.fromkeys(("sklearn", "matplotlib")))  # None: their import fails
