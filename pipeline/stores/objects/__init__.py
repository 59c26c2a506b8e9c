"""Reads objects of S3, Google Cloud Storage and Azure: what reads over HTTP promise, by these stores' own protocols.

store ── refusals (pure)            obstore's one door; its runtime doesn't survive a fork, so a trainer never imports it
  └───── access ── profile ── options ── address
finder ··· __main__ ── store        the trainer asks a short-lived process, by JSON on pipes
"""

from pipeline.stores.objects.address import ObjectAddress
from pipeline.stores.objects.finder import Finder
from pipeline.stores.objects.options import ObjectOptions

__all__ = ["Finder", "ObjectAddress", "ObjectOptions"]
