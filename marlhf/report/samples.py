"""Samples for the page: the same prompt across runs, before and after, token by token."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from marlhf.report.reading import Run, Sample

MOST_PROMPTS = 24
"""Prompts shown; `samples.jsonl` has them all."""


@dataclass(frozen=True)
class MacroAction:
    """Tokens that were one action. `number` is negative for tokens outside any, such as padding."""

    number: int
    tokens: list[str]

    @property
    def tooltip(self) -> str:
        return f"macro action {self.number}" if self.number >= 0 else "outside any macro action"


@dataclass(frozen=True)
class Response:
    """One response of one run."""

    run: str
    when: str
    sample: Sample
    macro_actions: list[MacroAction]


@dataclass
class Prompt:
    """A prompt with everything that was answered to it."""

    text: str
    reference: str | None
    responses: list[Response] = field(default_factory=list)


def by_prompt(runs: Sequence[Run]) -> list[Prompt]:
    """The first and last sample of every run for each prompt, in the order of the files.

    A prompt that stands twice in an evaluation stays two prompts.
    """
    prompts: dict[tuple[str, int], Prompt] = {}
    for run in runs:
        steps = sorted({sample.step for sample in run.samples})
        for step in steps[:1] + steps[1:][-1:]:
            when = "before training" if step == 0 else f"iteration {step}"
            seen: Counter[str] = Counter()
            for sample in (sample for sample in run.samples if sample.step == step):
                key = (sample.prompt, seen[sample.prompt])
                seen[sample.prompt] += 1
                prompt = prompts.setdefault(key, Prompt(sample.prompt, sample.reference))
                prompt.reference = prompt.reference or sample.reference
                prompt.responses.append(Response(run.name, when, sample, macro_actions(sample)))
    return list(prompts.values())


def macro_actions(sample: Sample) -> list[MacroAction]:
    """Neighbouring tokens with the same macro id, joined; empty where the sample has no token list."""
    actions: list[MacroAction] = []
    for token, macro in zip(sample.tokens, sample.macro_ids, strict=True):
        if actions and actions[-1].number == macro:
            actions[-1].tokens.append(token)
        else:
            actions.append(MacroAction(macro, [token]))
    return actions
