"""Fixtures that the pipeline's tests share."""

from __future__ import annotations

from prefetching import packed, scarce

__all__ = ["packed", "scarce"]
