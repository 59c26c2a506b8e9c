"""A real nginx over a folder, by HTTP or HTTPS, for as long as a `with` block runs."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
_CONFIG = """
daemon off;
{user}
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log {home}/access.log;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  sendfile on;
  types {{ application/json json; application/x-tar tar; }}
  server {{
    listen 127.0.0.1:{port}{ssl};
    {certificate}
    root {root};
    {more}
  }}
}}
"""


@contextlib.contextmanager
def nginx(root: Path, home: Path, *, certificates: Path | None = None, more: str = "") -> Iterator[str]:
    """Serve `root`; `home` is a folder for its files, `more` goes into the server's block. Yields the origin."""
    assert NGINX is not None
    home.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    certificate = f"ssl_certificate {certificates}/good.pem; ssl_certificate_key {certificates}/good.key;" if certificates else ""
    text = _CONFIG.format(
        user="user root;" if os.getuid() == 0 else "",
        home=home,
        port=port,
        ssl=" ssl" if certificates else "",
        certificate=certificate,
        root=root,
        more=more,
    )
    (home / "nginx.conf").write_text(text)
    command = [NGINX, "-p", str(home), "-c", str(home / "nginx.conf"), "-e", str(home / "error.log")]
    server = subprocess.Popen(command)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert server.poll() is None, (home / "error.log").read_text()
            time.sleep(0.05)
        yield f"{'https' if certificates else 'http'}://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)
