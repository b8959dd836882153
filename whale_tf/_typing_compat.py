"""The names of ``typing`` that Python 3.7 does not have."""
from __future__ import annotations

import sys

if sys.version_info >= (3, 8):
    from typing import Literal as Literal
    from typing import Protocol as Protocol
else:
    from typing_extensions import Literal as Literal
    from typing_extensions import Protocol as Protocol
