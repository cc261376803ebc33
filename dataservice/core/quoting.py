"""Foreign data quoted in our messages: enough to recognise it, whatever its size."""

MOST_QUOTED = 200
MOST_SAID = 400


def quoted(value: object, most: int = MOST_QUOTED) -> str:
    """A value as Python writes it; one longer than `most` characters is cut, with an ellipsis."""
    if isinstance(value, str):
        return repr(value) if len(value) <= most else f"{value[:most]!r}…"
    return cut(repr(value), most)


def cut(text: object, most: int = MOST_SAID) -> str:
    """The message of a foreign error, or another text; one longer than `most` characters is cut,
    with an ellipsis."""
    said = str(text)
    return said if len(said) <= most else f"{said[:most]}…"
