"""One self-contained offline page for one or several run folders."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from marlhf.files import write_bytes_atomically
from marlhf.report import charts, samples
from marlhf.report.reading import Run, read_runs
from marlhf.report.table import Table
from marlhf.report.text import decimal, json_for_html, printable

_HERE = Path(__file__).parent
_STAGE_TITLES = {"ppo": "PPO", "reward": "Reward model", "sft": "Supervised fine-tuning"}
_STATE_SIGNS = {"running": "\u25b6", "finished": "\u2713", "interrupted": "\u275a\u275a", "failed": "\u2715"}
# The markers of the charts, drawn in the legends around (17, 7).
_SYMBOL_PATHS = {
    "circle": "M13 7a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "square": "M13.5 3.5h7v7h-7z",
    "diamond": "M17 2l5 5-5 5-5-5z",
    "triangle-up": "M17 2.2l4.6 8h-9.2z",
    "cross": "M15.6 2.6h2.8v3h3v2.8h-3v3h-2.8v-3h-3v-2.8h3z",
    "x": "M14 3l3 2.2 3-2.2 1.8 1.8-2.4 2.2 2.4 2.2-1.8 1.8-3-2.2-3 2.2-1.8-1.8 2.4-2.2-2.4-2.2z",
    "triangle-down": "M17 11.8l4.6-8h-9.2z",
    "star": "M17 1.8l1.6 3.6 3.9.4-2.9 2.6.8 3.8-3.4-2-3.4 2 .8-3.8-2.9-2.6 3.9-.4z",
}


@dataclass(frozen=True)
class _Stage:
    name: str
    title: str
    shown: list[charts.Chart]
    more: list[charts.Chart]
    missing: list[str]


@dataclass(frozen=True)
class _Differences:
    title: str
    runs: list[str]
    rows: list[tuple[str, list[str]]] = field(default_factory=list)


def build_report(
    runs: Mapping[str, Path],
    output: Path,
    *,
    title: str,
    tables: Sequence[Table] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Writes the page and returns its path.

    Args:
        runs: run folders by the name that the page calls them, in the order of the page. Runs that are
            still going, were interrupted or failed are shown as far as they came.
        output: the HTML file. It is written beside and renamed, so a reader never sees half a page.
        title: the page's heading.
        tables: shown first, in this order.
        notes: sentences for the end of the page.

    Raises UserError if a folder is not a run folder or the page cannot be written.
    """
    read = read_runs(runs)
    look = charts.styles(read)
    ppo = [run for run in read if run.stage == "ppo" or "ppo" in run.curves]
    stages = [_stage(name, read, look, prefix=f"stage-{position}") for position, name in enumerate(_stage_names(read))]
    distributions = charts.score_distributions(ppo, look)
    lengths = charts.macro_lengths(ppo, look)
    prompts = samples.by_prompt(read)

    drawn = [chart for stage in stages for chart in (*stage.shown, *stage.more)] + distributions
    drawn += [lengths] if lengths else []
    plotly, script = get_plotlyjs(), (_HERE / "page.js").read_text(encoding="utf-8")
    page = _template().render(
        title=title,
        policy=_content_policy(plotly, script),
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        plotly=Markup(plotly),
        script=Markup(script),
        figures=Markup(json_for_html({chart.identifier: {**chart.figure, "height": chart.height} for chart in drawn})),
        runs=read,
        look=look,
        symbols=_SYMBOL_PATHS,
        signs=_STATE_SIGNS,
        standing={run.name: _standing(run) for run in read},
        duration=_duration,
        decimal=decimal,
        tables=tables,
        stages=stages,
        distributions=distributions,
        without_scores=[run.name for run in ppo if not any(e.scores for e in run.evaluations)],
        lengths=lengths,
        without_lengths=[run.name for run in ppo if not any(e.macro_lengths for e in run.evaluations)],
        prompts=prompts[: samples.MOST_PROMPTS],
        more_prompts=max(0, len(prompts) - samples.MOST_PROMPTS),
        without_samples=[run.name for run in ppo if not run.samples],
        differences=_differences(read),
        notes=notes,
    )
    write_bytes_atomically(Path(output), page.encode("utf-8"))
    return Path(output)


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Every value that the page shows passes here, so no text can be forgotten.
        finalize=_shown,
    )
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False)
    return environment.get_template("page.html")


def _shown(value: object) -> object:
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _content_policy(*scripts: str) -> str:
    """A policy under which only these scripts run and nothing is fetched, whatever a text smuggles in."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(f"'sha256-{digest}'" for digest in digests),
            # Plotly writes style attributes and a style element.
            "style-src 'unsafe-inline'",
            # The empty icon.
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


def _stage_names(runs: Sequence[Run]) -> list[str]:
    present = dict.fromkeys(name for run in runs for name in (run.stage, *run.curves) if name)
    known = [name for name in _STAGE_TITLES if name in present]
    return known + [name for name in present if name not in _STAGE_TITLES]


def _stage(name: str, runs: Sequence[Run], look: dict[str, charts.Style], *, prefix: str) -> _Stage:
    of_stage = [run for run in runs if run.stage == name or run.curves.get(name)]
    shown, more = charts.stage_charts(name, of_stage, look, prefix=prefix)
    return _Stage(
        name=name,
        title=_STAGE_TITLES.get(name, name),
        shown=shown,
        more=more,
        missing=[run.name for run in of_stage if not run.curves.get(name)],
    )


def _standing(run: Run) -> str:
    """Where a run stands, in a sentence."""
    unit = charts.AXIS_NAME.get(run.stage, "step")
    where = ""
    if run.step is not None:
        where = f"{unit} {run.step}" + (f" of {run.total_steps}" if run.total_steps else "")
    stage = _STAGE_TITLES.get(run.stage, run.stage)
    place = ", ".join(part for part in (stage, where) if part)
    return {
        "finished": f"Finished: {place}." if place else "Finished.",
        "running": f"Running: {place}." if place else "Running.",
        "interrupted": f"Interrupted at {place}." if place else "Interrupted.",
        "failed": f"Failed at {place}." if place else "Failed.",
    }.get(run.state, f"State unknown: {place}." if place else "State unknown.")


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _differences(runs: Sequence[Run]) -> list[_Differences]:
    """Per stage with several runs: the keys on which their configurations differ."""
    found = []
    for stage in _stage_names(runs):
        of_stage = [run for run in runs if run.stage == stage and run.config]
        if len(of_stage) < 2:
            continue
        keys = dict.fromkeys(key for run in of_stage for key in run.config)
        rows = [(key, [run.config.get(key, "\u2013") for run in of_stage]) for key in keys]
        found.append(
            _Differences(
                title=_STAGE_TITLES.get(stage, stage),
                runs=[run.name for run in of_stage],
                rows=[(key, values) for key, values in rows if len(set(values)) > 1],
            )
        )
    return found
