"""What a pool uses of Kubernetes, over HTTP: pods of a namespace, checked against its schemas.

No API server is to be had for the tests. This one speaks the five requests that are used as theirs
does (409 for a name that is taken or another pod's uid, 403 for a quota, 422 for what the schema
refuses, pages), and runs the command of a pod's container here, as a kubelet would: SIGTERM, its
grace, SIGKILL.
"""

import http.server
import itertools
import json
import os
import signal
import subprocess
import threading
import time
import urllib.parse
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

VERSION = "1.37"


class Kubernetes:
    """A cluster of one namespace, `lab`; `quota` bounds its pods, `room` those that run."""

    def __init__(self, folder: Path, *, quota: int = 10, room: int = 10, page: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.quota, self.room, self.page = quota, room, page
        self.pods: dict[str, dict[str, Any]] = {}
        self.lock = threading.RLock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._kills: dict[str, float] = {}
        self._stopping = threading.Event()
        self._versions = itertools.count(1)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._threads = [
            threading.Thread(target=self._server.serve_forever, daemon=True),
            threading.Thread(target=self._kubelet, daemon=True),
        ]

    def __enter__(self) -> "Kubernetes":
        address = f"http://127.0.0.1:{self._server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "c",
        }
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(config))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._threads[1].join(10)
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._server.shutdown()
        self._server.server_close()

    def evict(self, name: str) -> None:
        """Take a pod away as a preemption does: it is deleted with its grace."""
        with self.lock:
            self.delete(name, {})

    def create(self, made: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer a POST."""
        try:
            kubernetes_validate.validate(made, VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return refusal(422, "Invalid", f'Pod "x" is invalid: {error.message}')
        name = made["metadata"]["name"]
        if name in self.pods:
            return refusal(409, "AlreadyExists", f'pods "{name}" already exists')
        if len(self.pods) >= self.quota:
            used = f"requested: pods=1, used: pods={len(self.pods)}, limited: pods={self.quota}"
            text = f'pods "{name}" is forbidden: exceeded quota: lab, {used}'
            return refusal(403, "Forbidden", text)
        now = {"uid": str(uuid.uuid4()), "creationTimestamp": stamp(), "namespace": "lab"}
        self.pods[name] = {
            **made,
            "metadata": {**made["metadata"], **now, "resourceVersion": str(next(self._versions))},
            "status": {"phase": "Pending"},
        }
        return 201, self.pods[name]

    def delete(self, name: str, options: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Answer a DELETE."""
        there = self.pods.get(name)
        if there is None:
            return refusal(404, "NotFound", f'pods "{name}" not found')
        uid = (options.get("preconditions") or {}).get("uid", there["metadata"]["uid"])
        if uid != there["metadata"]["uid"]:
            return refusal(409, "Conflict", "the UID in the precondition does not match")
        grace_s = options.get("gracePeriodSeconds")
        if grace_s is None:
            grace_s = there["spec"].get("terminationGracePeriodSeconds", 30)
        process = self._processes.get(there["metadata"]["uid"])
        if process is None or process.poll() is not None:
            del self.pods[name]
        elif "deletionTimestamp" not in there["metadata"]:
            there["metadata"]["deletionTimestamp"] = stamp()
            self._kills[there["metadata"]["uid"]] = time.monotonic() + grace_s
            process.send_signal(signal.SIGTERM)
        return 200, there

    def listed(self, query: dict[str, str]) -> dict[str, Any]:
        """Answer a GET of the list."""
        wanted = dict(one.split("=") for one in query.get("labelSelector", "").split(",") if one)
        found = [
            one for one in self.pods.values() if wanted.items() <= one["metadata"]["labels"].items()
        ]
        begin = int(query.get("continue") or 0)
        end = begin + min(int(query.get("limit") or 500), self.page)
        more = {"continue": str(end)} if end < len(found) else {}
        metadata = {"resourceVersion": str(next(self._versions)), **more}
        return {
            "apiVersion": "v1",
            "kind": "PodList",
            "metadata": metadata,
            "items": found[begin:end],
        }

    def _kubelet(self) -> None:
        while not self._stopping.wait(0.1):
            with self.lock:
                for name in list(self.pods):
                    self._attend(name, self.pods[name])

    def _attend(self, name: str, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        process = self._processes.get(uid)
        if process is None:
            self._start(name, pod, uid)
        elif process.poll() is not None:
            if "deletionTimestamp" in pod["metadata"]:
                del self.pods[name]
            else:
                pod["status"]["phase"] = "Succeeded" if process.returncode == 0 else "Failed"
                pod["status"]["containerStatuses"][0]["state"] = {
                    "terminated": {"exitCode": process.returncode}
                }
        elif time.monotonic() > self._kills.get(uid, float("inf")):
            process.kill()

    def _start(self, name: str, pod: dict[str, Any], uid: str) -> None:
        if sum(one.poll() is None for one in self._processes.values()) >= self.room:
            text = "0/1 nodes are available: 1 Insufficient cpu."
            unmet = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            pod["status"]["conditions"] = [{**unmet, "message": text}]
            return
        container = pod["spec"]["containers"][0]
        given = {one["name"]: one["value"] for one in container.get("env", [])}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[uid] = subprocess.Popen(
                container["command"],
                stdout=log,
                stderr=log,
                env={**os.environ, **given},
                start_new_session=True,
            )
        status = {"name": container["name"], "ready": True, "restartCount": 0, "image": "i"}
        state = {"running": {"startedAt": stamp()}}
        statuses = [{**status, "imageID": "i", "state": state}]
        pod["status"] = {"phase": "Running", "startTime": stamp(), "containerStatuses": statuses}


def stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def refusal(code: int, reason: str, message: str) -> tuple[int, dict[str, Any]]:
    told = {"status": "Failure", "message": message, "reason": reason, "code": code}
    return code, {"apiVersion": "v1", "kind": "Status", "metadata": {}, **told}


def _handler(cluster: Kubernetes) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_any(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            place, _, name = url.path.partition("/pods")
            name = name.strip("/")
            told = json.loads(body) if body else {}
            with cluster.lock:
                code, answer = self.answered(
                    place, name, dict(urllib.parse.parse_qsl(url.query)), told
                )
                data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def answered(
            self, place: str, name: str, query: dict[str, str], told: dict[str, Any]
        ) -> tuple[int, dict[str, Any]]:
            if self.headers.get("Authorization") != "Bearer t":
                return refusal(401, "Unauthorized", "Unauthorized")
            if place != "/api/v1/namespaces/lab":
                text = 'pods is forbidden: User "u" cannot list resource "pods" in this namespace'
                return refusal(403, "Forbidden", text)
            if self.command == "POST":
                return cluster.create(told)
            if self.command == "DELETE":
                return cluster.delete(name, told)
            if not name:
                return 200, cluster.listed(query)
            there = cluster.pods.get(name)
            return (200, there) if there else refusal(404, "NotFound", f'pods "{name}" not found')

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        do_GET = do_POST = do_DELETE = do_any

    return Handler
