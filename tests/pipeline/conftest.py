"""Fixtures that the pipeline's tests share."""

from __future__ import annotations

from network import certificates, no_network
from objectstores import s3
from prefetching import packed, scarce

__all__ = ["certificates", "no_network", "packed", "s3", "scarce"]
