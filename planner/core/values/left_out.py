"""Mark of the fields that files leave out if they have their default.

Fields that were added to a file later have this mark: files that do not use them keep their bytes and digests.
"""

from types import MappingProxyType
from typing import Final

LEFT_OUT: Final = MappingProxyType({"left_out": True})
"""Metadata of such a field."""
