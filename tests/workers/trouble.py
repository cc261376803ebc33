"""Readers and decoders that a fresh process can import: a sample's key says what it does there.

The pipeline names a folder, where decoders leave marks for the test to see.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import time
from pathlib import Path

import numpy as np

from dataservice.core.errors import SampleError, SourceError, SpecError
from dataservice.core.orders import PackKey, PackOrder, PackSample
from dataservice.core.ports import SampleDecoder
from dataservice.core.sample import (
    DecodedSample,
    ItemLengths,
    Modality,
    RawSample,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.team import TeamShare
from dataservice.workers.host import DecodingHost
from dataservice.workers.process_decoders import ProcessDecoders
from dataservice.workers.sample_pipelines import PipelineFactory

PAD = 9
IMAGE = (2, 224, 224, 3)
GATE = "is-open"


class Reader:
    def read(self, ref):
        if ref.key == "gone":
            raise SourceError("the source has vanished")
        if ref.key.startswith("far"):
            time.sleep(float(ref.key.split("-")[1]))
        return RawSample(key=ref.key, record={"id": ref.sample_id})


class Decoder(SampleDecoder):
    pad_token_id = PAD

    def __init__(self, folder):
        self.folder = Path(folder)

    def decode(self, raw, planned, epoch=None, places=()):
        self.mark(f"{raw.key}.{os.getpid()}")
        act = raw.key.partition("-")[0]
        if act in ACTS:
            ACTS[act](self, raw)
        number = raw.record["id"]
        ids = np.full(planned.llm_tokens - (act == "short"), number, np.int32)
        if act == "place" and places:
            self.mark("place.in-place")
            for item, place in zip(planned.items, places, strict=True):
                place[:] = number if item.modality is Modality.VISION else number / 8
            return DecodedSample(input_ids=ids, labels=-ids, items=tuple(places))
        items = tuple(
            np.full(item.shape, number % 256, np.uint8)
            if item.modality is Modality.VISION
            else np.full(item.shape, number / 8, np.float32)
            for item in planned.items
        )
        return DecodedSample(input_ids=ids, labels=-ids, items=items)

    def begin(self, samples):
        for raw, *_ in samples:
            act, _, early = raw.key.partition("-")
            if act == "begin":
                self.mark(f"{raw.key}.{os.getpid()}")
                ACTS[early](self, raw)
        return super().begin(samples)

    def mark(self, name):
        (self.folder / name).touch()

    def first_time(self, key):
        """Whether nobody has marked this key so."""
        try:
            (self.folder / f"{key}.first").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def refuse(decoder, raw):
    raise SampleError("the image is truncated")


def surprise(decoder, raw):
    raise ZeroDivisionError("in the codec")


def spin(decoder, raw):
    """In C, with the interpreter's lock held: no signal handler of Python's ever runs."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def die_once(decoder, raw):
    if decoder.first_time(raw.key):
        os.kill(os.getpid(), signal.SIGKILL)


def hog(decoder, raw):
    np.ones(2**31, np.uint8)


def take_s(decoder, raw):
    time.sleep(float(raw.key.split("-")[1]))


def work_s(decoder, raw):
    """Keep a CPU busy, however many others want it."""
    until_s = time.process_time() + float(raw.key.split("-")[1])
    while time.process_time() < until_s:
        pass


def wait_at_gate(decoder, raw):
    """Until the test has done what it wants to do meanwhile: see `open_gate`."""
    deadline_s = time.monotonic() + 120
    while not (decoder.folder / GATE).exists():
        if time.monotonic() > deadline_s:
            raise SampleError("the gate was never opened")
        time.sleep(0.01)


def meet(decoder, raw):
    """Wait until the other of a pair is being decoded too."""
    other = {"meet-a": "meet-b", "meet-b": "meet-a"}[raw.key]
    deadline_s = time.monotonic() + 60
    while not any(decoder.folder.glob(f"{other}.*")):
        if time.monotonic() > deadline_s:
            raise SampleError("the other never came")
        time.sleep(0.01)


ACTS = {
    "gate": wait_at_gate,
    "meet": meet,
    "refuse": refuse,
    "surprise": surprise,
    "hang": lambda decoder, raw: time.sleep(3600),
    "spin": spin,
    "segv": lambda decoder, raw: ctypes.string_at(0),
    "realtime": lambda decoder, raw: os.kill(os.getpid(), 40),
    "abort": lambda decoder, raw: os.abort(),
    "exit": lambda decoder, raw: os._exit(3),
    "once": die_once,
    "hog": hog,
    "take": take_s,
    "work": work_s,
}


def reader_for(pipeline):
    return Reader()


def decoder_for(pipeline):
    plain = json.loads(pipeline)
    if plain.get("refused"):
        raise SpecError("unknown processor 'odd'")
    if plain.get("deadly"):
        ctypes.string_at(0)
    return Decoder(plain["folder"])


FACTORY = PipelineFactory(reader_for=reader_for, decoder_for=decoder_for)


def pipeline_in(folder, **more):
    return json.dumps({"folder": str(folder), **more})


def a_sample(number, key, *, tokens=4, images=0, sounds=0):
    image = ItemLengths(
        modality=Modality.VISION, encoder_tokens=64, llm_tokens=1, position=0, shape=IMAGE
    )
    sound = ItemLengths(
        modality=Modality.AUDIO, encoder_tokens=50, llm_tokens=1, position=0, shape=(16001,)
    )
    items = (image,) * images + (sound,) * sounds
    return PackSample(
        ref=SampleRef(
            sample_id=number, source="src", key=key, location=SampleLocation(file="a b.tar")
        ),
        lengths=SampleLengths(llm_tokens=tokens, loss_tokens=tokens, items=items),
    )


def open_gate(folder):
    """Let every sample `gate` of this folder go on."""
    (folder / GATE).touch()


def decode(decoders, pipeline, *keys, **shape):
    samples = [a_sample(number, key, **shape) for number, key in enumerate(keys, 1)]
    return decoders.decode(pipeline, samples)


def an_order(folder, keys, *, pack=0, step=0, job="j", share=None, first=1, **shape):
    return PackOrder(
        key=PackKey(job=job, step=step, plan_digest="d" * 8, pack=pack),
        degree=1,
        pipeline=pipeline_in(folder),
        samples=tuple(a_sample(first + i, key, **shape) for i, key in enumerate(keys)),
        share=share or TeamShare(),
    )


@contextlib.asynccontextmanager
async def hosted(factory, **caches):
    """A host of one real decoder process."""
    host = DecodingHost(ProcessDecoders(factory, slots=1, timeout_s=30.0, **caches))
    await host.start()
    try:
        yield host
    finally:
        host.close()
