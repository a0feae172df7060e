"""The substrate of generated code: the only room that sees LLVM."""

from .elements import ELEMENTS, Element
from .function import Function, Loop, Module
from .pointers import Pointer
from .values import (
    BOOL,
    F32,
    F64,
    I8,
    I32,
    I64,
    PTR,
    VOID,
    Bits,
    Flag,
    Index,
    Value,
    Vector,
    Words,
    bits_bytes,
)

__all__ = ["BOOL", "ELEMENTS", "F32", "F64", "I32", "I64", "I8", "PTR", "VOID", "Bits", "Element",
           "Flag", "Function", "Index", "Loop", "Module", "Pointer", "Value", "Vector", "Words",
           "bits_bytes"]
