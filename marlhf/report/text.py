"""Text that others wrote, made safe to show: in HTML, in a JSON block inside HTML, and in a terminal.

HTML escaping itself is the template engine's. What is here makes characters visible that would otherwise
vanish, reorder their surroundings, or not exist in UTF-8 at all.
"""

import json
from typing import Any


def _stand_ins() -> dict[int, str]:
    # C0 and C1 controls, line and paragraph separators, directional marks and overrides, the byte-order
    # mark, and the two code points that no text may hold.
    codes = [code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"]
    codes += [0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF, 0xFFFE, 0xFFFF]
    table = {code: f"[U+{code:04X}]" for code in codes}
    # A lone surrogate is half a character: UTF-8 cannot hold it.
    table.update(dict.fromkeys(range(0xD800, 0xE000), "\ufffd"))
    return table


_STAND_INS = _stand_ins()


def printable(text: object) -> str:
    """The text with every invisible or unencodable character replaced by a visible stand-in.

    Line breaks and tabs stay. Control characters, directional marks and separators become `[U+202E]` and the
    like; lone surrogates become U+FFFD.
    """
    return str(text).translate(_STAND_INS)


def json_for_html(value: Any) -> str:
    """JSON that may stand inside a `<script>` element: pure ASCII, without `<`, `>` and `&`.

    Raises ValueError for NaN and infinities, which JSON does not know.
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def chart_text(text: object) -> str:
    """Text for a Plotly label, which reads a few HTML tags and entities, as plain text on one line."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return " ".join(escaped.split())


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and an ellipsis if it has more than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "\u2026"


def number(value: float | None, *, percent: bool = False) -> str:
    """A number for a reader: four digits, or a percentage with one decimal; a dash where there is none."""
    if value is None:
        return "\u2013"
    return f"{100 * value:.1f}%" if percent else f"{value:.4g}"


def decimal(value: float | None, places: int) -> str:
    """A number with a fixed number of decimal places; a dash where there is none."""
    return "\u2013" if value is None else f"{value:.{places}f}"
