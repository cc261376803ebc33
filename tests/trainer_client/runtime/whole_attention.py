"""Attention over whole sequences in one process, which what many compute is compared with."""

import torch
from torch.nn.functional import scaled_dot_product_attention


def dense_attention(q, k, v, *, causal=True, window=None, spans=None):
    """Torch's own, over the rows of one sequence: [rows, heads, dim], as ours."""
    one = [x.transpose(0, 1)[None] for x in (q, k, v)]
    mask = {"is_causal": causal}
    if window is not None or spans is not None:
        mask = {"attn_mask": masked(len(q), window, spans)}
    out = scaled_dot_product_attention(*one, **mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def masked(rows, window, spans):
    """Which key a query sees, bool [rows, rows]: those up to its own and those of its span, of
    both only those that lie less than a window behind it."""
    behind = torch.arange(rows)[:, None] - torch.arange(rows)
    visible = behind >= 0
    if spans is not None:
        visible |= (spans[:, None] == spans) & (spans >= 0)
    return visible if window is None else visible & (behind < window)


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


def reference(q, k, v, lengths, padded, causal, window=None, spans=None):
    """Attention per sequence over its true length; zeros at the padding."""
    pieces, start = [], 0
    for length, room in zip(lengths.tolist(), padded.tolist(), strict=True):
        part = slice(start, start + length)
        seen = None if spans is None else spans[part]
        out = dense_attention(q[part], k[part], v[part], causal=causal, window=window, spans=seen)
        pieces += [out, out.new_zeros(room - length, *out.shape[1:])]
        start += room
    return torch.cat(pieces)
