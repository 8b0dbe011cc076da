"""Numbers that the authors' released code produced, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parent / "golden" / "released_code.json").read_text())
