"""Text that others wrote stays text."""

import json
import unicodedata

import pytest

from marlhf.report.text import chart_text, decimal, json_for_html, number, printable, shortened
from tests.trainer.report.folders import HOSTILE, SHOWN


def test_invisible_and_unencodable_characters_become_visible():
    assert printable(HOSTILE) == SHOWN
    assert printable("a\x1b[31mb\x9bc\r\x7f\ufeff") == "a[U+001B][31mb[U+009B]c[U+000D][U+007F][U+FEFF]"


def test_ordinary_text_passes_unchanged():
    text = "caf\u00e9 \u4f60\u597d \u05d0\u05d1 \U0001f469\u200d\U0001f52c\n\ttab"
    assert printable(text) == text


def test_no_control_format_or_surrogate_character_is_left_over():
    # Joiners and the like, which scripts and emoji are made with, are the only format characters that stay.
    kept = {
        code
        for code in range(0x3000)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Zl", "Zp") and printable(chr(code)) == chr(code)
    }
    directional = {chr(code) for code in kept if unicodedata.bidirectional(chr(code)) in ("LRE", "RLE", "LRO", "RLO")}
    assert not directional
    assert {code for code in kept if unicodedata.category(chr(code)) in ("Cc", "Zl", "Zp")} == {0x09, 0x0A}
    printable("".join(map(chr, range(0xD7FF, 0xE001)))).encode("utf-8")


def test_json_holds_no_character_that_ends_its_element():
    value = {HOSTILE: [HOSTILE, 1.5, None]}
    text = json_for_html(value)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


def test_json_refuses_what_json_does_not_know():
    with pytest.raises(ValueError, match="JSON"):
        json_for_html([float("nan")])


def test_chart_text_is_one_line_without_tags():
    assert chart_text("a <b>&amp;\n\tc\0") == "a &lt;b&gt;&amp;amp; c[U+0000]"


def test_numbers_for_a_reader():
    assert [number(1234567.0), number(0.123456), number(None)] == ["1.235e+06", "0.1235", "\u2013"]
    assert number(0.9876, percent=True) == "98.8%"
    assert [decimal(1.005, 1), decimal(-0.26, 1), decimal(None, 2)] == ["1.0", "-0.3", "\u2013"]
    assert [shortened("abcdef", 6), shortened("abcdefg", 6)] == ["abcdef", "abcde\u2026"]
