"""A reader and a decoder that note in which process they work, and what that process holds."""

import ctypes
import json
import os
from pathlib import Path

from dataservice.core.errors import SourceError, SpecError
from dataservice.core.sample import MediaBlob, RawSample
from dataservice.workers.sample_pipelines import PipelineFactory
from tests.workers.trouble import Decoder

SECRET = "APART_SECRET"


def note(folder: Path, what: str) -> None:
    """What this process holds."""
    environment = Path("/proc/self/environ").read_text()
    said = {
        "held": os.environ.get(SECRET),
        "inherited": SECRET in environment,
        "opened": os.environ.get("APART_OPENED"),
        "parent": os.getppid(),
    }
    (folder / f"{what}.{os.getpid()}").write_text(json.dumps(said))


def sample(ref) -> RawSample:
    """A sample with all that one may have."""
    media = (
        MediaBlob(kind="image", name="a.png", data=bytes(range(256)) * 4096),
        MediaBlob(kind="audio", name="ä\n.wav", data=b""),
    )
    record = {"id": ref.sample_id, "text": "ä \ud800 \n", "deep": [1.5, None, {"a": True}]}
    return RawSample(
        key=ref.key,
        record=record,
        media=media,
        placeholders="text",
        piece=ref.location.piece,
        loss_weight=0.1,
    )


class Reader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, ref):
        note(self.folder, f"reads-{ref.key}")
        if ref.key == "gone":
            raise SourceError("the source has vanished")
        if ref.key == "crash" or (ref.key == "crash_once" and self.first()):
            ctypes.string_at(0)
        return sample(ref)

    def first(self) -> bool:
        """Whether it has not come here before, in any process."""
        mark = self.folder / "first"
        found = mark.exists()
        mark.touch()
        return not found


class OwnCode(Decoder):
    def decode(self, raw, planned, epoch=None, places=()):
        note(self.folder, f"decodes-{raw.key}")
        (self.folder / f"raw-{raw.key}").write_text(repr(raw))
        return super().decode(raw, planned, epoch)


def reader_for(pipeline):
    plain = json.loads(pipeline)
    if plain.get("no_source"):
        raise SpecError("there is no such profile")
    return Reader(Path(plain["folder"]))


def decoder_for(pipeline):
    return OwnCode(json.loads(pipeline)["folder"])


def owner(pipeline):
    return json.loads(pipeline).get("owner")


def hold_credentials(environment):
    os.environ.update(environment or {})
    os.environ["APART_OPENED"] = "with" if environment is not None else "without"


FACTORY = PipelineFactory(
    reader_for=reader_for,
    decoder_for=decoder_for,
    code_owner=owner,
    hold_credentials=hold_credentials,
)
