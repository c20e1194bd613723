"""Name servers found by HTTP, with real sockets, a real HTTP server and the commands."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from address_servers import address_server, http
from commands import DEADLINE_S, ready_addresses, started
from turbopump import ConsumeResult, Message, Producer, PushConsumer
from turbopump.errors import ConnectFailed
from turbopump.net.http_get import http_get
from turbopump.net.sockets import SocketNetwork
from turbopump.net.tls import ServerTls
from turbopump.testing import running_server


@contextmanager
def web_server(text: str) -> Iterator[str]:
    """Serve a text at ``/rocketmq/nsaddr``; yield ``host:port``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/rocketmq/nsaddr" else 404)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Keep the output of tests clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_blocking_clients_send_and_consume(tmp_path: Path) -> None:
    arrived = threading.Event()

    def listen(*_: object) -> ConsumeResult:
        arrived.set()
        return ConsumeResult.SUCCESS

    with running_server(tmp_path) as server, web_server(f"{server.nameserver}\n") as web:
        url = f"http://{web}/rocketmq/nsaddr"
        with Producer("shop", nameserver=url) as producer:
            producer.send(Message("orders", b"1"))
        with PushConsumer(
            "billing", listen, nameserver=url, subscriptions={"orders": "*"}, start_from="first"
        ):
            assert arrived.wait(DEADLINE_S)


@pytest.mark.slow
def test_commands_find_name_servers_by_a_url_or_the_domain(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "names", brokers=()) as names,
        web_server(names.nameserver) as web,
    ):
        url = f"http://{web}/rocketmq/nsaddr"
        broker = ("broker", "--dir", str(tmp_path), "--port", "0", "--nameserver", url)
        with started(tmp_path, *broker) as process:
            address = ready_addresses(process)["broker"]
            by_domain = {"ROCKETMQ_NAMESRV_DOMAIN": web}
            for options, environment in (
                (("--nameserver", url), {}),
                ((), by_domain),
                ((), {**by_domain, "NAMESRV_ADDR": names.nameserver}),
            ):
                listed = turbopump("cluster", "status", "--json", *options, **environment)
                assert address in listed.stdout, listed.stderr
                assert json.loads(listed.stdout)
        invalid = turbopump("topic", "list", ROCKETMQ_NAMESRV_DOMAIN="http://x")
        assert (invalid.returncode, invalid.stdout) == (2, "")
        assert invalid.stderr.startswith("turbopump: address 'http://x': expected host:port")
        refused = turbopump("topic", "list", "--nameserver", f"http://{web}/wrong")
        assert refused.returncode == 1
        assert f"no name servers found: http://{web}/wrong: status 404 Not Found" in refused.stderr


def turbopump(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: text for key, text in os.environ.items() if "NAMESRV" not in key}
    return subprocess.run(
        [sys.executable, "-m", "turbopump", *arguments],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_certificate_must_be_trusted_by_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, path = trustme.CA(), tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(path)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")

    async def fetched(answer: bytes = http("a:1")) -> str:
        tls = ServerTls(path)
        async with address_server(SocketNetwork(), answer=answer, tls=tls) as server:
            return await http_get(SocketNetwork(), f"https://{server.address}/ns", 3000)

    with pytest.raises(ConnectFailed, match="certificate verify failed"):
        asyncio.run(fetched())
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert asyncio.run(fetched()) == "a:1"
    with pytest.raises(ConnectFailed, match=r"redirected from https to 'http://127\.0\.0\.1/ns'"):
        asyncio.run(fetched(http("", "302 Found", "Location: http://127.0.0.1/ns")))
