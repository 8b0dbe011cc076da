"""The demo at its full size, held to what it claims: minutes of work, so only `make test-long` runs it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from marlhf.demo.results import wilson_lower


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo") / "run"
    # The two processes of a stage share the machine's cores; the whole demo must not be held to one thread.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run([sys.executable, "-m", "marlhf", "demo", "--folder", str(folder)], check=True, env=environment)
    assert (folder / "report.html").stat().st_size > 0
    assert (folder / "curves.png").stat().st_size > 0
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("model", ["reward model", "unseen"])
def test_reward_models_tell_real_summaries_from_worse_ones(results: dict[str, Any], model: str) -> None:
    accuracy = {kind: tuple(counts) for kind, counts in results["accuracy"][model].items()}
    shares = {kind: right / total for kind, (right, total) in accuracy.items()}
    assert shares["all"] >= 0.75, shares
    if model == "reward model":
        assert shares["other"] >= 0.60, shares
    for kind, (right, total) in accuracy.items():
        assert wilson_lower(right, total) > 0.5, kind


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_without_the_prompt_relevance_is_chance(results: dict[str, Any]) -> None:
    right, total = results["accuracy"]["no prompt"]["other"]
    assert wilson_lower(right, total) < 0.5


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arm", ["token PPO", "macro-action PPO"])
def test_ppo_ends_above_sft_and_not_by_degeneration(results: dict[str, Any], arm: str) -> None:
    base, ended = results["policies"]["SFT"], results["policies"][arm]
    gain = ended["score"]["mean"] - base["score"]["mean"]
    assert gain > ended["score"]["half_width_95"] + base["score"]["half_width_95"]
    fall = base["unseen"]["mean"] - ended["unseen"]["mean"]
    assert fall < ended["unseen"]["half_width_95"] + base["unseen"]["half_width_95"]
    assert ended["kl"]["mean"] < 25
    assert ended["distinct_2"] > 0.75 * base["distinct_2"]
    assert ended["repeated_3"] < 0.05
    assert ended["stopped"]["mean"] > 0.85
    assert 0.6 < ended["length"]["mean"] / base["length"]["mean"] < 1.5
