"""A Hugging Face tokenizer file and its configuration.

`LoadedTokenizer.encode` may be called from many threads; only its count of panics changes. The
library is written in Rust. A Rust panic (a regular expression that gives up on a text, an index
beyond a table's end) writes a line to stderr and reaches Python as a BaseException that is not an
`Exception`; here it becomes an error like any other.
"""

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from dataservice.core.errors import SampleError, SpecError, caught
from dataservice.core.named_files import read_named
from dataservice.core.quoting import cut, quoted
from dataservice.decode.marks import BREAK, RESERVED
from dataservice.decode.token_bytes import TokenBytes, token_bytes
from dataservice.decode.word_tokens import WordTokens, word_tokens

log = logging.getLogger(__name__)

# Where a configuration names tokens of its model, such as image_token, besides keys of its own.
_MODELS_TOKENS = ("extra_special_tokens", "model_specific_special_tokens")
_LISTED = "added_tokens_decoder"
_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
_NO_NAMES = (
    " A name of the Hugging Face Hub is not downloaded: run, in Python, transformers.AutoTokenizer"
    ".from_pretrained('ORGANISATION/MODEL').save_pretrained('FOLDER'), and give the path of FOLDER."
)
_PROBE = "It's 12 o'clock — été, 猫.\n\n\tx = f(y)  # <b>"
_MOST_TOLD = 8  # control tokens that texts write, of which a log says so
# So that a tokenizer which panics on each of a million texts does not fill the log.
MOST_PANICS = 100
# The library would start a thread per CPU in each process; workers decode many samples at once.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


class Encoded(Protocol):
    """The ids of a text, and the characters [start, end) that each writes."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class TokenModel(Protocol):
    """What is called of the library, and of a user's tokenizer in its place."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> Encoded: ...

    def encode_batch_fast(
        self, texts: list[str], /, *, add_special_tokens: bool
    ) -> Sequence[Encoded]: ...

    def decode(self, ids: list[int], /, *, skip_special_tokens: bool) -> str: ...

    def token_to_id(self, token: str, /) -> int | None: ...


Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The ids of a text, int32[n]; and where they were asked for, the spans that the library tells:
    the characters [start, end) of each, int64[n, 2]."""

    ids: Ids
    spans: NDArray[np.int64] | None


@dataclass(slots=True)
class _Panics:
    """The number of panics of a tokenizer in this process."""

    count: int = 0


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with its special tokens.

    `named` has the configuration's tokens by role (`eos_token` …), `absent` those of its tokens
    that the vocabulary lacks, `specials` the strings that only the service itself may turn into
    control tokens, and `template` the configuration's chat template or None; `others` names its
    templates where none of them is for chat. `is_paligemma` says that its model's processor is
    PaliGemma's, which writes text of a form of its own.
    """

    tokenizer: TokenModel
    path: str
    folder: Path
    named: dict[str, str]
    absent: dict[str, str]
    specials: tuple[str, ...]
    template: str | None
    others: tuple[str, ...]
    adds_bos: bool
    is_paligemma: bool
    digest: str
    remedy: str
    written: TokenBytes | None = field(default=None, repr=False, compare=False)
    """What each token writes, where tokens are bytes: it tells their places in a text sooner than
    offsets do."""
    words: WordTokens | None = field(default=None, repr=False, compare=False)
    """The ids of a text from those of its words, where these are all that there is to it."""
    _panics: _Panics = field(default_factory=_Panics, repr=False, compare=False)

    def encode_each(self, texts: Sequence[str]) -> list[Tokens | Exception]:
        """The tokens of each text without spans, or why it has none. The library gets all of them
        at once, and one by one where it fails. O(characters)."""
        at_once = len(texts) > 1 or self.words is not None
        if at_once and self._panics.count < MOST_PANICS:
            try:
                return self._encode_at_once(texts)
            except BaseException as error:  # of which text, those one by one tell
                if not _is_failure(error):
                    raise
        return [caught(self._encode_alone, text) for text in texts]

    def _encode_at_once(self, texts: Sequence[str]) -> list[Tokens | Exception]:
        words = self.words
        # One by one: a text of new words has the next ones left to the library.
        found = [words.ids(text) if words and words.takes(text) else None for text in texts]
        left = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        made = iter(self.tokenizer.encode_batch_fast(left, add_special_tokens=False))
        return [self._tokens(next(made)) if ids is None else Tokens(ids, None) for ids in found]

    def _encode_alone(self, text: str) -> Tokens:
        return self._tokens(self.encode(text, offsets=False))

    def encode_placed(self, text: str) -> Tokens:
        """The tokens of a text with their spans. Raises SampleError as `encode` does."""
        encoded = self.encode(text)
        tokens = self._tokens(encoded)
        places = chain.from_iterable(encoded.offsets)  # of pairs, numpy makes an array slowly
        spans = np.fromiter(places, np.int64, 2 * len(tokens.ids)).reshape(-1, 2)
        return Tokens(tokens.ids, spans)

    def _tokens(self, encoded: Encoded) -> Tokens:
        ids = encoded.ids
        try:
            return Tokens(np.fromiter(ids, np.int32, len(ids)), None)
        except OverflowError as error:
            raise SampleError(
                f"the tokenizer {quoted(self.path)} gives the text an id of 2**31 or more; ids are "
                "int32. Repair its vocabulary."
            ) from error

    def encode(self, text: str, *, offsets: bool = True) -> Encoded:
        """Tokens of a text, without added special tokens. O(characters). The ids are the same
        without offsets, and take two thirds of the time.

        Raises:
            SampleError: the tokenizer fails on this text, or has panicked too often.
        """
        if self._panics.count >= MOST_PANICS:
            raise SampleError(
                f"the tokenizer {quoted(self.path)} panicked on {MOST_PANICS} texts and is used "
                f"no more in this process. {self.remedy}."
            )
        try:
            if not offsets:
                return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]
            return self.tokenizer.encode(text, add_special_tokens=False)
        except BaseException as error:
            if not _is_failure(error):
                raise
            self._panics.count += _is_panic(error)
            raise SampleError(
                f"the tokenizer {quoted(self.path)} fails on the text ({len(text):,} characters): "
                f"{cut(error)}. {self.remedy}, or leave the sample out."
            ) from error

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, control tokens included. Bytes that are no whole character
        come out as U+FFFD. Raises SampleError where the tokenizer fails on them."""
        try:
            return self.tokenizer.decode(list(ids), skip_special_tokens=False)
        except BaseException as error:
            if not _is_failure(error):
                raise
            raise SampleError(
                f"the tokenizer {quoted(self.path)} fails to decode {len(ids):,} tokens: "
                f"{cut(error)}. {self.remedy}."
            ) from error

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None when the vocabulary does not have it."""
        return self.tokenizer.token_to_id(token)

    def normalizer_before(self, tokens: Collection[str]) -> Callable[[str], str] | None:
        """What is done to a text before some of these tokens are looked for in it; None where all
        are looked for in the text itself."""
        if not isinstance(self.tokenizer, Tokenizer) or self.tokenizer.normalizer is None:
            return None
        added = self.tokenizer.get_added_tokens_decoder().values()
        if not any(token.normalized and token.content in tokens for token in added):
            return None
        return cast("Callable[[str], str]", self.tokenizer.normalizer.normalize_str)

    def has_token(self, token: str) -> bool:
        """Whether this string becomes one token, also in the middle of other text."""
        token_id = self.id_of(token)
        try:
            return token_id is not None and self.encode(f"a{token}b").ids.count(token_id) == 1
        except SampleError:
            return False

    @property
    def end_of_document(self) -> str | None:
        """The token after a document: a well-known one, if the vocabulary has it, else the
        end-of-sequence token."""
        for token in (*_END_OF_DOCUMENT, self.named.get("eos_token")):
            if token is not None and self.id_of(token) is not None:
                return token
        return None

    @property
    def pad_token_id(self) -> int:
        """The configured pad token, or the end-of-document token, or 0: padding is masked
        anyway."""
        for token in (self.named.get("pad_token"), self.end_of_document):
            if token is not None and (token_id := self.id_of(token)) is not None:
                return token_id
        return 0


def load_tokenizer(path: str) -> LoadedTokenizer:
    """Read a tokenizer.json, or a folder that contains one, with the configuration beside it.

    Raises:
        SpecError: the file is missing, or is not a tokenizer.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    tokenizer = _read(file, path)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder().values()
    return configured(
        tokenizer,
        path=str(file),
        folder=file.parent,
        specials=tuple(token.content for token in added if token.special),
        digest=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
        written=token_bytes(tokenizer),
        words=_proven_words(tokenizer),
    )


def _proven_words(tokenizer: Tokenizer) -> WordTokens | None:
    """None where a text has other ids than the library gives it: the ids of words are the same by
    how this release of the library works, and another may work otherwise."""
    words = word_tokens(tokenizer)
    try:
        alike = words is None or all(
            words.ids(text).tolist() == tokenizer.encode(text, add_special_tokens=False).ids
            for text in words.probes
        )
    except BaseException as error:
        if not _is_failure(error):
            raise
        alike = False
    return word_tokens(tokenizer) if alike else None  # one that no probe has told what comes


def configured(
    tokenizer: TokenModel,
    *,
    path: str,
    folder: Path,
    specials: tuple[str, ...],
    digest: str,
    remedy: str = "Repair its tokenizer.json",
    written: TokenBytes | None = None,
    words: WordTokens | None = None,
) -> LoadedTokenizer:
    """A tokenizer with what the configuration in its folder says of it. Raises SpecError where that
    cannot be read."""
    config = _object(folder / "tokenizer_config.json")
    named = _named_tokens(config, folder)
    adds_bos = config.get("add_bos_token")
    if adds_bos is None:  # such as Llama 3's, whose tokenizer.json does it by itself
        adds_bos = _begins_with(tokenizer, named.get("bos_token"))
    template, others = _templates(folder, config)
    return LoadedTokenizer(
        tokenizer=tokenizer,
        path=path,
        folder=folder,
        named=named,
        absent=_absent(tokenizer, config, named, folder),
        specials=specials,
        template=template,
        others=others,
        adds_bos=bool(adds_bos),
        is_paligemma=config.get("processor_class") == "PaliGemmaProcessor",
        digest=digest,
        remedy=remedy,
        written=written,
        words=words,
    )


def _named_tokens(config: dict[str, object], folder: Path) -> dict[str, str]:
    """The tokens that transformers gives to templates by name. The file that older releases kept
    them in comes first where the configuration does not list its tokens, as it does there."""
    older = {} if _LISTED in config else _object(folder / "special_tokens_map.json")
    named: dict[str, object] = {}
    for given in (config, older):
        for key in _MODELS_TOKENS:
            named |= tokens if isinstance(tokens := given.get(key), dict) else {}
        named |= {name: value for name, value in given.items() if name.endswith("_token")}
    return {name: token for name, value in named.items() if (token := _token(value))}


def _absent(
    tokenizer: TokenModel, config: dict[str, object], named: dict[str, str], folder: Path
) -> dict[str, str]:
    """The tokens that the configuration has and the vocabulary lacks, by their name or place there;
    transformers adds them."""
    older = {} if _LISTED in config else _object(folder / "added_tokens.json")
    tokens = {**named, **{f"added_tokens.json: {number}": t for t, number in older.items()}}
    for key in (_LISTED, *_SPECIAL):
        listed = config.get(key)
        pairs = enumerate(listed) if isinstance(listed, list) else []
        for place, value in listed.items() if isinstance(listed, dict) else pairs:
            tokens[f"{key}: {place}"] = _token(value) or ""
    return {n: t for n, t in tokens.items() if t and tokenizer.token_to_id(t) is None}


def _begins_with(tokenizer: TokenModel, token: str | None) -> bool:
    """Whether the tokenizer by itself begins what it is given with this token."""
    if token is None or not isinstance(tokenizer, Tokenizer):
        return False
    try:
        whole, bare = (tokenizer.encode("a", add_special_tokens=adds).ids for adds in (True, False))
    except BaseException as error:
        if not _is_failure(error):
            raise
        return False
    added = whole[: len(whole) - len(bare)]
    return tokenizer.token_to_id(token) in added[:1]


def _read(file: Path, path: str) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_buffer(read_named(file))
    # The library raises plain Exception, for a missing file and a damaged one alike, or panics.
    except BaseException as error:
        if not _is_failure(error):
            raise
        raise SpecError(
            f"tokenizer {quoted(path)} cannot be read: {cut(error)}. Give the path of a "
            "tokenizer.json, or of the folder that holds it; workers need the same path."
            f"{'' if os.path.exists(file) else _NO_NAMES}"
        ) from error
    try:
        tokenizer.encode(_PROBE, add_special_tokens=False)
    except BaseException as error:
        if _is_panic(error):
            raise SpecError(
                f"tokenizer {quoted(path)} panics on plain text: {cut(error)}. Its tokenizer.json "
                "is damaged, or for another version of the library; write it again."
            ) from error
        if not isinstance(error, Exception):  # else it may merely lack tokens for the probe
            raise
    return tokenizer


def _is_panic(error: BaseException) -> bool:
    """Whether an error is a Rust panic. Its class lives in a module that cannot be imported."""
    return type(error).__module__ == "pyo3_runtime"


def _is_failure(error: BaseException) -> bool:
    """Whether the library failed; Ctrl-C and the end of the process are not its errors."""
    return isinstance(error, Exception) or _is_panic(error)


class Guard:
    """Keeps text from being read as control tokens.

    `protect` inserts a BREAK after the first character of every control token in a text; the text
    is later split there and tokenised in pieces, so that no piece contains a control token.
    """

    def __init__(
        self,
        tokens: tuple[str, ...],
        normalize: Callable[[str], str] | None = None,
        media: Collection[str] = (),
    ) -> None:
        """`normalize` is what the tokenizer does to text before it looks for these tokens, None
        where it looks at the text itself; texts may never write those of `media`."""
        self._normalize = normalize
        self._untold = {*tokens} - {*media}
        self._most_told = _MOST_TOLD
        texts = sorted({token for token in tokens if len(token) > 1}, key=len, reverse=True)
        choices = "|".join(map(re.escape, texts)) or r"(?!)"
        self._texts = tuple(texts)
        self._beginnings = sorted({text[:2] for text in texts})
        self._any = re.compile(choices)
        # A look-ahead, so that a token within or overlapping another is found too.
        self._each = re.compile(f"(?={choices})(.)", re.DOTALL)

    def protect(self, text: str) -> str:
        """The text with every control token broken. Raises SampleError when the text contains the
        marks themselves, or half of a surrogate pair."""
        if not text.isascii() and RESERVED.search(text):
            raise SampleError(
                "the text contains a Unicode noncharacter in U+FDD0..U+FDD5, which marks places "
                "while text is tokenised, or half of a surrogate pair. Remove it from the text."
            )
        if self._normalize is not None and self._count(self._normalize(text)) > self._count(text):
            raise SampleError(
                "the text has characters that the tokenizer's normalizer turns into a control "
                "token, such as full-width or capital letters of one. Replace them, or leave the "
                "sample out."
            )
        # Most texts hold the beginning of none, which is found out sooner.
        if not any(map(text.__contains__, self._beginnings)) or self._any.search(text) is None:
            return text
        self._tell(text)
        return self._each.sub(rf"\1{BREAK}", text)

    def _tell(self, text: str) -> None:
        """Say, once for each, which tokens a text would have if it might write them."""
        for token in self._untold.intersection(self._any.findall(text)):
            self._untold.discard(token)
            if self._most_told > 0:
                self._most_told -= 1
                log.warning(
                    "texts have %s, which are pieces of plain text and not that token. If these "
                    "texts are to write it, name it in the job's pipeline: content_tokens: [%s]",
                    *(quoted(token), quoted(token)),
                )

    def protect_texts(self, texts: Sequence[str]) -> list[str]:
        """Protects texts that a template may join, as the parts of a turn, stripped or not: where
        that would make a control token, a BREAK stands between them."""
        if len(texts) == 1:
            return [self.protect(texts[0])]
        alone = sum(map(self._count, texts))
        joined = max(self._count("".join(texts)), self._count("".join(map(str.strip, texts))))
        between = BREAK if joined > alone else ""
        return [(between if k else "") + self.protect(text) for k, text in enumerate(texts)]

    def _count(self, text: str) -> int:
        return len(self._each.findall(text))

    def ends(self, text: str) -> bool:
        """Whether a text ends with an unprotected control token."""
        return text.endswith(self._texts)

    def protect_all(self, value: object) -> object:
        """The same JSON value with every string in it protected, keys included."""
        if isinstance(value, str):
            return self.protect(value)
        if isinstance(value, dict):
            return {self.protect_all(k): self.protect_all(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.protect_all(item) for item in value]
        return value


def _object(file: Path) -> dict[str, object]:
    """A JSON object, empty where there is no such file."""
    if not file.exists():
        return {}
    try:
        config = json.loads(read_named(file))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{file} cannot be read: {cut(error)}. Repair or remove it.") from error
    if not isinstance(config, dict):
        raise SpecError(f"{file} holds a {type(config).__name__}, not an object. Repair it.")
    return config


def _token(value: object) -> str | None:
    """A token as the configuration writes it: its text, or an object around the text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _templates(folder: Path, config: dict[str, object]) -> tuple[str | None, tuple[str, ...]]:
    """The chat template: from a file of its own, as models ship it, or from the configuration. That
    of a model's processor comes before that of its tokenizer, as in transformers. And the names of
    what there is instead: transformers picks none of these by itself."""
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return read_named(file).decode("utf-8"), ()
        except (OSError, ValueError) as error:
            raise SpecError(f"{file} cannot be read: {cut(error)}. Repair or remove it.") from error
    template = _object(folder / "chat_template.json").get("chat_template")
    template = config.get("chat_template") if template is None else template
    if isinstance(template, list):  # several by name; "default" is the one for chat
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {str(entry.get("name")): entry.get("template") for entry in entries}
        template = named.get("default")
        if template is None:
            return None, tuple(named)
    return (template if isinstance(template, str) else None), ()
