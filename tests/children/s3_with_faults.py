"""S3 server on this machine: moto's, and before it a proxy that delays, cuts, answers 503 and 429, drops half an upload, lists what was.

Run as a script it prints the ports of moto and of the proxy, which speaks TLS, and serves until its standard input ends.
"""

import http.client
import random
import ssl
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("delay", "503", "429", "cut", "half", "stale")


class Proxy(BaseHTTPRequestHandler):
    """Passes a request on to moto, or lets it fail, by the generator of the server."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_any(self) -> None:
        server = self.server
        body = self.read_body()
        with server.lock:
            fault = server.generator.choice(FAULTS) if server.generator.random() < server.rate else ""
        if fault == "delay":
            time.sleep(0.2)
        if fault in ("503", "429"):
            self.answer(int(fault), [("Retry-After", "0")], b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "cut":
            self.close_connection = True
            self.connection.close()
            return
        is_listing = self.command == "GET" and "list-type=2" in self.path
        if fault == "stale" and is_listing and self.path in server.listings:
            self.answer(*server.listings[self.path])
            return
        answer = self.pass_on(body)
        if is_listing:
            server.listings[self.path] = answer
        if fault == "half" and self.command == "PUT" and answer[0] == 200 and "uploadId" not in self.path:
            there = http.client.HTTPConnection("127.0.0.1", server.behind)
            there.request("GET", self.path.split("?")[0])
            data = there.getresponse().read()
            there.request("PUT", self.path.split("?")[0], data[: len(data) // 2])
            there.getresponse().read()
        self.answer(*answer)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any

    def read_body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def pass_on(self, body: bytes) -> tuple[int, list, bytes]:
        there = http.client.HTTPConnection("127.0.0.1", self.server.behind)
        dropped = ("transfer-encoding", "content-length", "expect", "connection")
        headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
        there.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
        found = there.getresponse()
        return found.status, found.getheaders(), found.read()

    def answer(self, code: int, headers: list, body: bytes) -> None:
        self.send_response_only(code)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = (
            next((v for n, v in headers if n.lower() == "content-length"), "0") if self.command == "HEAD" else len(body)
        )
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def serve(rate: float, seed: int, certificate: str, key: str) -> tuple[int, int]:
    """Start both servers in threads; returns their ports: moto's, and the proxy's."""
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    behind = moto.get_host_and_port()[1]
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, key)
    proxy.socket = tls.wrap_socket(proxy.socket, server_side=True, do_handshake_on_connect=False)  # the threads do it
    proxy.daemon_threads = True
    proxy.behind, proxy.rate, proxy.generator = behind, rate, random.Random(seed)
    proxy.listings, proxy.lock = {}, threading.Lock()
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    return behind, proxy.server_address[1]


if __name__ == "__main__":
    print(*serve(float(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]), flush=True)
    sys.stdin.read()
