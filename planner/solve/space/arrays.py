"""Array types of the searches."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]
ChoiceArray = NDArray[np.int8]
"""Recomputation choices, as in `tables.py`."""
