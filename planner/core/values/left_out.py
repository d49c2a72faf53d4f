"""Mark for fields that are omitted from files if they have their default value.

Fields that were added after the first version of a file format have this mark. So a file of an older version has the
same bytes and digest when this version writes it again.
"""

from types import MappingProxyType
from typing import Final

LEFT_OUT: Final = MappingProxyType({"left_out": True})
"""Metadata of a field that is omitted if it has its default value."""
