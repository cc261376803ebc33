"""A byte-level BPE tokenizer trained on the corpus, saved as Hugging Face models ship theirs."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pyarrow.parquet as pq
import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 2_000
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = (
    END_OF_TEXT,
    "<|im_start|>",
    END_OF_TURN,
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)

# ChatML. Content is a string, or a list of parts of type text, image, video or audio.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'audio' -%}
{{- '<|audio_start|><|audio_pad|><|audio_end|>' -}}
{%- else -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

# Words with their leading space, single digits, runs of punctuation, runs of white space.
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ROLES = "system\nuser\nassistant\n"


def train_tokenizer(corpus_dir: Path, out_dir: Path) -> Path:
    """Train on all text under `corpus_dir`; the same corpus gives the same file.

    Writes `tokenizer.json` and `tokenizer_config.json` (with the chat template) to `out_dir` and
    returns the path of the former.

    Raises:
        FileNotFoundError: `corpus_dir` holds no text.
    """
    texts = list(corpus_texts(corpus_dir))
    if not texts:
        raise FileNotFoundError(
            f"{corpus_dir} holds no .tar, .parquet or .jsonl text to train on; "
            "make a corpus there first (python -m demo.corpus)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Every conversation names its roles, even if the corpus's text does not contain them.
    tokenizer.train_from_iterator([*texts, *[_ROLES] * len(texts)], trainer)
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / "tokenizer.json"
    tokenizer.save(str(path))
    config = json.dumps(_config(tokenizer), indent=2, ensure_ascii=False) + "\n"
    (out_dir / "tokenizer_config.json").write_text(config, encoding="utf-8")
    return path


def corpus_texts(corpus_dir: Path) -> Iterator[str]:
    """Every text of the corpus: documents, and the turns of conversations."""
    for path in sorted(corpus_dir.rglob("*")):
        if path.suffix == ".tar":
            yield from _tar_texts(path)
        elif path.suffix == ".parquet":
            for turns in pq.read_table(path, columns=["conversations"])[
                "conversations"
            ].to_pylist():
                yield from _strings(turns)
        elif path.suffix == ".jsonl":
            for line in path.read_text(encoding="utf-8").splitlines():
                yield from _strings(json.loads(line))


def _tar_texts(path: Path) -> Iterator[str]:
    with tarfile.open(path) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.name.endswith(".json") else None
            if stream is not None:
                yield from _strings(json.load(stream))


def _strings(node: object) -> Iterator[str]:
    """The strings under the keys that hold text, at any depth."""
    if isinstance(node, list):
        for child in node:
            yield from _strings(child)
    elif isinstance(node, dict):
        for key, child in node.items():
            if isinstance(child, str):
                if key in ("text", "value", "content"):
                    yield child
            else:
                yield from _strings(child)


def _config(tokenizer: Tokenizer) -> dict[str, object]:
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": 131_072,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def main(
    corpus_dir: Annotated[Path, typer.Argument(help="a corpus that demo.corpus wrote")],
    out_dir: Annotated[Path, typer.Argument(help="where to write tokenizer.json")],
) -> None:
    """Train the demo's tokenizer."""
    path = train_tokenizer(corpus_dir, out_dir)
    typer.echo(f"wrote {path} with {Tokenizer.from_file(str(path)).get_vocab_size():,} tokens")


if __name__ == "__main__":
    typer.run(main)
