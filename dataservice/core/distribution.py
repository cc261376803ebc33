"""What is installed, and how one asks for more of it.

The package that we import as `dataservice` is not the one of that name on the public index, which
is a stranger's. Until ours is published, it is installed from a checkout or a wheel.
"""

NAME = "multimodal-dataservice"


def installing(extra: str) -> str:
    """How an optional part is installed, as a piece of a sentence."""
    return (
        f"`pip install '.[service,{extra}]'` in a checkout of {NAME}, or its wheel's path with "
        f"`[service,{extra}]` behind it"
    )
