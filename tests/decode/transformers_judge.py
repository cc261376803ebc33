"""transformers' own default (torchvision) image processors, in a process of their own.

What transformers finds when it is imported decides which processors it has; the process that runs
the tests keeps it as it is. With torchvision, the processors use it; otherwise its stand-in.

    judge = TransformersJudge(folder)
    judge.pixels("Qwen2VLImageProcessor", {"size": …}, data) → float32 array
"""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class TransformersJudge:
    """Asks the process; close it at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.decode.transformers_judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def pixels(self, processor: str, options: dict[str, Any], data: bytes) -> NDArray[np.float32]:
        """`pixel_values` that the processor of this name makes of a picture's file."""
        (self._folder / "picture").write_bytes(data)
        return self._ask(processor=processor, options=options, path="picture")

    def frames(
        self, processor: str, options: dict[str, Any], frames: NDArray[np.uint8]
    ) -> NDArray[np.float32]:
        """`pixel_values_videos` that the video processor makes of frames [t, h, w, 3]."""
        np.save(self._folder / "frames.npy", frames)
        return self._ask(processor=processor, options=options, path="frames.npy")

    def frame_choice(
        self, processor: str, options: dict[str, Any], frames: int, frames_per_s: float
    ) -> NDArray[np.int64]:
        """The frames that the video processor samples of a clip."""
        clip = {"total_num_frames": frames, "fps": frames_per_s, "duration": frames / frames_per_s}
        return self._ask(processor=processor, options=options, path="choice", clip=clip)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()

    def _ask(self, **question: Any) -> NDArray[Any]:
        question["path"] = str(self._folder / question["path"])
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, "the process that runs transformers' processors has ended"
        return np.load(answer)


def main() -> None:
    """Answer each line of standard input with the path of an array."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # absent, or built for another torch
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        from tests.decode.torchvision_standin import install

        install()
    import torch
    import transformers
    from PIL import Image, ImageOps
    from transformers.video_utils import VideoMetadata

    torch.set_num_threads(1)
    Image.MAX_IMAGE_PIXELS = None
    made: dict[str, Any] = {}
    for line in sys.stdin:
        question = json.loads(line)
        key = json.dumps([question["processor"], question["options"]])
        if key not in made:
            made[key] = getattr(transformers, question["processor"])(**question["options"])
            assert made[key].backend == "torchvision" or hasattr(made[key], "sample_frames")
        path = Path(question["path"])
        if "clip" in question:
            clip = VideoMetadata(**question["clip"])
            found = made[key].sample_frames(clip, **question["options"])
        elif path.suffix == ".npy":
            frames = torch.from_numpy(np.load(path)).permute(0, 3, 1, 2)
            found = made[key](videos=[frames], return_tensors="pt")
            found = found.get("pixel_values_videos", found.get("pixel_values"))
        else:
            # As transformers' `load_image` does first.
            picture = ImageOps.exif_transpose(Image.open(io.BytesIO(path.read_bytes())))
            found = made[key](picture, return_tensors="pt")["pixel_values"]
        answer = path.with_suffix(".answer.npy")
        np.save(answer, found.numpy())
        print(answer, flush=True)


if __name__ == "__main__":
    main()
