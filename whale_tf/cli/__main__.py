"""``python -m whale_tf.cli`` is ``whale``."""
from __future__ import annotations

from whale_tf.cli import main

main()
