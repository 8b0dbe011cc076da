"""Ratios, floors and shares by hand numbers."""

from benchmarks import floors, table
from tests.benchmarks.rows import rival, row

FORWARD = [
    row(4_000.0, share=0.5, bandwidth="read"),
    row(40_000.0, backend="reference"),
    rival("eager", 50_000.0),
    rival("compile", 11_000.0),
    rival("trl", status="wrong", reason="log-probability is off"),
    rival("liger", status="cannot run", reason="no GPU"),
]


def line_of(page: str, *words: str) -> list[str]:
    """The cells of the one table line that has all the words."""
    found = [line for line in page.splitlines() if line.startswith("|") and all(word in line for word in words)]
    assert len(found) == 1, page
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_each_ratio_stands_beside_its_floor() -> None:
    page = table.render(FORWARD)
    head, line = line_of(page, "| options |"), line_of(page, "gpt2-256")
    cells = dict(zip(head, line, strict=True))
    assert cells["time"] == "4 ms"
    assert cells["eager"] == "50 ms, 12.5x (floor 12x)"
    # Below its floor: in bold.
    assert cells["compile"] == "11 ms, **2.75x (floor 3x)**"
    assert cells["marlhf:reference"] == "40 ms, 10x"
    assert cells["bandwidth"] == "**50% of read (floor 60%)**"
    assert (cells["trl"], cells["liger"]) == ("wrong", "cannot run")
    assert line_of(page, "liger", "no GPU")[-1] == "1"


def test_what_is_below_its_floor_is_told_first() -> None:
    assert table.missed(FORWARD) == [
        "token_logprobs, entropy (forward, gpt2-256, float32, 1 thread, marlhf): 2.75x compile, floor 3x",
        "token_logprobs, entropy (forward, gpt2-256, float32, 1 thread, marlhf): 50% of read, floor 60%",
    ]
    assert table.missed(FORWARD)[0] in table.render(FORWARD).partition("##")[0]
    assert table.missed([row(4_000.0, share=0.7), rival("compile", 12_000.0)]) == []


def test_in_place_has_its_own_floor() -> None:
    ours = row(10_000.0, provider="marlhf in place", mode="full")
    fresh = row(20_000.0, mode="full")
    compiled = rival("compile", 49_000.0, mode="full")
    assert floors.ratio_floor(ours, compiled) == 5
    assert floors.ratio_floor(fresh, compiled) == 2.5
    below = table.missed([ours, fresh, compiled])
    assert [line.partition("): ")[2] for line in below] == ["4.90x compile, floor 5x", "2.45x compile, floor 2.5x"]


def test_without_a_native_backend_the_reference_is_shown_and_has_no_floor() -> None:
    rows = [
        row(backend="cpu", status="cannot run", reason="not built"),
        row(40_000.0, backend="reference"),
        rival("eager", 20_000.0),
    ]
    page = table.render(rows)
    cells = dict(zip(line_of(page, "| options |"), line_of(page, "gpt2-256"), strict=True))
    assert (cells["ours"], cells["eager"]) == ("reference", "20 ms, 0.5x")
    assert table.missed(rows) == []


def test_only_equal_cases_are_compared() -> None:
    rows = [row(4_000.0), rival("eager", 50_000.0, dtype="bfloat16"), rival("eager", 20_000.0, threads=2)]
    page = table.render(rows)
    assert "12.5x" not in page
    assert "5x" not in page


def test_durations_have_three_digits() -> None:
    assert [table.duration(t) for t in (0.5, 12.34, 999.4, 1_234.0, 5_000_000.0, None)] == [
        "0.5 us",
        "12.3 us",
        "999 us",
        "1.23 ms",
        "5 s",
        "",
    ]
