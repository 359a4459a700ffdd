"""Reads and caches the images that requests refer to.

A request refers to an image by a path below one of the server's roots, by a base64-encoded image
file, or by the SHA-256 of a file that was sent before.
"""

import base64
import binascii
import errno
import hashlib
import os
import stat
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

from PIL.Image import Image as Picture

from megatron_rl.config import require
from megatron_rl.data.images import StoredImage
from megatron_rl.errors import InfraError, PermanentInfraError
from megatron_rl.tasks.lewis.listener_protocol import CandidateImage

MAX_IMAGE_PIXELS = 1 << 25
"""Maximum number of pixels per image. A decoded image of this size takes 100 MB."""
MAX_IMAGE_BYTES = 16 << 20
"""Maximum size of an image file, in bytes."""
CACHE_BYTES = 1 << 30
"""Maximum total size of the cached files, in bytes. The least recently used file is evicted first.
"""


INFRA_ERRNOS = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Error numbers of OS errors that are caused by the disk or by this process, not by the request."""


class UnknownImage(KeyError):
    """Raised if no file with a given hash is cached.

    The file was never sent or has been evicted. The client must send the file.
    """


class ImageCache:
    """Thread-safe cache of image files."""

    def __init__(self, roots: Sequence[str], *, cache_bytes: int = CACHE_BYTES) -> None:
        """Create the cache.

        Raises:
            ValueError: A root is not a folder.
        """
        for root in roots:
            require(os.path.isdir(root), "--root", root, "is not a folder")
        self._roots = [os.path.realpath(root) for root in roots]
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._cache_bytes, self.num_bytes = cache_bytes, 0
        self._lock = Lock()

    def store_candidate(self, candidate: CandidateImage, *, where: str) -> CandidateImage:
        """Store an image that was sent as base64 and return a candidate with its hash.

        A candidate with a path or a hash is returned unchanged. A cached file with the candidate's
        hash is marked as recently used.

        Raises:
            ValueError: The base64 encoding is invalid, or the file is too large.
        """
        if not candidate.base64:
            with self._lock:
                if candidate.sha256 in self._files:
                    self._files.move_to_end(candidate.sha256)
            return candidate
        try:
            content = base64.b64decode(candidate.base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where}: is not valid base64 ({error})") from error
        _check_size(len(content), where)
        return CandidateImage(sha256=self._store(content))

    def read_image(self, candidate: CandidateImage, *, where: str) -> tuple[str, Picture]:
        """Return the SHA-256 of the image file and the decoded image.

        Raises:
            UnknownImage: No file with this hash is cached.
            ValueError: The file is not an image, is too large, or is not below the server's roots.
            InfraError: Reading failed because of the server's disk or process (INFRA_ERRNOS).
        """
        content = self._read_file(candidate.path, where) if candidate.path else self._find_stored(candidate.sha256)
        stored = StoredImage(content, where)
        width, height = stored.size()
        if width * height > MAX_IMAGE_PIXELS:
            raise ValueError(f"{where}: has {width}x{height} pixels, more than {MAX_IMAGE_PIXELS}")
        try:
            return hashlib.sha256(content).hexdigest(), stored.open()
        except PermanentInfraError as error:
            raise ValueError(str(error)) from error

    def _find_stored(self, key: str) -> bytes:
        with self._lock:
            if key not in self._files:
                raise UnknownImage(key)
            return self._files[key]

    def _store(self, content: bytes) -> str:
        key = hashlib.sha256(content).hexdigest()
        with self._lock:
            if key not in self._files:
                self._files[key] = content
                self.num_bytes += len(content)
            self._files.move_to_end(key)
            while self.num_bytes > self._cache_bytes and len(self._files) > 1:
                _, oldest = self._files.popitem(last=False)
                self.num_bytes -= len(oldest)
        return key

    def _read_file(self, path: str, where: str) -> bytes:
        if not self._roots:
            raise ValueError(f"{where}: this server has no image folder (--root FOLDER); send the image as base64")
        if ".." in Path(path).parts or "\0" in path:
            raise ValueError(f"{where}: the path must not contain .. or null characters")
        asked = os.path.join(self._roots[0], path)
        self._require_below_root(os.path.realpath(asked), where)
        try:
            opened = os.open(asked, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            fault = InfraError if error.errno in INFRA_ERRNOS else ValueError
            raise fault(f"{where}: {error.strerror}") from error
        with open(opened, "rb") as file:
            self._require_below_root(os.readlink(f"/proc/self/fd/{opened}"), where)  # the path may have become a symlink after the check
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise ValueError(f"{where}: is not a regular file")
            _check_size(os.fstat(opened).st_size, where)
            return file.read(MAX_IMAGE_BYTES)

    def _require_below_root(self, real: str, where: str) -> None:
        if not any(real.startswith(os.path.join(root, "")) for root in self._roots):
            raise ValueError(f"{where}: is outside of this server's roots")


def _check_size(size: int, where: str) -> None:
    if size > MAX_IMAGE_BYTES:
        raise ValueError(f"{where}: has {size} bytes, more than {MAX_IMAGE_BYTES}")
