"""Pack images and labels into large sequential tar shards, ordered for streaming."""

__version__ = "0.1.0"
