"""The settings of a build: the models, and the reader of their YAML files."""

from shardify.config.load import load
from shardify.config.models import BuildConfig, CsvSource, Encode, FoldersSource, Order, Resize, Shards, Store

__all__ = ["BuildConfig", "CsvSource", "Encode", "FoldersSource", "Order", "Resize", "Shards", "Store", "load"]
