"""Images that a request names.

An image is a file below one of the server's roots, a file in the request, or the SHA-256 of a file
that was sent before.
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
"""Maximum number of pixels of a stored image: 100 MB once decoded."""
MAX_IMAGE_BYTES = 16 << 20
"""Maximum size of an image file."""
CACHE_BYTES = 1 << 30
"""Maximum total size of the stored files; the least recently used one is evicted first."""


INFRA_ERRNOS = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of the disk or of this process, independent of the request."""


class UnknownImage(KeyError):
    """No file with this hash is stored: it was never sent, or was evicted.

    The client must send it.
    """


class ImageCache:
    """Cache of image files. Threads may read concurrently."""

    def __init__(self, roots: Sequence[str], *, cache_bytes: int = CACHE_BYTES) -> None:
        """Create the cache.

        Raises:
            ValueError: A root is not a folder.
        """
        for root in roots:
            require(os.path.isdir(root), "--root", root, "is no folder")
        self._roots = [os.path.realpath(root) for root in roots]
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._cache_bytes, self.num_bytes = cache_bytes, 0
        self._lock = Lock()

    def store_candidate(self, candidate: CandidateImage, *, where: str) -> CandidateImage:
        """Store an image that is sent as base64 and return it by its hash.

        Other candidates are returned unchanged; a hash is marked as recently used.

        Raises:
            ValueError: The text is not valid base64, or the file is too large.
        """
        if not candidate.base64:
            with self._lock:
                if candidate.sha256 in self._files:
                    self._files.move_to_end(candidate.sha256)
            return candidate
        try:
            content = base64.b64decode(candidate.base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where}: not base64: {error}") from error
        _check_size(len(content), where)
        return CandidateImage(sha256=self._store(content))

    def read_image(self, candidate: CandidateImage, *, where: str) -> tuple[str, Picture]:
        """Return the file's SHA-256 and the image.

        Raises:
            UnknownImage: No file with this hash is stored.
            ValueError: The file is not an image, too large, or not below the server's roots.
            InfraError: The server's disk or process failed (INFRA_ERRNOS).
        """
        content = self._read_file(candidate.path, where) if candidate.path else self._find_stored(candidate.sha256)
        stored = StoredImage(content, where)
        width, height = stored.size()
        if width * height > MAX_IMAGE_PIXELS:
            raise ValueError(f"{where}: {width}x{height} pixels, more than {MAX_IMAGE_PIXELS}")
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
            raise ValueError(f"{where}: this server reads no files (--root FOLDER); send the picture as base64")
        if ".." in Path(path).parts or "\0" in path:
            raise ValueError(f"{where}: .. leads out of where it stands; give the path without")
        asked = os.path.join(self._roots[0], path)
        self._require_below_root(os.path.realpath(asked), where)
        try:
            opened = os.open(asked, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            fault = InfraError if error.errno in INFRA_ERRNOS else ValueError
            raise fault(f"{where}: {error.strerror}") from error
        with open(opened, "rb") as file:
            self._require_below_root(os.readlink(f"/proc/self/fd/{opened}"), where)  # a symlink may have replaced it after the first check
            if not stat.S_ISREG(os.fstat(opened).st_mode):
                raise ValueError(f"{where}: is no file")
            _check_size(os.fstat(opened).st_size, where)
            return file.read(MAX_IMAGE_BYTES)

    def _require_below_root(self, real: str, where: str) -> None:
        if not any(real.startswith(os.path.join(root, "")) for root in self._roots):
            raise ValueError(f"{where}: lies outside of this server's roots")


def _check_size(size: int, where: str) -> None:
    if size > MAX_IMAGE_BYTES:
        raise ValueError(f"{where}: {size} bytes, more than {MAX_IMAGE_BYTES}")
