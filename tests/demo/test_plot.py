"""The picture: a real PNG, whatever the number of steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from hfai.demo.plot import draw_losses, running_mean


@pytest.mark.parametrize("steps", [1, 2, 300])
def test_the_curve_is_drawn(tmp_path: Path, steps: int) -> None:
    losses = [5.5 - 3 * step / steps for step in range(steps)]
    draw_losses(tmp_path / "loss.png", losses, 3.1, "title")
    image = imread(tmp_path / "loss.png")
    assert image.shape[:2] == (540, 960)
    blue = (image[..., 2] > image[..., 0] + 0.3).sum()
    assert blue > 100
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_loss_that_is_not_finite_is_left_out_of_the_picture(tmp_path: Path) -> None:
    draw_losses(tmp_path / "loss.png", [5.0, 4.0, float("nan")], 3.1, "title")
    assert imread(tmp_path / "loss.png").shape[:2] == (540, 960)


def test_the_running_mean_is_over_a_fiftieth() -> None:
    assert running_mean([3.0, 1.0, 2.0]) == [3.0, 1.0, 2.0]
    losses = [float(step) for step in range(100)]
    assert running_mean(losses)[:3] == [0.5, 1.0, 2.0]
    assert running_mean(losses)[-1] == 98.5
