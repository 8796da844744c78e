"""Finding the damaged records of a piece: read at once, and one by one where that fails."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ffrecord.errors import RecordError

if TYPE_CHECKING:
    from ffrecord.reader import FileReader


def damaged_in(reader: FileReader, piece: range) -> Iterator[RecordError]:
    """Yield an error for each damaged record of a piece.

    Args:
        reader: It compares checksums.
        piece: Indices, few enough to be read in one batch; see `FileReader.pieces`.

    Raises:
        OSError: An error that says nothing about one record alone, as a bad sector's (EIO) does.
    """
    try:
        reader.read(piece, writable=False)
        return
    except RecordError:
        pass
    except OSError as error:
        if not _is_bad_sector(reader, error):
            raise
    for index in piece:
        try:
            reader.read_one(index)
        except RecordError as error:
            yield error
        except OSError as error:
            if not _is_bad_sector(reader, error):
                raise
            path = reader.file_of(index)
            message = f"record {index} is damaged: {path}: {error.strerror}"
            yield RecordError(message, path=path, index=index)


def _is_bad_sector(reader: FileReader, error: OSError) -> bool:
    # Of a store that is gone every record would be said to be damaged.
    return error.errno == errno.EIO and not reader._open_set().is_remote
