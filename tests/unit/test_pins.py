"""The versions that `make` installs fit each other."""

import re
from pathlib import Path

PINS = Path(__file__).parents[2] / "constraints.txt"


def test_torchvision_is_the_one_for_torch() -> None:
    """It is built for one release of torch; since 2.0 and 0.15 their minor versions go side by side."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", PINS.read_text(encoding="utf-8"), re.MULTILINE))
    torch, vision = (tuple(map(int, pins[name].split(".")[:2])) for name in ("torch", "torchvision"))
    assert vision == (0, torch[1] + 15)
