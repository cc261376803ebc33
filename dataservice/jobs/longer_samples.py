"""Refuses an index that has left out longer samples than the job allows."""

from collections.abc import Mapping

from dataservice.core.errors import SpecError
from dataservice.decode.spec import LongerThan
from dataservice.sources.manifest import LongSamples


def refusal(rule: LongerThan | None, source: str, long: LongSamples) -> str:
    """Why a source is refused: how many of its samples are longer than the rule allows, the longest
    of them, and what to do. Empty where it is not."""
    if rule is None or not rule.refuses or not long.left_out:
        return ""
    many = f"{long.left_out:,} samples have" if long.left_out > 1 else "1 sample has"
    found = (
        f"source {source!r}: {many} more than the {rule.tokens:,} tokens of pipeline.longer_than, "
        f"the longest {long.longest_tokens:,}"
    )
    if rule.cuts:
        return (
            f"{found}, and cannot be cut: only documents of text can, no conversations and nothing "
            "with media. Write otherwise: drop, which leaves them out, or raise tokens."
        )
    return (
        f"{found}. Write then: cut, which makes several samples of a document of text; or "
        "then: drop, which leaves them out; or raise tokens."
    )


def require_none_refused(rule: LongerThan | None, sources: Mapping[str, LongSamples]) -> None:
    """Raises SpecError where sources have longer samples that the rule refuses."""
    refused = [text for name, long in sources.items() if (text := refusal(rule, name, long))]
    if refused:
        raise SpecError("\n".join(refused))
