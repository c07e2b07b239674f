"""The field's way to turn a load into a score."""

import numpy as np

from epp.plugin import Floats


def least_is_best(load: Floats) -> Floats:
    """`(max - x) / (max - min)`, shape (n,): 1 for the least load, 0 for the greatest; all 1 when they are equal."""
    if not len(load):
        return load
    greatest = load.max()
    width = greatest - load.min()
    return (greatest - load) / width if width > 0 else np.ones(len(load))
