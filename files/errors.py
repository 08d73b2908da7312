"""What a person can mend, and what is wrong with a file."""

from __future__ import annotations


class UserError(Exception):
    """A mistake outside the program. The message is one sentence that says what to do about it."""


class FileError(UserError):
    """A file that cannot be read or written, or that holds what it should not."""


class WriteError(FileError):
    """A file or folder that cannot be written: no permission, no space, no such place."""


class InUseError(FileError):
    """A folder that another process writes into."""
