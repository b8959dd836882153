"""A plain installation beside every supported TensorFlow: ``python -m tests.versions``, see ``__main__``."""
