"""Measures what decoding a picture costs on this machine's CPUs, and whether OpenCV is installed soundly."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from shardify.format.picture import PictureError, probe

# All four install the same folder `cv2`; that albumentations requires the headless one is why two of them meet.
_WHEELS = ("opencv-contrib-python", "opencv-contrib-python-headless", "opencv-python", "opencv-python-headless")


def opencv_problems(path: list[str] | None = None) -> list[str]:
    """Return what is wrong with OpenCV in this environment (or in the folders of `path`), a line each."""
    where = sys.path if path is None else path
    found = {name: dist.version for name in _WHEELS for dist in metadata.distributions(name=name, path=where)}
    wheels = [f"{name} {version}" for name, version in found.items()]
    problems: list[str] = []
    if len(wheels) > 1:
        problems.append(
            f"{len(wheels)} OpenCV wheels are installed ({', '.join(wheels)}) and overwrite each other's files: "
            f"`pip uninstall -y {' '.join(found)}`, then `pip install opencv-python-headless`"
        )
    if path is None and (broken := _import_error()):
        problems.append(f"OpenCV can't be loaded ({broken}); `pip install --force-reinstall opencv-python-headless` needs no libGL")
    return problems


def _import_error() -> str:
    try:
        import shardify.encode  # noqa: F401, PLC0415
    except ImportError as error:
        return str(error)
    return ""


def megapixels(data: bytes) -> float:
    """Return a picture's size by its header in millions of pixels; 0 for what is no picture."""
    try:
        return probe(data).pixels / 1e6
    except PictureError:
        return 0.0


def decode_seconds(pictures: Sequence[bytes], threads: int, seconds: float) -> float | None:
    """Return the seconds of a CPU that decoding one of these takes while `threads` do it at once; None where none decodes.

    Each thread goes over all of them (cv2 decodes outside the interpreter's lock) until `seconds` are over. CPU time counts, not
    the clock: what other programs take meanwhile is no property of the machine.
    """
    whole = [] if _import_error() else [data for data in pictures if _decodes(data)]
    if not whole:
        return None
    end = time.perf_counter() + seconds

    def go(_: int) -> float:
        start, done = time.thread_time(), 0
        while not done or time.perf_counter() < end:
            done += _decodes(whole[done % len(whole)])
        return (time.thread_time() - start) / done

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(go, range(threads))) / threads


def _decodes(picture: bytes) -> bool:
    """Decode a picture; tells whether it could be."""
    from shardify.encode import check_decodes  # noqa: PLC0415  (cv2, whose absence is a finding)

    try:
        check_decodes(picture)
    except PictureError:
        return False
    return True
