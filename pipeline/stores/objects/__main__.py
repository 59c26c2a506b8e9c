"""The process that asks object stores for a trainer: answers requests from its pipe, and ends when that closes.

python -P -m pipeline.stores.objects    what is said: `finder`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import IO, Any

from pipeline.errors import PipelineError, said
from pipeline.stores import RemoteStore
from pipeline.stores.objects import ObjectOptions
from pipeline.stores.remote import opened


def serve(lines: Iterable[bytes], out: IO[bytes]) -> None:
    """Answer each request; the first line says of which kind the store is, and how it is asked."""
    store: RemoteStore | PipelineError | None = None
    for line in lines:
        request = json.loads(line)
        if store is None:
            store = _opened(request)
            continue
        try:
            if isinstance(store, PipelineError):
                raise store
            answer, data = _answer(store, request)
        except PipelineError as error:
            answer, data = {"error": said(error)}, b""
        try:
            out.write(json.dumps(answer).encode() + b"\n" + data)
            out.flush()
        except BrokenPipeError:  # whoever asked has gone
            return


def _opened(request: dict[str, Any]) -> RemoteStore | PipelineError:
    try:
        return opened(request["kind"], None, ObjectOptions(**request["options"]))
    except PipelineError as error:
        return error


def _answer(store: RemoteStore, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    if "look" in request:
        return {"remote": asdict(store.look(request["look"]))}, b""
    if "names" in request:
        return {"names": {name: asdict(found) for name, found in store.names(request["names"]).items()}}, b""
    data = store.fetch(request["fetch"], request["limit"])
    return {"bytes": len(data)}, data


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
