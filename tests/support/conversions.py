"""What conversions of small checkpoints are compared by."""

from __future__ import annotations

import hashlib
import json
from typing import Any

IDS = [(7 * i * i + 13 * i + 50) % 480 + 5 for i in range(24)]
N_LOGITS = 32


def digest(value: Any) -> Any:
    """A key's value, or of a long list its length and a digest."""
    if not isinstance(value, list) or len(value) < 16:
        return value
    return [len(value), hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]]
