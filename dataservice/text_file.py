"""Files that a user names."""

from pathlib import Path

from dataservice.core.errors import SpecError


def read_text(path: Path, what: str) -> str:
    """The text of a file that the user named. Raises SpecError saying why it has none."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"the {what} {path} cannot be read: {error.strerror}. Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(
            f"the {what} {path} is not text in UTF-8 ({error.reason} at byte {error.start}). "
            "Give a YAML file."
        ) from error
