"""Small models and what users do with them: all must do the same after `tilewise.optimize`."""

from . import (
    aliasing,
    arguments,
    attributes,
    changes,
    contexts,
    conversions,
    flags,
    frozen,
    hooks,
    inplace,
    layers,
    randomness,
    results,
    shapes,
    state,
    structure,
    surgery,
    training,
    weights,
    whole,
)
from .case import CASES

KINDS = (aliasing, arguments, attributes, changes, contexts, conversions, flags, frozen, hooks,
         inplace, layers, randomness, results, shapes, state, structure, surgery, training,
         weights, whole)

__all__ = ["CASES", "KINDS"]
