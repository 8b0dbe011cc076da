"""Reads run folders, finished or not, whole or cut off in the middle of a line.

Whatever cannot be used is left out and named in `Run.problems`; only a folder that is no run folder at all
is an error.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from marlhf.errors import UserError

STATES = ("running", "finished", "interrupted", "failed")
_MARKS = ("config.yaml", "status.json", "metrics.jsonl")
_NOT_METRICS = ("stage", "step", "seconds")


@dataclass(frozen=True)
class Curve:
    """One metric over steps, in the order of the steps; None is a value that was not finite."""

    steps: list[int]
    values: list[float | None]

    @property
    def last(self) -> float | None:
        """The newest finite value."""
        return next((value for value in reversed(self.values) if value is not None), None)


@dataclass(frozen=True)
class Evaluation:
    """One evaluation on the held-out prompts, as far as the page shows it."""

    step: int
    scores: list[float]
    """One per response."""
    macro_lengths: dict[int, int]
    """Tokens in a macro action -> number of macro actions."""
    left_out: int = 0
    """Scores that were not finite."""


@dataclass(frozen=True)
class Sample:
    """One response to a held-out prompt; `macro_ids` has one entry per token, negative outside any."""

    step: int
    prompt: str
    response: str
    tokens: list[str]
    macro_ids: list[int]
    score: float | None
    kl: float | None
    reference: str | None


@dataclass
class Run:
    """What a run folder holds."""

    name: str
    folder: Path
    stage: str = ""
    """`sft`, `reward`, `ppo`, another stage's name, or empty where nothing says it."""
    state: str = ""
    """One of STATES, or empty where there is no readable `status.json`."""
    step: int | None = None
    total_steps: int | None = None
    message: str = ""
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    """Stage -> metric -> curve."""
    seconds: float | None = None
    """The newest value of `seconds` in `metrics.jsonl`."""
    evaluations: list[Evaluation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    config_text: str = ""
    config: dict[str, str] = field(default_factory=dict)
    """Dotted key -> value as text."""
    problems: list[str] = field(default_factory=list)


def read_run(name: str, folder: Path) -> Run:
    """Reads one run folder. Raises UserError if the folder does not exist or is not a run's."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such run folder")
    if not any((folder / mark).is_file() for mark in _MARKS):
        raise UserError(f"{folder}: not a run folder; one holds at least one of {', '.join(_MARKS)}")
    run = Run(name=name, folder=folder)
    _read_status(run)
    _read_metrics(run)
    _read_evaluations(run)
    _read_samples(run)
    _read_config(run)
    if not run.stage:
        run.stage = next(iter(run.curves), "ppo" if run.evaluations or run.samples else "")
    return run


def read_runs(runs: Mapping[str, Path]) -> list[Run]:
    """Reads run folders by name. Raises UserError if there is none, or one is not a run folder."""
    if not runs:
        raise UserError("a report needs at least one run folder")
    return [read_run(name, Path(folder)) for name, folder in runs.items()]


def _read_status(run: Run) -> None:
    content = _content(run.folder / "status.json")
    if content is None:
        run.problems.append("There is no status.json: how the run ended is not known.")
        return
    status = _parsed(content)
    if not isinstance(status, dict) or status.get("state") not in STATES:
        run.problems.append("status.json cannot be read: how the run ended is not known.")
        return
    run.state = status["state"]
    run.stage = str(status.get("stage") or "")
    run.step = _integer(status.get("step"))
    run.total_steps = _integer(status.get("total_steps"))
    run.message = str(status.get("message") or "")


def _read_metrics(run: Run) -> None:
    points: dict[str, dict[str, dict[int, float | None]]] = {}
    replaced = 0
    for line in _lines(run, "metrics.jsonl"):
        step = _integer(line.get("step"))
        if step is None:
            run.problems.append("metrics.jsonl: a line without a step is left out.")
            continue
        metrics = points.setdefault(str(line.get("stage") or run.stage), {})
        seconds = _finite(line.get("seconds"))
        run.seconds = run.seconds if seconds is None else seconds
        again = False
        for key, value in line.items():
            if key in _NOT_METRICS or not (value is None or _is_number(value)):
                continue
            by_step = metrics.setdefault(key, {})
            again = again or step in by_step
            by_step[step] = _finite(value)
        replaced += again
    if replaced:
        run.problems.append(
            f"metrics.jsonl: {replaced} line{'s' * (replaced > 1)} repeated a step, as after a resume; "
            "the later line counts."
        )
    for stage, metrics in points.items():
        run.curves[stage] = {
            key: Curve(steps=sorted(by_step), values=[by_step[step] for step in sorted(by_step)])
            for key, by_step in metrics.items()
        }


def _read_evaluations(run: Run) -> None:
    by_step: dict[int, Evaluation] = {}
    for line in _lines(run, "evaluations.jsonl"):
        step = _integer(line.get("step"))
        scores = line.get("scores")
        if step is None or not isinstance(scores, list):
            run.problems.append("evaluations.jsonl: a line without a step or without scores is left out.")
            continue
        lengths = line.get("macro_lengths")
        counts = {
            int(length): count
            for length, count in (lengths.items() if isinstance(lengths, dict) else ())
            if length.isdecimal() and isinstance(count, int) and not isinstance(count, bool)
        }
        finite = _finite_values(scores)
        by_step[step] = Evaluation(
            step=step,
            scores=finite,
            macro_lengths=dict(sorted(counts.items())),
            left_out=len(scores) - len(finite),
        )
    run.evaluations = [by_step[step] for step in sorted(by_step)]


def _read_samples(run: Run) -> None:
    for line in _lines(run, "samples.jsonl"):
        step = _integer(line.get("step"))
        prompt, response = line.get("prompt"), line.get("response")
        if step is None or not isinstance(prompt, str) or not isinstance(response, str):
            run.problems.append("samples.jsonl: a line without step, prompt or response is left out.")
            continue
        tokens, macro_ids = line.get("tokens"), line.get("macro_ids")
        if not isinstance(tokens, list) or not isinstance(macro_ids, list) or len(tokens) != len(macro_ids):
            run.problems.append("samples.jsonl: a response without one macro id per token is shown as plain text.")
            tokens, macro_ids = [], []
        reference = line.get("reference")
        run.samples.append(
            Sample(
                step=step,
                prompt=prompt,
                response=response,
                tokens=[str(token) for token in tokens],
                macro_ids=[-1 if _integer(macro) is None else macro for macro in macro_ids],
                score=_finite(line.get("score")),
                kl=_finite(line.get("kl")),
                reference=reference if isinstance(reference, str) else None,
            )
        )


def _read_config(run: Run) -> None:
    content = _content(run.folder / "config.yaml")
    if content is None:
        run.problems.append("There is no config.yaml.")
        return
    run.config_text = content.decode("utf-8", errors="replace")
    try:
        tree = OmegaConf.to_container(OmegaConf.create(run.config_text), resolve=False)
    except Exception:  # OmegaConf and the YAML parser below it share no base class
        run.problems.append("config.yaml is not valid YAML; it is shown as it stands.")
        return
    run.config = dict(_flat(tree))


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        text = tree if isinstance(tree, str) and tree else json.dumps(tree, default=str, ensure_ascii=False)
        yield prefix, text


def _content(file: Path) -> bytes | None:
    try:
        return file.read_bytes() if file.is_file() else None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error


def _lines(run: Run, file_name: str) -> Iterator[dict[str, Any]]:
    content = _content(run.folder / file_name)
    if content is None:
        return
    lines = content.split(b"\n")
    last = max((position for position, line in enumerate(lines) if line.strip()), default=-1)
    for position, line in enumerate(lines):
        if not line.strip():
            continue
        parsed = _parsed(line)
        if isinstance(parsed, dict):
            yield parsed
        elif position == last:
            run.problems.append(
                f"{file_name}: the last line is broken, as when a run is killed in mid-write; it is left out."
            )
        else:
            run.problems.append(f"{file_name}, line {position + 1}: not a JSON object; it is left out.")


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _finite(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def _finite_values(values: object) -> list[float]:
    entries: Iterable[object] = values if isinstance(values, list) else ()
    return [value for value in map(_finite, entries) if value is not None]
