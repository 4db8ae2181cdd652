"""The alternate signal stack of the calling thread: sigaltstack(2)."""

from __future__ import annotations

import ctypes


class SignalStack(ctypes.Structure):
    """`stack_t`."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_sigaltstack = ctypes.CDLL(None, use_errno=True).sigaltstack


def current() -> SignalStack:
    """What this thread's signal handlers run on."""
    stack = SignalStack()
    _sigaltstack(None, ctypes.byref(stack))
    return stack


def put(stack: SignalStack) -> None:
    """Let this thread's signal handlers run on `stack`, which `current` gave."""
    if _sigaltstack(ctypes.byref(stack), None):
        raise OSError(ctypes.get_errno(), "sigaltstack")
