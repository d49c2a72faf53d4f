"""Fixtures and hooks for all tests."""

import gc
import os
import tempfile
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.cli import known_executor

# JAX (the extra `tpu`), where it is installed: eight devices on this machine, and no search for a TPU.
_JAX = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v2-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Several workers share the cores: a second thread of each would wait for a core, and take another's time by waiting.
_THREADS = {"OMP_NUM_THREADS": "1"}
os.environ |= {name: value for name, value in (_JAX | _THREADS).items() if name not in os.environ}

# The same examples in every run, so that a failure is the change's. `HYPOTHESIS_PROFILE=default` searches on.
settings.register_profile("same", derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_configure(config: pytest.Config) -> None:
    """Use temporary caches in which the executor's cost is known, so that tests need not measure it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # those have this process's environment
        folder = tempfile.TemporaryDirectory(prefix="gpipe-plan-caches-")
        config.add_cleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = known_executor(Path(folder.name))
        os.environ["RANKS_FOLDER"] = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collection, which takes a third of the time and finds nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def _few_steps() -> Iterator[None]:
    """Let the equivalence check train for two steps: its late steps take a second, and few tests need them."""
    with pytest.MonkeyPatch.context() as patch:
        if find_spec("torch") is not None:
            patch.setattr("planner.executor.equivalence.subject.LATE_STEPS", 0)
        yield


@pytest.fixture
def late_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the equivalence check train for a few late steps, however slow this machine is."""
    monkeypatch.setattr("planner.executor.equivalence.subject.LATE_STEPS", 6)
    monkeypatch.setattr("planner.model.reference._LATE_S", 10.0)


@pytest.fixture(autouse=True, scope="module")
def _freeze_heap() -> None:
    """Exclude objects of earlier modules from garbage collection, which would otherwise take up to a second."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker more than there are cores, because many tests wait for processes or time limits."""
    return (os.cpu_count() or 1) + 1
