"""A tokenizer of the user's own, in place of a tokenizer.json.

It runs wherever samples are measured or decoded, and must give the same ids for the same text
everywhere. What stands beside a tokenizer (the chat template, which token is `eos_token`) is read
from the folder of the job's `tokenizer` as ever.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.job import CodeSpec
from dataservice.core.own_code import made_of, running, version_of
from dataservice.core.quoting import quoted
from dataservice.decode.tokenizer import LoadedTokenizer, configured

Spans = Sequence[tuple[int, int]]


class OwnTokenizer(Protocol):
    """A class of the user's own, made with `folder`, the path of the job's `tokenizer`, and the
    `options` of the job. It is used from many threads.

    `version`, where the class has one, says that its results changed; otherwise the source of its
    module does.
    """

    digest: str
    """Of the files that it has read: what decides its ids beside its code and options."""
    special_tokens: Mapping[str, int]
    """Control tokens, those of media among them, and their ids. Only the service and the chat
    template write them: a sample's own text never holds one."""

    def encode(self, text: str) -> tuple[Sequence[int], Spans]:
        """The ids of a text, in which each of the special tokens is its one id, and for each id the
        characters text[start:end] that it writes, in their order; nothing is added in front or
        behind. Raises SampleError with the reason why the text cannot be used."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """What these ids write, special tokens included."""
        ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of a text, and the characters [start, end) that each writes."""

    ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """A user's tokenizer under the methods of the library's that the service calls; what it gives
    is checked."""

    name: str
    own: OwnTokenizer
    special: dict[str, int]

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Tokens:
        """Raises SampleError where it fails, or gives no tokens of this text."""
        with running(self.name):
            ids, spans = self.own.encode(text)
            tokens = Tokens(list(map(int, ids)), [(int(start), int(end)) for start, end in spans])
        last = 0
        for start, end in tokens.offsets:
            if not last <= start <= end <= len(text):
                raise SampleError(
                    f"{quoted(self.name)} says that a token writes the characters {start} to {end} "
                    f"of {len(text)}, behind one that begins at {last}; spans lie in the text, in "
                    "order. Mend its code."
                )
            last = start
        least = min(tokens.ids, default=0)
        if len(tokens.ids) != len(tokens.offsets) or least < 0:
            raise SampleError(
                f"{quoted(self.name)} gives {len(tokens.ids)} ids from {least} and "
                f"{len(tokens.offsets)} spans; there is a span for each id, and no id is below 0. "
                "Mend its code."
            )
        return tokens

    def encode_batch_fast(
        self, texts: list[str], /, *, add_special_tokens: bool
    ) -> Sequence[Tokens]:
        """The library's way to give ids alone; here as `encode`."""
        return [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str:
        """Raises SampleError where it fails."""
        with running(self.name):
            return str(self.own.decode(ids))

    def token_to_id(self, token: str, /) -> int | None:
        """The id of a special token; None of any other."""
        return self.special.get(token)


def load_own_tokenizer(spec: CodeSpec, folder: str, custom: Mapping[str, type]) -> LoadedTokenizer:
    """Make a job's own tokenizer. Raises SpecError where it is not in the config, cannot be made,
    or does not keep to `OwnTokenizer`."""
    if "folder" in spec.options:
        raise SpecError(
            f"tokenizer {quoted(spec.name)} has the option folder, which is the pipeline's "
            "tokenizer. Leave it out."
        )
    made = made_of(custom, spec.name, {**spec.options, "folder": folder}, what="tokenizer")
    missing = [name for name in ("encode", "decode") if not callable(getattr(made, name, None))]
    digest, special = (getattr(made, name, None) for name in ("digest", "special_tokens"))
    if missing or not isinstance(digest, str) or not _is_vocabulary(special):
        raise SpecError(
            f"tokenizer {quoted(spec.name)} is a {type(made).__name__} without encode(text), "
            "decode(ids), digest (a str) and special_tokens (texts and their ids from 0). See "
            "OwnTokenizer in dataservice/decode/own_tokenizer.py."
        )
    tokens = OwnTokens(spec.name, cast(OwnTokenizer, made), dict(cast(Mapping[str, int], special)))
    loaded = configured(
        tokens,
        path=folder,
        folder=Path(folder),
        specials=tuple(tokens.special),
        digest=_digest(version_of(type(made)), spec.options, digest, tokens.special),
        remedy="Mend its code",
    )
    broken = [token for token in tokens.special if not loaded.has_token(token)]
    if broken:
        raise SpecError(
            f"tokenizer {quoted(spec.name)} has the special token {quoted(broken[0])} and does not "
            "encode it as its one id within other text. Mend its code."
        )
    return loaded


def _is_vocabulary(special: object) -> bool:
    return isinstance(special, Mapping) and all(
        isinstance(token, str) and token and isinstance(number, int) and number >= 0
        for token, number in special.items()
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
