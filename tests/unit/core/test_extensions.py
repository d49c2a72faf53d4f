"""Registered extensions exist and can be loaded by name."""

from typing import get_args

import pytest

from planner.core.extensions import ExtensionPoint, load_extension, registered_names


@pytest.mark.parametrize("seam", get_args(ExtensionPoint))
def test_registered_extensions_can_be_loaded(seam: ExtensionPoint) -> None:
    assert registered_names(seam)
    assert all(callable(load_extension(seam, name)) for name in registered_names(seam))
