"""Packages of the extra `tpu`."""

from pathlib import Path

import pytest

from planner.tpu.extra import chip_of_device
from tests.support.ranks import run_ranks


@pytest.mark.slow
def test_only_the_compiler_imports_jax(tmp_path: Path) -> None:
    """Before that, processes are forked and settings made."""
    modules = "planner.profile, planner.tpu.backend, planner.tpu.training, planner.tpu.compiler"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules or 'torchax' in sys.modules)"
    (tmp_path / "imports.py").write_text(code)
    run_ranks(1, ["imports.py"], tmp_path)


@pytest.mark.parametrize(
    ("reported", "chip"), [("TPU v2 core", "v2"), ("TPU v5e", "v5e"), ("TPU v9", ""), ("NVIDIA A100-SXM4-40GB", "")]
)
def test_chips_are_recognized_by_reported_names(reported: str, chip: str) -> None:
    assert chip_of_device(reported) == chip
