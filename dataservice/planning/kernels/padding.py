"""The padded length of a sequence inside kernels, as `core.layout.padded_tokens` has it."""

from dataservice.planning.kernels.compile import kernel


@kernel
def padded_length(tokens: int, degree: int) -> int:
    """`tokens` rounded up to a multiple of 2·degree: zigzag's chunks; as they are at degree 1."""
    if degree == 1:
        return tokens
    return (tokens + 2 * degree - 1) // (2 * degree) * (2 * degree)
