"""The errors of files that are not what they should be.

They derive from RuntimeError, which is what the original package raised and existing code catches.
Each is made from its message alone, so that it survives pickling and a loader's worker processes;
the attributes are for programs.
"""

from __future__ import annotations


class DamagedFileError(RuntimeError):
    """A record file that does not hold what it should.

    Attributes:
        path: The file, as it was given, or None.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class HeaderError(DamagedFileError):
    """A header or a table that makes no sense, or whose checksum does not match."""


class RecordError(DamagedFileError):
    """A record that cannot be read whole, or whose checksum does not match.

    Attributes:
        index: The record's index in its reader, or None.
        offset: The record's first byte in the file, or None.
        expected: The checksum that the file's table gives, or None.
        found: The checksum of the bytes that were read, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        index: int | None = None,
        offset: int | None = None,
        expected: int | None = None,
        found: int | None = None,
    ) -> None:
        super().__init__(message, path=path)
        self.index = index
        self.offset = offset
        self.expected = expected
        self.found = found


class RecordWarning(UserWarning):
    """A file that is read, but whose header carries no checksum."""
