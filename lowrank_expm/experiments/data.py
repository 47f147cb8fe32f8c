"""Handwritten digits: scikit-learn's own, or MNIST files that the user has."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

TEST_SHARE = 4
PATCH = 7  # pixels a side that make a token of MNIST's images
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"
BYTES = bytes([0, 0, 8])  # how an IDX file of unsigned bytes begins


class Digits(NamedTuple):
    """Images (count, side, side) with zero mean and unit variance, and labels."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    patch: int

    @property
    def side(self) -> int:
        """Pixels a side."""
        return self.images.shape[-1]


def bundled() -> Digits:
    """The 1,797 images of 8 × 8 pixels in scikit-learn; a quarter is for the test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order].reshape(-1, 8, 8), labels[order]
    cut = len(images) // TEST_SHARE
    return _digits(images[cut:], labels[cut:], images[:cut], labels[:cut], 2)


def mnist(folder: Path) -> Digits:
    """MNIST's four files as they are distributed, gzipped or not."""
    (images, labels), (test, test_labels) = (_part(folder, part) for part in ("train", "t10k"))
    if images.shape[1:] != test.shape[1:]:
        raise OSError(
            f"{folder} has training images of {images.shape[1:]} pixels and test images of "
            f"{test.shape[1:]}; they must be of one size"
        )
    if images.min() == images.max():
        raise OSError(f"{folder}: all pixels of train-{IMAGES} are {images.max()}")
    return _digits(images, labels, test, test_labels, PATCH)


def _part(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of the training or the test set."""
    images, labels = (_idx(folder, f"{part}-{kind}") for kind in (IMAGES, LABELS))
    what = f"{folder}: {part}-{IMAGES} has shape {images.shape} and {part}-{LABELS} {labels.shape}"
    square = images.ndim == 3 and images.shape[1] == images.shape[2] >= PATCH
    if not (square and images.size and labels.shape == images.shape[:1]):
        raise OSError(
            f"{what}; they must be (count, side, side) and (count,), with a side of {PATCH} or more"
        )
    if labels.max() > 9:
        raise OSError(f"{folder}: {part}-{LABELS} has a label {labels.max()}; they must be 0 to 9")
    return images, labels


def _digits(
    images: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray, patch: int
) -> Digits:
    """Normalised by the training images."""
    mean, spread = images.mean(), images.std()
    scaled = [torch.tensor((a - mean) / spread, dtype=torch.float32) for a in (images, test)]
    targets = [torch.tensor(a, dtype=torch.int64) for a in (labels, test_labels)]
    return Digits(scaled[0], targets[0], scaled[1], targets[1], patch)


def _idx(folder: Path, name: str) -> np.ndarray:
    """One file in the IDX format of unsigned bytes."""
    for path in (folder / name, folder / f"{name}.gz", folder / name.replace("-idx", ".idx")):
        if path.exists():
            return _unpacked(_bytes(path), path)
    raise FileNotFoundError(f"{folder} has no file {name} or {name}.gz")


def _bytes(path: Path) -> bytes:
    """What is in a file, gzipped or not."""
    raw = path.read_bytes()
    try:
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise OSError(f"{path} is not a gzipped file, or is damaged: {error}") from None


def _unpacked(raw: bytes, path: Path) -> np.ndarray:
    """The array in a file: two zeros, the type, the number of axes, their lengths, the bytes."""
    axes = raw[3] if raw[:3] == BYTES else 0
    shape = np.frombuffer(raw[4 : 4 + 4 * axes].ljust(4 * axes, b"\0"), ">i4").tolist()
    if not axes or min(shape) < 0 or len(raw) != 4 + 4 * axes + math.prod(shape):
        raise OSError(f"{path} is not an IDX file of unsigned bytes, or is cut off")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)
