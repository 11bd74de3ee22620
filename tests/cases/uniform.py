# SPDX-License-Identifier: Apache-2.0
"""UNI problems: q = k = 0 and scale 1, so that weights are uniform over the allowed keys.

With v[j] = j an output is the mean index of the keys that its row may see: a value that can be
worked out by hand and that shows at once which keys took part.
"""

import numpy as np

from tests.cases.accuracy import DTYPES
from tests.cases.problem import Problem


def uniform(lq, lkv, *, b=1, hq=1, hkv=1, dtype="float32", **options) -> Problem:
    """A UNI problem with head dim 1."""
    kind = DTYPES[dtype]
    value = np.broadcast_to(np.arange(lkv, dtype=np.float64)[None, :, None, None], (b, lkv, hkv, 1))
    return Problem(
        query=np.zeros((b, lq, hq, 1), kind),
        key=np.zeros((b, lkv, hkv, 1), kind),
        value=value.astype(kind),
        scale=1.0,
        **options,
    )


def means(out) -> np.ndarray:
    """The [B, Lq] mean indices of a UNI problem with one head, as float64."""
    return np.asarray(out)[:, :, 0, 0].astype(np.float64)
