"""What transformers' default image processors use of torchvision, in torch alone.

torchvision's wheels fit one build of torch each, so it need not be installed with every torch that
the tests run with. The processors use six functions of it. Resizing is torch's own `interpolate`
on uint8, which torchvision calls with the same arguments for bicubic, bilinear and Lanczos filters
on a CPU; the others cut, add borders, and compute (x − mean) / std.
"""

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch
from torch.nn.functional import interpolate


class InterpolationMode(Enum):
    """torchvision's names of filters."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(image, size, interpolation=InterpolationMode.BILINEAR, antialias=True):
    """uint8[..., 3, h, w] to the (height, width) given."""
    assert image.dtype == torch.uint8
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    resized = interpolate(
        flat, list(size), mode=interpolation.value, align_corners=False, antialias=antialias
    )
    return resized.reshape(*image.shape[:-2], *size)


def crop(image, top, left, height, width):
    """The part of the picture, which lies within it."""
    assert top >= 0
    assert left >= 0
    return image[..., top : top + height, left : left + width]


def pad(image, padding, fill=0):
    """Adds a border of (left, top, right, bottom) pixels of one colour."""
    left, top, right, bottom = padding
    *lead, height, width = image.shape
    colour = torch.as_tensor(fill, dtype=image.dtype).reshape(-1, 1, 1)
    framed = colour.expand(*lead, height + top + bottom, width + left + right).clone()
    framed[..., top : top + height, left : left + width] = image
    return framed


def normalize(image, mean, std, inplace=False):
    """(image − mean) / std by colour."""
    mean, std = (torch.as_tensor(x, dtype=image.dtype).reshape(-1, 1, 1) for x in (mean, std))
    return image.sub(mean).div(std)


def grayscale_to_rgb(image):
    """Pictures that come here have three colours."""
    assert image.shape[-3] == 3
    return image


def install() -> None:
    """Let `import torchvision` find these in this process."""
    functional = ModuleType("torchvision.transforms.v2.functional")
    for name in ("InterpolationMode", "resize", "crop", "pad", "normalize", "grayscale_to_rgb"):
        setattr(functional, name, globals()[name])
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2"):
        module = ModuleType("torchvision" + name)
        module.__spec__ = ModuleSpec(module.__name__, loader=None, is_package=True)
        sys.modules[module.__name__] = module
    sys.modules["torchvision"].__version__ = "0.28"
    sys.modules["torchvision"].io = sys.modules["torchvision.io"]
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"]
    sys.modules["torchvision.transforms"].InterpolationMode = InterpolationMode
    sys.modules["torchvision.transforms"].v2 = sys.modules["torchvision.transforms.v2"]
    sys.modules["torchvision.transforms.v2"].functional = functional
    sys.modules["torchvision.transforms.functional"].pil_to_tensor = None
    sys.modules[functional.__name__] = functional


def pytest_configure() -> None:
    """As a plugin of pytest: `-p tests.decode.torchvision_standin`."""
    install()
