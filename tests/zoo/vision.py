"""Lets models of `timm` be imported: it asks for torchvision, of which the package index has builds for CUDA only.

`make` sets one aside that does not load beside a CPU torch. Its Python files are all that models need: what registers
its operators is left out.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

__all__ = ["find_torchvision"]


def find_torchvision() -> None:
    """Make the torchvision that `make` has set aside importable, if there is no other."""
    aside = Path(sys.prefix, "aside")
    if find_spec("torchvision") is None and aside.is_dir():
        sys.path.append(str(aside))
        sys.modules.setdefault("torchvision._meta_registrations", ModuleType("torchvision._meta_registrations"))
