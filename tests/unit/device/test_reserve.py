"""Memory of a GPU that is not available for tensors, on a fake device of 80 kB."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from planner.api.options.solving import SolverOptions
from planner.api.solver_request import request_of
from planner.core.values.partial import PartialProfile
from planner.core.values.plan import ProfileReference
from planner.core.values.profile import Device, Environment, Model, WritingTool
from planner.device.cuda import Cuda
from tests.support.chains import random_profile

CPU = torch.device("cpu")


class FakeCuda:
    """A fake whose libraries take 700 bytes of the device and 32 of the pool when first used."""

    def __init__(self) -> None:
        self.used = False
        self.pool = 50

    def memory_allocated(self, _device: Any) -> int:
        return 20 + 32 * self.used

    def memory_reserved(self, _device: Any) -> int:
        return self.pool + 32 * self.used

    def synchronize(self, _device: Any) -> None:
        """Use the libraries."""
        self.used = True

    def empty_cache(self) -> None:
        self.pool = 20

    def mem_get_info(self, _device: Any) -> tuple[int, int]:
        """Return free and total memory: the context takes 300."""
        return 80_000 - 300 - 700 * self.used - self.memory_reserved(_device), 80_000


def test_reserve_is_context_libraries_and_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the model nor free memory of the pool counts."""
    fake = FakeCuda()
    for name in ("memory_allocated", "memory_reserved", "synchronize", "empty_cache", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    assert Cuda(CPU).reserve_bytes() == 300 + 700 + 32


@pytest.mark.parametrize(("reserve", "expected"), [(None, 1000), ("0B", 0), ("2kB", 2000)])
def test_the_profiles_reserve_is_the_default_of_solve(reserve: str | None, expected: int) -> None:
    profile = random_profile(1, 4)
    profile = replace(profile, device=replace(profile.device, reserve_bytes=1000))
    asked = SolverOptions(devices=2, mem="1GB", batch=1, reserve=reserve)
    request = request_of(profile, ProfileReference(path="", digest=""), asked)
    assert request.inputs.reserve_bytes == expected


def test_a_partial_profile_may_have_another_reserve() -> None:
    """Other programs come and go."""
    one = PartialProfile(
        generator=WritingTool(name="gpipe-plan", version="0"),
        model=Model(),
        device=Device(kind="cuda", name="H100", reserve_bytes=5),
        environment=Environment(),
        optimizer="",
        measurements=(),
    )
    assert one.differences(replace(one, device=replace(one.device, reserve_bytes=7))) == []
    assert one.differences(replace(one, device=replace(one.device, name="A100"))) == ["device"]
