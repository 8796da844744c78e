"""Settings: what is left open gets good values, what was given stays."""

from __future__ import annotations

import pytest
import torch

from hfai.demo.settings import PRESETS, Settings, choose_device, conflicts, fill_in


def test_on_the_cpu_the_default_is_the_tiny_model_in_fp32() -> None:
    settings = fill_in({"model": None, "precision": "auto", "seed": None}, torch.device("cpu"))
    assert (settings.model, settings.precision, settings.seed) == ("tiny", "fp32", 0)
    assert (
        settings.steps,
        settings.batch_size,
        settings.length,
        settings.learning_rate,
    ) == PRESETS["tiny", "cpu"]


def test_what_was_given_stays() -> None:
    given = {
        "model": "base",
        "precision": "bf16",
        "steps": 3,
        "batch_size": 5,
        "length": 9,
        "learning_rate": 0.5,
        "seed": 11,
    }
    assert fill_in(given, torch.device("cpu")).as_dict() == given


@pytest.mark.parametrize("model", ["tiny", "base", "large", "lstm"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_model_has_a_preset_for_every_device(model: str, device: str) -> None:
    steps, batch_size, length, learning_rate = PRESETS[model, device]
    assert min(steps, batch_size, length) >= 1
    assert 0 < learning_rate < 0.01


def test_conflicts_are_what_was_given_and_differs(settings: Settings) -> None:
    given = {"model": "large", "precision": "auto", "steps": settings.steps, "seed": 0}
    assert conflicts(given, settings) == [("model", "large", "tiny"), ("seed", 0, 3)]
    assert conflicts({}, settings) == []
    assert conflicts(settings.as_dict(), settings) == []


def test_the_model_is_plain_torch_and_fits_a_window(settings: Settings) -> None:
    model = settings.make_model()
    assert model.config.max_length == settings.length
    assert all(not type(module).__module__.startswith("hfai.nn") for module in model.modules())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused() -> None:
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ValueError, match=r"--device cuda was given.*use --device cpu"):
        choose_device("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_with_a_gpu_auto_is_the_gpu_with_bf16_where_it_has_it() -> None:
    assert choose_device("auto").type == choose_device("cuda").type == "cuda"
    assert choose_device("cpu").type == "cpu"
    settings = fill_in({}, torch.device("cuda"))
    assert settings.model == "base"
    has_bf16 = torch.cuda.get_device_capability()[0] >= 8
    assert settings.precision == ("bf16" if has_bf16 else "fp32")
