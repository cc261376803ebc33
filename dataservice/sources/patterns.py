"""Braces in a source's URL: `{000..127}` and `{train,extra}`, with a bound on the number of
URLs."""

import re

from braceexpand import braceexpand

MOST_PATTERNS = 100_000
RANGE = re.compile(r"(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.-?\d+)?")


def expand(url: str) -> list[str]:
    """Every pattern of a URL. Raises ValueError when braces are unbalanced, or make more than
    `MOST_PATTERNS` patterns."""
    made = _count(url)
    if made > MOST_PATTERNS:
        raise ValueError(f"its braces make {made:,} patterns; at most {MOST_PATTERNS:,} are read")
    try:
        return list(braceexpand(url))
    except ValueError:  # its UnbalancedBracesError
        raise ValueError("it has unbalanced braces") from None


def _count(text: str) -> int:
    """An upper bound on the number of patterns. It is computed without the list, which may not fit
    in memory."""
    # One entry per open brace: the sum over finished alternatives, and the product of the current
    # one.
    over, product, starts = [0], [1], [0]
    at = 0
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif character == "{":
            over.append(0)
            product.append(1)
            starts.append(at + 1)
        elif character == "," and len(over) > 1:
            over[-1] += product[-1]
            product[-1] = 1
        elif character == "}" and len(over) > 1:
            inside = text[starts.pop() : at]
            product[-2] *= max(over.pop() + product[-1], _range(inside))
            product.pop()
        at += 1
    return max(product)


def _range(inside: str) -> int:
    match = RANGE.fullmatch(inside)
    if match is None:
        return 1
    ends = [int(each) if each[-1].isdecimal() else ord(each) for each in match.group(1, 2)]
    return abs(ends[1] - ends[0]) + 1
