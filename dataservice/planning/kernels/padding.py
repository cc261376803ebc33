"""Padding and chunks of a sequence inside kernels, as `padded_tokens` and `locate` of `core.layout`
have them."""

from dataservice.planning.kernels.compile import leaf


@leaf
def padded_length(tokens: int, degree: int) -> int:
    """`tokens` rounded up to a multiple of 2·degree: zigzag's chunks; as they are at degree 1."""
    if degree == 1:
        return tokens
    return (tokens + 2 * degree - 1) // (2 * degree) * (2 * degree)


@leaf
def ring_member(position: int, tokens: int, degree: int) -> int:
    """Which member of its group holds the token at `position` of a sample of so many `tokens`."""
    if degree == 1:
        return 0
    chunk = position // (padded_length(tokens, degree) // (2 * degree))
    return chunk if chunk < degree else 2 * degree - 1 - chunk
