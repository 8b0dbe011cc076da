"""The README picture."""

import warnings

import numpy as np
import pytest
from matplotlib.image import imread

from marlhf.errors import UserError
from marlhf.report import write_curve_picture
from marlhf.report.charts import COLOURS
from tests.trainer.report.folders import HOSTILE, write_ppo, write_run, write_sft


def pixels_of(image, colour):
    """Which pixels have this colour; `[H, W]`."""
    wanted = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)])
    return (np.abs(np.rint(image[..., :3] * 255) - wanted) <= 2).all(axis=-1)


def test_size_background_and_both_runs_in_both_panels(tmp_path):
    runs = {
        "PPO": write_ppo(tmp_path / "a"),
        "MA-PPO": write_ppo(tmp_path / "b", 0.5),
        "SFT": write_sft(tmp_path / "s"),
    }
    image = imread(write_curve_picture(runs, tmp_path / "new" / "curve.png"))
    assert image.shape[:2] == (600, 1200)
    assert (image[0] == 1).all()
    for colour in COLOURS[:2]:
        drawn = pixels_of(image, colour)
        assert drawn[60:470, 90:590].sum() > 200
        assert drawn[60:470, 690:1180].sum() > 200
    assert not pixels_of(image, COLOURS[2]).any()


def test_one_point_is_visible(tmp_path):
    lines = [{"stage": "ppo", "step": 1, "score": 0.5, "kl": None}]
    runs = {"run": write_run(tmp_path / "run", metrics=lines)}
    image = imread(write_curve_picture(runs, tmp_path / "curve.png"))
    drawn = pixels_of(image, COLOURS[0])
    assert drawn[60:470, 90:590].sum() > 30
    assert not drawn[60:470, 690:1180].any()


@pytest.mark.parametrize("name", [HOSTILE, "_private", "$\\frac{$", "x" * 500])
def test_any_name_is_drawn_as_text(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Glyph")
        write_curve_picture({name: write_ppo(tmp_path / "run")}, tmp_path / "curve.png")


def test_without_any_ppo_score(tmp_path):
    with pytest.raises(UserError, match="PPO score"):
        write_curve_picture({"sft": write_sft(tmp_path / "sft")}, tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
