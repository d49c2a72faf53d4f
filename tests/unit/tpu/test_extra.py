"""The packages of the extra `tpu`: what may not import them."""

import subprocess
import sys


def test_jax_is_imported_by_those_who_compile_alone() -> None:
    """Not by the profiler, nor by a script's command line: processes are forked, and settings made, before it is."""
    modules = "planner.profile, planner.tpu.backend, planner.tpu.training, planner.tpu.compiler"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules or 'torchax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
