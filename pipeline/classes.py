"""Checks that a set numbers its classes as another does."""

from __future__ import annotations

from pipeline.errors import OptionsError
from pipeline.options import LoaderOptions
from pipeline.shardset import ShardSet


def check_classes(found: ShardSet, options: LoaderOptions) -> None:
    """Raise OptionsError where the set numbers its classes otherwise than the options say."""
    if options.classes is None:
        return
    wanted = tuple(options.classes)
    if found.classes is None:
        raise OptionsError(
            f"classes were given, and {found.name or 'the set'} has no class names to compare them with; leave classes out"
        )
    if found.classes == wanted:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(wanted, found.classes, strict=False)) if a != b), min(len(wanted), len(found.classes))
    )
    ours, theirs = (f"{names[at]!r}" if at < len(names) else "nothing" for names in (wanted, found.classes))
    raise OptionsError(
        f"{found.name or 'the set'} numbers its {len(found.classes)} classes otherwise than the {len(wanted)} given: class {at} is "
        f"{theirs} here and {ours} there; pack both splits in one build, so that they share one mapping"
    )
