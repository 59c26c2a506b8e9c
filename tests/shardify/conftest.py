"""Fixtures that the packing side's tests share."""

from __future__ import annotations

from network import certificates

__all__ = ["certificates"]
