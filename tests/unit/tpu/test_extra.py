"""The packages of the extra `tpu`: what may not import them."""

import subprocess
import sys

import pytest

from planner.tpu.extra import chip_of_device


@pytest.mark.slow
def test_jax_is_imported_by_those_who_compile_alone() -> None:
    """Not by the profiler, nor by a script's command line: processes are forked, and settings made, before it is."""
    modules = "planner.profile, planner.tpu.backend, planner.tpu.training, planner.tpu.compiler"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules or 'torchax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("reported", "chip"), [("TPU v2 core", "v2"), ("TPU v5e", "v5e"), ("TPU v9", ""), ("NVIDIA A100-SXM4-40GB", "")]
)
def test_a_tpu_is_known_by_the_name_it_reports(reported: str, chip: str) -> None:
    """As programs are compiled for it; other devices are none."""
    assert chip_of_device(reported) == chip
