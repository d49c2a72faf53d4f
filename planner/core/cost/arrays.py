"""Array types of the cost model and of the searches."""

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
IndexArray = NDArray[np.intp]
ChoiceArray = NDArray[np.int8]
"""Recomputation choices of stages, as in `planner.solve.space.tables`."""
