"""Every error that cupyq raises on purpose, in one tree under :class:`CupyqError`."""

from __future__ import annotations


class CupyqError(Exception):
    """Base of every error that cupyq raises on purpose."""


class ArgumentError(CupyqError, ValueError):
    """An argument has a value that cupyq does not accept."""


class DTypeError(ArgumentError, TypeError):
    """An array has a dtype that the operation does not accept."""


class ShapeError(ArgumentError):
    """An array has a shape that does not fit the others."""


class DeviceMismatch(ArgumentError):
    """Arrays that belong together live on different devices, or some on a GPU and some not."""


class UnknownDevice(ArgumentError, LookupError):
    """A device name is not in the catalogue."""


class IllegalConfig(ArgumentError):
    """A kernel configuration cannot run this problem on this device."""


class NotInstalled(CupyqError, ImportError):
    """A package that this step needs is not installed."""


class NoDevice(CupyqError):
    """A CUDA device is needed and none can be used."""


class CompileError(CupyqError):
    """NVRTC refused a kernel's source."""


class FormatError(CupyqError, ValueError):
    """A file of weights does not hold what its format promises."""


class EmulatorError(CupyqError):
    """The emulator cannot run this program."""


class DatabaseError(CupyqError):
    """The tuning database cannot be read or written."""


class SchemaTooNew(DatabaseError):
    """The tuning database was written by a newer cupyq."""


class TuningError(CupyqError):
    """A tuning run cannot go on."""


class VerificationError(CupyqError):
    """A kernel's result differs from the reference by more than its error bound."""
