"""Turns raw pixels and sound into encoder inputs, on the device that they are on.

The service sends uint8 pixels and float32 sound, a quarter of the bytes of an encoder's input or
less. Normalising, cutting into patches and the log-mel spectrogram are done here, by the rank.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import torch
from torch.nn import functional

SAMPLE_RATE_HZ = 16_000
FFT_SAMPLES = 400
HOP_SAMPLES = 160


def normalize_pixels(
    pixels: torch.Tensor,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """(pixels / 255 − mean) / std by channel: `pixels` uint8[..., 3] to `dtype`[..., 3].

    Computed as (pixels − 255·mean) / (255·std), in float32 for every `dtype` but float64, which is
    computed in float64: bit by bit what Hugging Face's default processors compute.
    """
    if pixels.dtype != torch.uint8 or pixels.shape[-1] != len(mean) or len(mean) != len(std):
        raise ValueError(
            f"pixels are {pixels.dtype} {list(pixels.shape)} with {len(mean)} means and "
            f"{len(std)} deviations; give uint8 [..., channels] and one of each per channel."
        )
    work = torch.float64 if dtype == torch.float64 else torch.float32
    shift, scale = (scaled_there(tuple(map(float, x)), work, pixels.device) for x in (mean, std))
    return pixels.to(work).sub_(shift).div_(scale).to(dtype)


@cache
def scaled_there(
    values: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """255 times a value of each channel, `dtype`[channels]; copied to a device once, since the host
    waits for it."""
    return (255.0 * torch.tensor(values, dtype=dtype)).to(device)


def patchify(
    pixels: torch.Tensor, *, patch: int = 14, temporal_patch: int = 2, merge: int = 2
) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Cut frames into the rows that Qwen2-VL's vision encoder takes, in its order.

    `pixels` [frames, height, width, 3] of any dtype. Returns rows
    [t·h·w, 3·temporal_patch·patch²] and the grid (t, h, w) in patches. The merge² patches
    that become one LLM token are neighbours; within a row the order is channel, time,
    height, width. Missing frames of the last temporal patch repeat the last frame.

    Source: Qwen2-VL (arXiv 2409.12191), section 2.1, and its released image processor.
    """
    frames, height, width, channels = pixels.shape
    unit = patch * merge
    if frames == 0 or height % unit or width % unit:
        raise ValueError(
            f"pixels are {list(pixels.shape)}; there must be a frame, and height and width must "
            f"be multiples of {unit} (patch {patch} × merge {merge})."
        )
    if frames % temporal_patch:
        missing = temporal_patch - frames % temporal_patch
        pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
    t, h, w = pixels.shape[0] // temporal_patch, height // patch, width // patch
    # [t, time, h/m, m, patch_y, w/m, m, patch_x, channel]
    blocks = pixels.reshape(
        t, temporal_patch, h // merge, merge, patch, w // merge, merge, patch, channels
    )
    # [t, h/m, w/m, m, m | channel, time, patch_y, patch_x]
    blocks = blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return blocks.reshape(t * h * w, channels * temporal_patch * patch * patch), (t, h, w)


def log_mel(
    audio: torch.Tensor, *, n_mels: int = 80, pad_to_samples: int | None = None
) -> torch.Tensor:
    """Whisper's input features: `audio` float[..., samples] at 16 kHz to
    float32[..., n_mels, samples // 160].

    Hann window of 400, hop of 160, power spectrum through Slaney's mel filters, log10 down to
    8 below the recording's maximum, then (x + 4) / 4. `pad_to_samples` appends silence first
    (Whisper trains on 480,000); a recording shorter than half a window gets one frame.

    Source: Whisper (arXiv 2212.04356), section 2.2, and its released front end.
    """
    wanted = max(pad_to_samples or 0, FFT_SAMPLES // 2 + 1)
    if audio.shape[-1] < wanted:
        audio = functional.pad(audio, (0, wanted - audio.shape[-1]))
    audio = audio.to(torch.float32)
    batch = audio.shape[:-1]
    spectrum = torch.stft(
        audio.reshape(-1, audio.shape[-1]),
        FFT_SAMPLES,
        HOP_SAMPLES,
        window=torch.hann_window(FFT_SAMPLES, device=audio.device),
        return_complex=True,
    )
    power = spectrum[..., :-1].abs().square()  # [batch, frequency, frame]
    mel = filters_there(n_mels, audio.device) @ power
    log = mel.clamp(min=1e-10).log10()
    log = torch.maximum(log, log.amax(dim=(-2, -1), keepdim=True) - 8.0)
    return ((log + 4.0) / 4.0).reshape(*batch, n_mels, -1)


@cache
def filters_there(n_mels: int, device: torch.device) -> torch.Tensor:
    """`mel_filters` on a device, where they are copied to once, since the host waits for it."""
    return mel_filters(n_mels).to(device)


@lru_cache(maxsize=4)
def mel_filters(n_mels: int) -> torch.Tensor:
    """Slaney's triangular filters over 0–8 kHz, each of unit area: float32[n_mels, 201].

    Source: Slaney, Auditory Toolbox (1998); the mel scale is linear up to 1 kHz (3 mel are
    200 Hz) and logarithmic above (27 mel are a factor of 6.4).
    """
    top_mel = 15.0 + 27.0 * torch.log(torch.tensor(8.0, dtype=torch.float64)) / _LOG_6_4
    mels = torch.linspace(0.0, float(top_mel), n_mels + 2, dtype=torch.float64)
    edges_hz = torch.where(
        mels < 15.0, mels * 200.0 / 3.0, 1000.0 * torch.exp((mels - 15.0) * _LOG_6_4 / 27.0)
    )
    bins_hz = torch.arange(FFT_SAMPLES // 2 + 1, dtype=torch.float64) * SAMPLE_RATE_HZ / FFT_SAMPLES
    low, centre, high = (edges_hz[i : i + n_mels, None] for i in range(3))
    rising = (bins_hz - low) / (centre - low)
    falling = (high - bins_hz) / (high - centre)
    triangles = torch.minimum(rising, falling).clamp(min=0.0)
    return (triangles * 2.0 / (high - low)).to(torch.float32)


_LOG_6_4 = float(torch.log(torch.tensor(6.4, dtype=torch.float64)))
