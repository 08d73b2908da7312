"""Exceptions whose message is for the user: mistakes that the user can correct."""

from __future__ import annotations


class UserError(Exception):
    """A mistake outside the program; the message is one sentence with advice."""


class FileError(UserError):
    """A file that cannot be read or written, or whose content is invalid."""


class WriteError(FileError):
    """A file or folder that cannot be written, such as for lack of permission or space."""


class InUseError(FileError):
    """A folder that another process is writing into."""
