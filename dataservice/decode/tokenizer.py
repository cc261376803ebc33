"""A Hugging Face tokenizer file and what its configuration says of it.

`Tokenizer.encode` may be called from many threads; nothing here changes after it is made.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer

from dataservice.core.errors import SampleError, SpecError
from dataservice.decode.marks import BREAK, RESERVED

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>")


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with its special tokens.

    `named` are the configuration's tokens by role (`eos_token` …); `specials` the texts that
    only the service itself may turn into control tokens; `template` the configuration's chat
    template or None.
    """

    tokenizer: Tokenizer
    path: str
    named: dict[str, str]
    specials: tuple[str, ...]
    template: str | None
    adds_bos: bool
    digest: str

    def id_of(self, token: str) -> int | None:
        """The id of a token of the vocabulary, or None."""
        return self.tokenizer.token_to_id(token)

    @property
    def end_of_document(self) -> str | None:
        """The token after a document: a well-known one of the vocabulary, or the end token."""
        for token in (*_END_OF_DOCUMENT, self.named.get("eos_token")):
            if token is not None and self.id_of(token) is not None:
                return token
        return None

    @property
    def pad_token_id(self) -> int:
        """The configured pad token, or the end of document, or 0: padding is masked anyway."""
        for token in (self.named.get("pad_token"), self.end_of_document):
            if token is not None and (token_id := self.id_of(token)) is not None:
                return token_id
        return 0


def load_tokenizer(path: str) -> LoadedTokenizer:
    """Read a tokenizer.json, or a folder that holds one, with the configuration beside it.

    Raises:
        SpecError: missing, or not a tokenizer.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    # The library raises plain Exception, for a missing file as for a damaged one.
    except Exception as error:
        raise SpecError(
            f"tokenizer {path!r} cannot be read: {error}. Give the path of a tokenizer.json, or "
            "of the folder that holds it; workers need the same path."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _config(file.parent)
    added = tokenizer.get_added_tokens_decoder().values()
    return LoadedTokenizer(
        tokenizer=tokenizer,
        path=str(file),
        named={name: t for name in _NAMED_TOKENS if (t := _token(config.get(name)))},
        specials=tuple(token.content for token in added if token.special),
        template=_template(file.parent, config),
        adds_bos=bool(config.get("add_bos_token")),
        digest=hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
    )


class Guard:
    """Keeps text from being read as control tokens.

    `protect` puts a BREAK behind the first character of every control token that stands in a
    text; the text is later tokenised in pieces split there, so that no piece contains one.
    """

    def __init__(self, tokens: tuple[str, ...]) -> None:
        texts = sorted({token for token in tokens if len(token) > 1}, key=len, reverse=True)
        choices = "|".join(map(re.escape, texts)) or r"(?!)"
        self._texts = tuple(texts)
        self._any = re.compile(choices)
        # A look-ahead, so that a token inside or across another is found too.
        self._each = re.compile(f"(?={choices})(.)", re.DOTALL)

    def protect(self, text: str) -> str:
        """Raises SampleError for a text that contains the marks themselves, or is no Unicode."""
        if RESERVED.search(text):
            raise SampleError(
                "the text contains a Unicode noncharacter in U+FDD0..U+FDD5, which marks places "
                "while text is tokenised, or half of a surrogate pair. Remove it from the text."
            )
        if self._any.search(text) is None:
            return text
        return self._each.sub(rf"\1{BREAK}", text)

    def ends(self, text: str) -> bool:
        """Whether a text ends with a control token that is not protected."""
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


def _config(folder: Path) -> dict[str, object]:
    file = folder / "tokenizer_config.json"
    if not file.exists():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{file} cannot be read: {error}. Repair or remove it.") from error
    if not isinstance(config, dict):
        raise SpecError(f"{file} holds a {type(config).__name__}, not an object. Repair it.")
    return config


def _token(value: object) -> str | None:
    """A token as the configuration writes it: its text, or an object around the text."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _template(folder: Path, config: dict[str, object]) -> str | None:
    """The file beside the configuration, as newer models ship it, or the configuration's own."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name, of which "default" is for chat
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return cast("str | None", template) if isinstance(template, str) else None
