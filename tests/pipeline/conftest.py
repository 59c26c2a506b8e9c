"""Fixtures that the pipeline's tests share."""

from __future__ import annotations

from network import certificates, no_network
from prefetching import packed, scarce

__all__ = ["certificates", "no_network", "packed", "scarce"]
