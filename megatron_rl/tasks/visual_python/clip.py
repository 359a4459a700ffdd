"""Video reader for code in the sandbox, with the interface of decord's VideoReader (decord 0.6).

The source of this module is executed inside the sandbox, where OpenCV is installed.
"""

import cv2
import numpy as np

MAX_SEQUENTIAL_FRAMES = 64
"""Number of frames, counted from the current position, that the reader reaches by decoding forward.
To reach any other frame, the reader seeks.
"""


class Frames:
    """Decoded RGB frames, with the shape [height, width, 3] or [num_frames, height, width, 3].

    `asnumpy()` returns the pixels as an array.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        self.shape, self._pixels = pixels.shape, pixels

    def asnumpy(self) -> np.ndarray:
        """Return the pixels as a uint8 array."""
        return self._pixels


class Clip:
    """Video file with frames that are indexed from 0 and decoded on access."""

    def __init__(self, path: str) -> None:
        """Open a video file.

        Raises:
            ValueError: OpenCV cannot decode the file as a video.
        """
        self._path, self._video, self._next = path, cv2.VideoCapture(path), 0
        self._length = int(self._video.get(cv2.CAP_PROP_FRAME_COUNT))
        if not self._video.isOpened() or self._length < 1 or not self._video.grab():
            raise ValueError(f"{path} is not a video that OpenCV can decode")
        self._next = 1

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        return f"a video of {len(self)} frames, {self.get_avg_fps():.2f} a second"

    def get_avg_fps(self) -> float:
        """Return the average number of frames per second."""
        return float(self._video.get(cv2.CAP_PROP_FPS))

    def __getitem__(self, index: int) -> Frames:
        """Decode the frame at `index`.

        Raises:
            IndexError: The frame does not exist or cannot be decoded.
        """
        return Frames(self._frame(range(len(self))[int(index)]))

    def get_batch(self, indices: list[int]) -> Frames:
        """Decode the frames at `indices`."""
        return Frames(np.stack([self[index].asnumpy() for index in indices]))

    def _frame(self, number: int) -> np.ndarray:
        if not self._next <= number < self._next + MAX_SEQUENTIAL_FRAMES:
            self._video.set(cv2.CAP_PROP_POS_FRAMES, number)
            self._next = number
        while self._next < number and self._video.grab():
            self._next += 1
        found, pixels = self._video.read()
        self._next += 1
        if not found:
            raise IndexError(f"frame {number} of {self._path} cannot be decoded")
        return cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
