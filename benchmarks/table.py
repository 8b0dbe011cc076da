"""`python -m benchmarks.table RUN.csv`: our times as markdown, and every rival's with the ratio beside its floor."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.floors import ratio_floor, share_floor
from benchmarks.results import BANDWIDTH, OK, Row, read

OURS = ("marlhf", "marlhf in place")


def render(rows: Sequence[Row]) -> str:
    """The whole page."""
    parts = [_heading(rows), _bandwidths(rows)]
    parts += [_op(op, [row for row in rows if row.op == op]) for op in _distinct(row.op for row in rows)]
    parts.append(_notes(rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def is_ours(row: Row) -> bool:
    """One of our backends that a floor is about: the reference is the definition, and a rival."""
    return row.provider in OURS and row.backend != "reference"


def subjects(rows: Sequence[Row]) -> list[Row]:
    """Of one case: what the others are compared with. Our reference where no other backend of ours ran."""
    native = [row for row in rows if is_ours(row) and row.status == OK]
    return native or [row for row in rows if row.provider in OURS and row.status == OK]


def ratio(ours: Row, rival: Row) -> float | None:
    """How many times longer the rival takes."""
    if ours.time_us is None or rival.time_us is None:
        return None
    return rival.time_us / ours.time_us


def missed(rows: Sequence[Row]) -> list[str]:
    """What stays below its floor, a line each."""
    lines = []
    for case in _cases(rows):
        for ours in filter(is_ours, subjects(case)):
            where = f"{_title(ours)} ({ours.mode}, {ours.shape}, {ours.dtype}, {_threads(ours)}, {ours.provider})"
            for rival in case:
                times, floor = ratio(ours, rival), ratio_floor(ours, rival)
                if floor is not None and times is not None and times < floor:
                    lines.append(f"{where}: {times:.2f}x {rival.who}, floor {floor:.3g}x")
            least = share_floor(ours)
            if least is not None and ours.share is not None and ours.share < least:
                lines.append(f"{where}: {ours.share:.0%} of {ours.bandwidth}, floor {least:.0%}")
    return lines


def _op(op: str, rows: Sequence[Row]) -> str:
    if op == BANDWIDTH:
        return ""
    cases = _cases(rows)
    rivals = _distinct(row.who for case in cases for row in case if row not in subjects(case) and not is_ours(row))
    head = ["options", "shape", "dtype", "threads", "mode", "ours", "time", "GB/s", "bandwidth", "noise", *rivals]
    lines = []
    for case in cases:
        found = {row.who: row for row in case}
        for ours in subjects(case):
            others = (None if found.get(who) is ours else found.get(who) for who in rivals)
            lines.append([*_own_cells(ours), *(_rival_cell(ours, other) for other in others)])
        if not subjects(case):
            first = case[0]
            lines.append([*_case_cells(first), *[""] * 5, *(_rival_cell(first, found.get(who)) for who in rivals)])
    return f"## {op}\n\n{markdown(head, lines)}"


def _case_cells(row: Row) -> list[str]:
    return [row.options, row.shape, row.dtype, "" if row.threads is None else str(row.threads), row.mode]


def _own_cells(row: Row) -> list[str]:
    share = ""
    if row.share is not None:
        share = _beside(f"{row.share:.0%} of {row.bandwidth}", row.share, share_floor(row), "{:.0%}")
    name = f"{row.backend} in place" if row.provider.endswith("in place") else row.backend
    return [*_case_cells(row), name, duration(row.time_us), _number(row.gb_s, ".3g"), share, _number(row.noise, ".0%")]


def _rival_cell(ours: Row, rival: Row | None) -> str:
    if rival is None:
        return ""
    times = ratio(ours, rival)
    if times is None:
        return duration(rival.time_us) if rival.status == OK else rival.status
    floor = ratio_floor(ours, rival) if is_ours(ours) else None
    return f"{duration(rival.time_us)}, {_beside(f'{times:.3g}x', times, floor, '{:.3g}x')}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _beside(text: str, value: float, floor: float | None, form: str) -> str:
    """A value with its floor; in bold where it stays below."""
    if floor is None:
        return text
    text = f"{text} (floor {form.format(floor)})"
    return text if value >= floor else f"**{text}**"


def duration(microseconds: float | None) -> str:
    """A time in the unit that fits it, three digits."""
    if microseconds is None:
        return ""
    if microseconds < 1e3:
        return f"{microseconds:.3g} us"
    return f"{microseconds / 1e3:.3g} ms" if microseconds < 1e6 else f"{microseconds / 1e6:.3g} s"


def _heading(rows: Sequence[Row]) -> str:
    lines = []
    for name, values in (
        ("Device", {row.device for row in rows}),
        ("torch", {row.torch for row in rows}),
        ("triton", {row.triton for row in rows}),
        ("Python", {row.python for row in rows}),
        ("Commit", {row.commit for row in rows}),
    ):
        lines.append(f"{name}: {', '.join(sorted(values)) or '-'}")
    below = missed(rows)
    verdict = "\n".join(f"- {line}" for line in below) if below else "None."
    return (
        "# Benchmarks\n\n"
        + "  \n".join(lines)
        + "\n\nTimes are minima over all calls on a CPU and medians on a GPU. `3x` under a rival: it takes three times "
        "as long as ours. `benchmarks/README.md` says what each column means.\n\n"
        f"Below their floor:\n\n{verdict}"
    )


def _bandwidths(rows: Sequence[Row]) -> str:
    found = [row for row in rows if row.op == BANDWIDTH and row.gb_s is not None]
    if not found:
        return ""
    lines = [[row.provider, _threads(row), f"{row.gb_s:.3g}", f"{row.noise:.0%}"] for row in found]
    return f"## bandwidth of the machine\n\n{markdown(['what', 'threads', 'GB/s', 'noise'], lines)}"


def _notes(rows: Sequence[Row]) -> str:
    told = Counter((row.op, row.who, row.status, row.reason) for row in rows if row.reason)
    lines = [[op, who, status, reason, str(count)] for (op, who, status, reason), count in told.items()]
    return f"## why\n\n{markdown(['op', 'who', 'status', 'reason', 'rows'], lines)}" if lines else ""


def _cases(rows: Sequence[Row]) -> list[list[Row]]:
    cases: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        if row.op != BANDWIDTH:
            cases.setdefault(row.case, []).append(row)
    return list(cases.values())


def _title(row: Row) -> str:
    return f"{row.op}, {row.options}" if row.options else row.op


def _threads(row: Row) -> str:
    return "" if row.threads is None else f"{row.threads} thread{'s' if row.threads != 1 else ''}"


def _distinct(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="A benchmark CSV as markdown.")
    parser.add_argument("csv", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="default: the terminal")
    arguments = parser.parse_args()
    page = render(read(arguments.csv))
    if arguments.output is None:
        print(page, end="")
    else:
        arguments.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
