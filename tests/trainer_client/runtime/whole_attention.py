"""Attention over whole sequences in one process, which what many compute is compared with."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def dense_attention(q, k, v, *, causal=True):
    """Torch's own, over the rows of one sequence: [rows, heads, dim], as ours."""
    one = [x.transpose(0, 1)[None] for x in (q, k, v)]
    out = scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=True)
    return out[0].transpose(0, 1)


def zigzag_rows(padded, degree, index):
    """Rows of the whole pack that member ``index`` holds, written out plainly."""
    rows, start = [], 0
    for length in padded:
        if degree == 1:
            rows += range(start, start + length)
        else:
            chunk = length // (2 * degree)
            for part in (index, 2 * degree - 1 - index):
                rows += range(start + part * chunk, start + (part + 1) * chunk)
        start += length
    return torch.tensor(rows)


def reference(q, k, v, lengths, padded, causal):
    """Attention per sequence over its true length; zeros at the padding."""
    pieces, start = [], 0
    for length, room in zip(lengths.tolist(), padded.tolist(), strict=True):
        part = slice(start, start + length)
        out = dense_attention(q[part], k[part], v[part], causal=causal)
        pieces += [out, q.new_zeros(room - length, *q.shape[1:])]
        start += room
    return torch.cat(pieces)
