"""Logical devices for functions, made while tests are collected: TensorFlow has executed nothing yet."""
from __future__ import annotations

from whale_tf._tf_compat import function_tracing, make_logical_cpus

if function_tracing() is not None:
    make_logical_cpus(5)
