"""The types of the arrays that searches work on."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]
ChoiceArray = NDArray[np.int8]
"""Recomputations, as in `tables.py`."""
