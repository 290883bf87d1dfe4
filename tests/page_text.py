"""What the text of a page that loads nothing holds."""

from __future__ import annotations

import json
import re
from typing import Any


def data_of(text: str) -> Any:
    """The data of a page whose policy lets in nothing, and which asks for nothing."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    outside = re.sub(r"<script[^>]*>.*?</script>", lambda found: found[0].partition(">")[0], text, flags=re.S)
    assert not re.search(r"<(link|img|iframe|base)\b|\b(src|href)=", outside)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert data
    return json.loads(data[1])
