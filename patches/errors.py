"""The one error that the patch tool raises."""

from collections.abc import Iterator
from contextlib import contextmanager


class PatchError(Exception):
    """A target cannot be read, patched or trusted; the message names the fix."""


class NotInstalledError(PatchError):
    """The target is not in the environment."""


class UnreachableError(PatchError):
    """The package index cannot be reached."""


@contextmanager
def file_errors_explained() -> Iterator[None]:
    """Turn an OSError (permission, full disk, ...) into a PatchError."""
    try:
        yield
    except OSError as error:
        raise PatchError(
            f"cannot use {error.filename or 'a file'} ({error.strerror}): run the command as the "
            "owner of the Python environment, with free space on its disk."
        ) from error
