"""What extensions offer exists, and is loaded by name."""

from typing import get_args

import pytest

from planner.core.extensions import ExtensionPoint, load, registered_names


@pytest.mark.parametrize("seam", get_args(ExtensionPoint))
def test_what_is_offered_can_be_loaded(seam: ExtensionPoint) -> None:
    """Under every name, with no package of an extra imported beyond torch."""
    assert registered_names(seam)
    assert all(callable(load(seam, name)) for name in registered_names(seam))
