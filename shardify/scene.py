"""Draws a photo-like picture of one of ten landmarks, from (seed, number, landmark, size) alone.

Sky, ground, haze, shrubs and grain come from the same draws for every landmark, and the mean color is set to one of its own: a
landmark shows in the shape of its building and in nothing else. Only +, -, *, /, floor and integer sums are used, and
SHAKE-128 for chance, so that the pixels are the same on every machine and under every release of numpy.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Field = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
Pixels = npt.NDArray[np.uint8]


class Draws:
    """Numbers and bytes by chance that follow from a text alone."""

    def __init__(self, text: str) -> None:
        self._stream = hashlib.shake_128(text.encode())
        self._numbers = struct.iter_unpack("<Q", hashlib.shake_128(f"{text} numbers".encode()).digest(8 * 512))

    def number(self, low: float, high: float) -> float:
        """Return a number from [low, high)."""
        bits: int = next(self._numbers)[0] >> 11
        return low + (high - low) * (bits / 2**53)

    def below(self, limit: int) -> int:
        """Return an integer from 0 to limit - 1."""
        return int(self.number(0, limit))

    def color(self, low: float, high: float) -> Field:
        """Return an RGB color between `low` and `high`, not very saturated, float32 (3, 1, 1)."""
        level = self.number(low + 30, high - 30)
        return np.array([[[level + self.number(-30, 30)]] for _ in range(3)], np.float32)

    def noise(self, name: str, height: int, width: int) -> Field:
        """Return white noise in [-1, 1), float32 (height, width)."""
        stream = self._stream.copy()
        stream.update(f" {name}".encode())
        raw = np.frombuffer(stream.digest(height * width), np.int8).reshape(height, width)
        return raw.astype(np.float32) / np.float32(128)


def picture(seed: int, number: int, landmark: int, height: int, width: int) -> Pixels:
    """Draw picture `number` of a set: RGB uint8 (height, width, 3), both sides even.

    It is painted at half the size, softened, enlarged, and given grain at full size.
    """
    draws = Draws(f"shardify scene {seed} {number}")
    h, w = height // 2, width // 2
    y, x = np.meshgrid(np.arange(h, dtype=np.float32), np.arange(w, dtype=np.float32), indexing="ij")
    canvas, horizon = _background(draws, y, x)
    _building(canvas, draws, landmark, horizon, y, x)
    _shrubs(canvas, draws, horizon, y, x)
    light = draws.number(-0.25, 0.25) * (x / w - 0.5) + draws.number(-0.2, 0.2) * (y / h - 0.5) + 1
    canvas *= light.astype(np.float32)
    return _exposed(canvas, draws)


def _clouds(draws: Draws, name: str, height: int, width: int, cells: int) -> Field:
    """Return noise whose octaves halve in size and strength (as photographs' do), about [-1, 1], float32 (height, width)."""
    total = np.zeros((height, width), np.float32)
    strength = 0.55
    while cells < min(height, width) // 2:
        lattice = draws.noise(f"{name} {cells}", cells + 2, cells + 2)
        total += np.float32(strength) * _stretched(lattice, height, width)
        cells, strength = cells * 2, strength * 0.6
    return total


def _stretched(lattice: Field, height: int, width: int) -> Field:
    """Enlarge a lattice of n + 2 points a side to (height, width), linearly."""

    def places(count: int) -> tuple[npt.NDArray[np.intp], Field]:
        at = np.arange(count, dtype=np.float32) * np.float32((len(lattice) - 2) / count)
        whole = np.floor(at)
        return whole.astype(np.intp), at - whole

    row, down = places(height)
    column, right = places(width)
    wide = lattice[:, column] + (lattice[:, column + 1] - lattice[:, column]) * right
    upper = wide[row]
    stretched: Field = upper + (wide[row + 1] - upper) * down[:, None]
    return stretched


def _background(draws: Draws, y: Field, x: Field) -> tuple[Field, float]:
    """Paint sky above ground; return the canvas, float32 (3, h, w), and the row of the horizon."""
    h, w = y.shape
    horizon = h * draws.number(0.6, 0.85)
    top, low, near, far = (draws.color(*span) for span in ((70, 210), (110, 230), (30, 170), (50, 190)))
    slope = draws.number(-0.04, 0.04)
    line = np.float32(horizon) + np.float32(slope) * (x[0] - np.float32(w / 2))
    depth = y / line
    sky = 38 * _clouds(draws, "sky", h, w, 3) + top + (low - top) * depth
    ground = 55 * _clouds(draws, "ground", h, w, 12) + far + (near - far) * (depth - 1)
    return np.where(depth < 1, sky, ground), horizon


def _building(canvas: Field, draws: Draws, landmark: int, horizon: float, y: Field, x: Field) -> None:
    """Paint the landmark where, as large and in the colors that the draws say: walls and what stands out on them."""
    h, w = y.shape
    size = min(h, w) * draws.number(0.5, 0.72)
    middle = w * draws.number(0.36, 0.64)
    foot = min(horizon + h * draws.number(0.0, 0.1), h * 0.97)
    lean = np.float32(draws.number(-0.06, 0.06))
    u = (x - np.float32(middle)) / np.float32(size)
    v = (np.float32(foot) - y) / np.float32(size)
    u, v = u + lean * v, v - lean * u
    walls, details = LANDMARKS[landmark](u, v)
    behind = int(canvas[:, walls].astype(np.int64).sum()) / max(1, 3 * int(walls.sum()))
    contrast = draws.number(55, 90)
    color = draws.color(-30, 30) + np.float32(behind + (contrast if behind < 128 else -contrast))
    other = draws.color(-20, 20) + np.float32(behind + (-0.4 if draws.below(2) else 0.4) * contrast)
    stone = 18 * _clouds(draws, "stone", h, w, 20) + np.float32(draws.number(-30, 30)) * u
    for mask, paint in ((walls, color), (details, other)):
        np.copyto(canvas, paint + stone, where=mask)


def _shrubs(canvas: Field, draws: Draws, horizon: float, y: Field, x: Field) -> None:
    """Paint a few dark or light blobs along the ground, as many for every landmark."""
    h, w = y.shape
    ragged = 1 + 0.6 * _clouds(draws, "shrubs", h, w, 16)
    for _ in range(4):
        radius = h * draws.number(0.03, 0.09)
        across, down = x - np.float32(w * draws.number(0, 1)), y - np.float32(draws.number(horizon, h))
        mask = across * across + 2 * down * down < np.float32(radius * radius) * ragged
        np.copyto(canvas, draws.color(-20, 150) + 40 * ragged, where=mask)


def _exposed(canvas: Field, draws: Draws) -> Pixels:
    """Move the mean to a color of its own, double both sides linearly, add grain and clip to uint8 (2h, 2w, 3).

    In int16, plane by plane: twice as fast as float32 with the channels last.
    """
    _, h, w = canvas.shape
    whole = np.rint(canvas).astype(np.int32)
    mean = whole.sum((1, 2), dtype=np.int64) // (h * w)
    target = np.rint(draws.color(85, 170)).astype(np.int64)[:, 0, 0]
    planes = _softened((whole + (target - mean)[:, None, None]).clip(-200, 455).astype(np.int16))
    grain = draws.noise("grain", 2 * h, 2 * w) * np.float32(draws.number(9, 14))
    grain[1:] += grain[:-1] * np.float32(0.5)
    rough = np.rint(grain).astype(np.int16)
    pixels = np.empty((2 * h, 2 * w, 3), np.uint8)
    for channel, plane in enumerate(planes):
        pixels[..., channel] = (_doubled(plane) + rough).clip(0, 255)
    return pixels


def _softened(planes: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """Average each pixel with those right of it and below, as a lens does: edges lose their steps."""
    planes[:, :-1] = (planes[:, :-1] + planes[:, 1:]) >> 1
    planes[..., :-1] = (planes[..., :-1] + planes[..., 1:]) >> 1
    return planes


def _doubled(plane: npt.NDArray[np.int16]) -> npt.NDArray[np.int16]:
    """Double both sides of a plane; a new pixel is the mean of its neighbors."""
    h, w = plane.shape
    large = np.empty((2 * h, 2 * w), np.int16)
    large[::2, ::2] = plane
    large[::2, 1:-1:2] = (plane[:, :-1] + plane[:, 1:]) >> 1
    large[::2, -1] = plane[:, -1]
    large[1:-1:2] = (large[:-2:2] + large[2::2]) >> 1
    large[-1] = large[-2]
    return large


# The landmarks. (u, v) are in the building's own units: u to the right of its middle, v up from its foot, about 1 high.
# Each returns (walls, details); details are painted over walls, and what is in neither shows the background.


def _tower(u: Field, v: Field) -> tuple[Mask, Mask]:
    a = abs(u)
    shaft = (a < 0.13) & (v > 0) & (v < 0.75)
    roof = (v >= 0.75) & (a < 0.2 * (1.15 - v) / 0.4)
    return shaft | roof, roof | (shaft & (a < 0.05) & (v % 0.25 > 0.14))


def _dome(u: Field, v: Field) -> tuple[Mask, Mask]:
    a, base = abs(u), (abs(u) < 0.48) & (v > 0) & (v < 0.38)
    cap = (v >= 0.38) & (u * u + (v - 0.38) * (v - 0.38) < 0.4 * 0.4)
    lantern = (a < 0.05) & (v > 0.7) & (v < 0.95)
    return base | cap | lantern, cap | lantern


def _gate(u: Field, v: Field) -> tuple[Mask, Mask]:
    a = abs(u)
    block = (a < 0.48) & (v > 0) & (v < 0.85)
    hole = (a < 0.22) & ((v < 0.42) | (u * u + (v - 0.42) * (v - 0.42) < 0.22 * 0.22))
    return block & ~hole, block & (v > 0.7)


def _pyramid(u: Field, v: Field) -> tuple[Mask, Mask]:
    walls = (v > 0) & (abs(u) < 0.8 * (1 - v / 0.85))
    return walls, walls & (u > 0.25 * (1 - v / 0.85))


def _cathedral(u: Field, v: Field) -> tuple[Mask, Mask]:
    a = abs(abs(u) - 0.33)
    towers = (a < 0.14) & (v > 0) & (v < 0.8)
    roofs = (v >= 0.8) & (a < 0.14 * (1.15 - v) / 0.35)
    nave = (abs(u) < 0.33) & (v > 0) & (v < 0.45)
    rose = u * u + (v - 0.25) * (v - 0.25) < 0.12 * 0.12
    return towers | roofs | nave, roofs | rose


def _temple(u: Field, v: Field) -> tuple[Mask, Mask]:
    a = abs(u)
    steps = (v > 0) & (v < 0.1) & (a < 0.72)
    columns = (v >= 0.1) & (v < 0.55) & (a < 0.65) & ((u + 8) % 0.2 > 0.1)
    pediment = (v >= 0.55) & (a < 0.72 * (1 - (v - 0.6) / 0.3))
    return steps | columns | pediment, pediment & (v < 0.62)


def _wheel(u: Field, v: Field) -> tuple[Mask, Mask]:
    up = v - 0.58
    far = u * u + up * up
    rim = (far > 0.36 * 0.36) & (far < 0.45 * 0.45)
    spokes = (far < 0.4 * 0.4) & ((abs(u) < 0.025) | (abs(up) < 0.025) | (abs(u - up) < 0.035) | (abs(u + up) < 0.035))
    legs = (v > 0) & (up < 0) & (abs(abs(u) + 0.55 * up) < 0.04)
    return rim | spokes | legs, far < 0.08 * 0.08


def _windmill(u: Field, v: Field) -> tuple[Mask, Mask]:
    up = v - 0.68
    body = (v > 0) & (v < 0.72) & (abs(u) < 0.22 - 0.14 * v)
    across, along = u + 0.35 * up, up - 0.35 * u
    sails = (across * across + along * along < 0.5 * 0.5) & ((abs(across) < 0.05) | (abs(along) < 0.05))
    return body | sails, sails


def _aqueduct(u: Field, v: Field) -> tuple[Mask, Mask]:
    wall = (abs(u) < 1.0) & (v > 0) & (v < 0.62)
    across = (u + 8) % 0.34 - 0.17
    hole = (abs(across) < 0.12) & ((v < 0.3) | (across * across + (v - 0.3) * (v - 0.3) < 0.12 * 0.12))
    return wall & ~hole, wall & (v > 0.52)


def _suspension(u: Field, v: Field) -> tuple[Mask, Mask]:
    a = abs(u)
    deck = (v > 0.2) & (v < 0.29) & (a < 1.2)
    pylons = (abs(a - 0.5) < 0.05) & (v > 0) & (v < 1)
    line = np.where(a < 0.5, 0.32 + 2.6 * u * u, 0.97 - 1.2 * (a - 0.5))
    cable = (abs(v - line) < 0.03) & (v > 0.25)
    hangers = (v > 0.25) & (v < line) & ((u + 8) % 0.14 < 0.028)
    return deck | pylons | cable | hangers, pylons


LANDMARKS: tuple[Callable[[Field, Field], tuple[Mask, Mask]], ...] = (
    _tower,
    _dome,
    _gate,
    _pyramid,
    _cathedral,
    _temple,
    _wheel,
    _windmill,
    _aqueduct,
    _suspension,
)
