"""The extra `tpu` where it is not installed, and what may not import it."""

import subprocess
import sys

import pytest

from planner.bridge import extra
from planner.bridge.extra import check_installed
from planner.core.errors import UsageError


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is missing, and the command."""
    monkeypatch.setattr(extra.importlib.util, "find_spec", lambda name: None if name != "libtpu" else name)
    with pytest.raises(UsageError, match="jax and torchax are not installed") as refused:
        check_installed()
    assert refused.value.hint == "pip install 'gpipe-plan[tpu]'"


def test_jax_is_imported_by_those_who_compile_alone() -> None:
    """Not by the profiler, nor by a script's command line: processes are forked, and settings made, before it is."""
    modules = "planner.profile, planner.executor.jax.training, planner.bridge.compiling, planner.bridge.outcomes"
    code = f"import sys, {modules}; sys.exit('jax' in sys.modules or 'torchax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
