"""Other libraries' wanted frames of clips, in an environment of its own: this file imports nothing
of the project.

`python peer_clips.py torchcodec|decord`: for each line `PATH NUMBER,NUMBER,…` it prints the
processor's seconds in which the library opened the clip and gave those frames, in one thread.
"""

import sys
import time
from collections.abc import Callable, Sequence

Frames = Callable[[str, Sequence[int]], object]


def torchcodec_frames() -> Frames:
    """torchcodec's, which by default looks at all packets first, so that frames are the right
    ones."""
    import torch
    from torchcodec.decoders import VideoDecoder  # type: ignore[import-not-found]

    torch.set_num_threads(1)

    def frames(path: str, numbers: Sequence[int]) -> object:
        decoder = VideoDecoder(path, dimension_order="NHWC", num_ffmpeg_threads=1)
        return decoder.get_frames_at(indices=[*numbers]).data.numpy()

    return frames


def decord_frames() -> Frames:
    """decord's."""
    import decord  # type: ignore[import-not-found]

    def frames(path: str, numbers: Sequence[int]) -> object:
        return decord.VideoReader(path, num_threads=1).get_batch([*numbers]).asnumpy()

    return frames


def main() -> None:
    frames = {"torchcodec": torchcodec_frames, "decord": decord_frames}[sys.argv[1]]()
    print("ready", flush=True)
    for line in sys.stdin:
        path, _, numbers = line.strip().rpartition(" ")
        wanted = [int(number) for number in numbers.split(",")]
        began_s = time.process_time()
        frames(path, wanted)
        print(time.process_time() - began_s, flush=True)


if __name__ == "__main__":
    main()
