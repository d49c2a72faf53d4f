"""Profiles by formula, before there is code or a device, as a command and as a function."""

import subprocess
import sys
from pathlib import Path

import pytest

import planner
from planner import files
from planner.core.errors import UsageError
from planner.core.values.profile import Profile
from tests.support.cli import call, environment

SHAPE = {"layers": 4, "hidden": 256, "heads": 4, "sequence": 128, "vocabulary": 1000}
TYPED = [text for name, value in SHAPE.items() for text in (f"--{name}", str(value))]


def by_formula(**more: object) -> Profile:
    """Return the profile of a small model."""
    return planner.profile(**{"from_formula": "transformer", **SHAPE, **more})


def test_profiles_by_formula_do_not_import_torch() -> None:
    program = (
        "import planner, sys; "
        f"p = planner.profile(from_formula='transformer', rate='100TFLOP/s', **{SHAPE}); "
        "planner.solve(p, devices=2, mem='8GB', batch=8, schedule='zb-h1'); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.slow
def test_command_writes_the_profile_of_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default, times assume the rate of published runs on the device."""
    path = tmp_path / "profile.yaml"
    estimate = ["--from-formula", "transformer", *TYPED, "--device", "estimate:a100-80gb", "--dtype", "bf16-mixed"]
    ran = call(capsys, "profile", *estimate, "-o", str(path))
    assert ran.code == 0
    assert "times assume 182 TFLOP/s, which published runs on A100 sustained" in ran.err
    assert path.read_text().startswith("# Estimated by `gpipe-plan profile --from-formula transformer`")
    asked = {"device": "estimate:a100-80gb", "dtype": "bf16-mixed"}
    by_formula(**asked, output=tmp_path / "again.yaml")
    assert path.read_text() == (tmp_path / "again.yaml").read_text()
    written = files.read_profile(str(path))
    assert (written.device.how, written.device.name) == ("estimated", "NVIDIA A100-SXM4-80GB")
    assert written.micro_batch_sizes == (1, 2, 4, 8)
    usual, half = by_formula(**asked).layers[1], by_formula(**asked, rate=91e12).layers[1]
    assert half.forward_us[0] == pytest.approx(2 * usual.forward_us[0])
    ran = call(capsys, "solve", str(path), "--devices", "2", "-o", str(tmp_path / "plan.yaml"))
    assert ran.code == 0
    assert "estimated, not measured" in ran.out + ran.err


@pytest.mark.parametrize(
    ("device", "options", "dtype", "rate"),
    [
        ("h100", {}, "bf16-mixed", "433 TFLOP/s"),
        ("h200", {"dtype": "bf16"}, "bf16", "433 TFLOP/s"),
        ("gb200", {}, "bf16-mixed", "916 TFLOP/s"),
        ("b200", {}, "bf16-mixed", "2250 TFLOP/s"),
        ("h100", {"dtype": "fp32"}, "fp32", "67 TFLOP/s"),
        ("v100", {}, "fp16-mixed", "125 TFLOP/s"),
        ("tpu:v4", {}, "float32", "275 TFLOP/s"),
    ],
)
def test_default_precision_and_rate_of_a_device(device: str, options: dict[str, str], dtype: str, rate: str) -> None:
    notes: list[str] = []
    profile = by_formula(device=f"estimate:{device}", note=notes.append, **options)
    assert profile.environment.dtype == dtype
    assert profile.model.settings["rate"] == rate
    assert any(rate in note for note in notes)
    assert any("change this with `--dtype`" in note for note in notes) == dtype.endswith("-mixed")


@pytest.mark.parametrize(
    ("dtype", "optimizer", "expected"),
    [
        (None, "adamw", (4, 4, 8, 0, 4)),
        ("bf16", "adamw", (2, 2, 4, 0, 2)),
        ("bf16-mixed", "momentum", (4, 4, 4, 2, 2)),
        ("fp32", "sgd", (4, 4, 0, 0, 4)),
    ],
)
def test_bytes_of_each_precision_and_optimizer(dtype: str | None, optimizer: str, expected: tuple[int, ...]) -> None:
    layer = by_formula(rate=1e12, dtype=dtype, optimizer=optimizer, batch_sizes=1).layers[1]
    parameters = 12 * 256**2 + 13 * 256
    state = (layer.parameter_bytes, layer.gradient_bytes, layer.optimizer_bytes)
    assert state == tuple(width * parameters for width in expected[:3])
    # Autocast copies weights and biases of products, not those of normalizations.
    assert layer.cast_bytes == expected[3] * (parameters - 4 * 256)
    assert layer.output_bytes == (expected[4] * 128 * 256,)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, "needs `--device estimate:h100` or `--rate`"),
        ({"device": "estimate:mi250x"}, "rates of `mi250x`"),
        ({"rate": "190"}, "`--rate 190`"),
        ({"rate": "190GB/s"}, "`GB/s`"),
        ({"rate": 1e12, "heads": 3}, "do not divide"),
        ({"rate": 1e12, "layers": None}, "needs `--layers`"),
        ({"rate": 1e12, "layers": 0}, "`--layers 0`"),
        ({"rate": 1e12, "hidden": 2**30}, "`--hidden 1073741824`"),
        ({"rate": 1e12, "tensor_parallel": 8}, "at most 4 devices"),
        ({"rate": 1e12, "state_bytes": "2,2"}, "`--state-bytes 2,2`"),
        ({"rate": 1e12, "optimizer": "adafactor"}, "--optimizer adafactor"),
        ({"rate": 1e12, "settings": {"width": 2}}, "`--set`"),
        ({"rate": 1e12, "sequence": 2**26, "vocabulary": 2**26}, "too large"),
        ({"from_formula": "perceptron"}, "--from-formula perceptron"),
        ({"model": "model.py"}, "`model.py`"),
        ({"from_formula": None, "model": "model.py"}, "`--layers`"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_shapes_are_refused(options: dict[str, object], part: str) -> None:
    with pytest.raises(UsageError) as refused:
        by_formula(**options)
    assert part in refused.value.message
