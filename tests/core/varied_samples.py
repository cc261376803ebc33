"""Samples of every kind: with and without spans, items and checksums."""

from dataservice.core.orders import PackSample
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)


def sample(n: int) -> PackSample:
    """The n-th of a kind: n % 3 spans, n % 4 items, every other without a checksum."""
    items = tuple(
        ItemLengths(
            modality=Modality(k % 2),
            encoder_tokens=100 * k,
            llm_tokens=k,
            position=n,
            shape=(1, 2, 3, 3) if k % 2 == 0 else (16_000 * (n + 1),),
        )
        for k in range(n % 4)
    )
    spans = tuple(
        ByteSpan(name=f"ä{k}", offset_bytes=2**40 + k, size_bytes=n) for k in range(n % 3)
    )
    location = SampleLocation(file=f"f{n % 2}", spans=spans, row_group=n - 1, row=n, piece=n % 2)
    return PackSample(
        ref=SampleRef(
            sample_id=2**40 + n,
            source=f"s{n % 2}",
            key="ключ" * n,
            location=location,
            crc32=2**32 - 1 if n % 2 else None,
        ),
        lengths=SampleLengths(llm_tokens=n, loss_tokens=n // 2, items=items),
        epoch=n,
    )


SAMPLES = [sample(n) for n in range(9)]
