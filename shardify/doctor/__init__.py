"""Measures a folder of pictures or shards as it lies, and says what a first epoch from it costs as files and as shards."""

from __future__ import annotations

from shardify.doctor.examination import DEEP, SECONDS, Settings, examine
from shardify.doctor.report import Report

__all__ = ["DEEP", "SECONDS", "Report", "Settings", "examine"]
