"""Exceptions for mistakes that the user can correct; the message is shown without traceback."""

from __future__ import annotations


class UserError(Exception):
    """Raised for a mistake outside the program; the message is one sentence with advice."""


class FileError(UserError):
    """Raised for a file that cannot be read or written, or whose content is invalid."""


class WriteError(FileError):
    """Raised for a file or folder that cannot be written, such as for lack of permission."""


class InUseError(FileError):
    """Raised for a folder that another process is writing into."""
