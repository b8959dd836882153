"""What ``import epl`` finds where ``whale_tf/epl/path`` is on PYTHONPATH: whale_tf.epl, unless another epl is installed."""

from __future__ import annotations

from whale_tf.epl.installed import install

install()
