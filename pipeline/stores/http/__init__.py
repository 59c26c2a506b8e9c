"""Reads bytes over HTTP and HTTPS: each once and in order, or an error that says why not.

store ── reading ── connections, causes (urllib3's one door)
  │         └────── replies (pure), retry, counts
  └── credentials ── options ── address
"""

from pipeline.stores.http.address import Address, identity
from pipeline.stores.http.counts import Counts
from pipeline.stores.http.options import HttpOptions
from pipeline.stores.http.replies import Remote
from pipeline.stores.http.store import HttpStore

__all__ = ["Address", "Counts", "HttpOptions", "HttpStore", "Remote", "identity"]
