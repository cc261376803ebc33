"""What becomes of a sample by its length: it stays whole, is cut into pieces, or cannot be used."""

from dataclasses import dataclass

from dataservice.core.errors import SampleError, SampleTooLongError
from dataservice.core.sample import SampleLengths
from dataservice.decode.conversation import Conversation, Document
from dataservice.decode.spec import LongerThan, PipelineSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRule:
    """A pipeline's `max_sample_tokens` or `longer_than`, or neither."""

    max_sample_tokens: int | None
    longer_than: LongerThan | None

    @staticmethod
    def of(spec: PipelineSpec) -> "LengthRule":
        """The rule of a pipeline."""
        return LengthRule(max_sample_tokens=spec.max_sample_tokens, longer_than=spec.longer_than)

    @property
    def identity(self) -> object:
        """All that decides which samples there are, as JSON can write it. To drop and to refuse
        leave the same samples, so that an index of one serves the other."""
        if self.longer_than is None:
            return self.max_sample_tokens
        return ["longer_than", self.longer_than.tokens, self.longer_than.cuts]

    @property
    def piece_tokens(self) -> int:
        """Tokens of each piece but the last, where documents are cut."""
        assert self.longer_than is not None, "only longer_than cuts"
        return self.longer_than.tokens

    def pieces(self, source: Conversation | Document, lengths: SampleLengths) -> int:
        """The number of samples that a sample of these lengths becomes. Raises SampleError where it
        is longer than the rule allows and is not cut: SampleTooLongError by `longer_than`."""
        rule, tokens = self.longer_than, lengths.llm_tokens
        most = self.max_sample_tokens if rule is None else rule.tokens
        if most is None or tokens <= most:
            return 1
        has = (
            f"the sample has {tokens} tokens ({lengths.text_tokens} of text, "
            f"{len(lengths.items)} media items)"
        )
        if rule is None:
            raise SampleError(
                f"{has}; max_sample_tokens is {most}. Raise the limit, lower the processor's "
                "resolution, or split the sample."
            )
        if not rule.cuts:
            raise SampleTooLongError(
                f"{has}; longer_than.tokens is {most}. Raise it, lower the processor's resolution, "
                "or split the sample.",
                tokens=tokens,
            )
        if isinstance(source, Conversation) or lengths.items:
            raise SampleTooLongError(
                f"{has}; longer_than.tokens is {most}, and only documents of text can be cut. "
                "Raise it, lower the processor's resolution, or split the sample.",
                tokens=tokens,
            )
        return -(-tokens // most)
