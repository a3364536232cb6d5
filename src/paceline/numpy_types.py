"""Names for the types of NumPy arrays that many modules use."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
UInt8s = NDArray[np.uint8]
Bools = NDArray[np.bool_]
