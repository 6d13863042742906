"""Machines on Kubernetes: one pod each, with the node as its only container.

A pod has its machine's name, and names are unique in a namespace: a request repeated after a kill
creates only one machine. Pods are found by a label. A deleted, evicted or preempted pod gets
SIGTERM and its grace period; a node drains on any SIGTERM. An ended pod is kept, with its log,
until its name is requested again.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pydantic import ValidationError

from ....broker.client.login import CREDENTIALS_VARIABLE
from ....schemas.machines import MachinesConfig
from ....schemas.wire.errors import DeadlineError, NotFoundError, PlacementError
from ....schemas.wire.message import requirement
from .source import Machine, MachineNames, node_command

if TYPE_CHECKING:
    from kubernetes.client import CoreV1Api, V1Pod

T = TypeVar("T")
POOL_LABEL = "tinkermq.pool"
CONTAINER = "node"
_GPU = "nvidia.com/gpu"
_TIMEOUT_S = (5.0, 25.0)
"""Time to connect and to answer."""
_PAGE = 500
_NOT_FOUND, _CONFLICT = 404, 409
_ENDED = frozenset({"Succeeded", "Failed"})
_GRACE_S = 10
"""Grace period of a pod whose node has not joined."""
_HINT = "run `kubectl auth can-i create pods` as the scheduler's user; see `context:`, `namespace:`"


class KubernetesSource:
    """Creates, lists and deletes pods, through the official client."""

    def __init__(self, config: MachinesConfig, url: str) -> None:
        """Nodes connect to the broker at `url`."""
        self._config = config
        self._url = url
        self._names = MachineNames(url)
        self._api: CoreV1Api | None = None

    async def list_machines(self) -> list[Machine]:
        """Return the pool's pods that have not ended, by name; raises PlacementError."""
        selector = f"{POOL_LABEL}={pool_label(self._names)}"
        pods = await self._call_api(lambda api: _listed(api, self._config.namespace, selector))
        matches = [_machine(item) for item in pods if item.status is None or not _has_ended(item)]
        own = [item for item in matches if self._names.own(item.name)]
        return sorted(own, key=lambda machine: self._names.number(machine.name))

    async def request_machine(self, name: str) -> None:
        """Create the pod of a machine, unless it exists; raises PlacementError."""
        made = pod(self._config, self._url, name)
        await self._call_api(lambda api: _made(api, self._config.namespace, name, made))

    async def release_machine(self, machine: Machine, *, drain: bool) -> None:
        """Delete this pod only, with its grace period, or a short one if no node has joined."""
        grace_s = None if drain else _GRACE_S
        await self._call_api(
            lambda api: _deleted(api, self._config.namespace, machine.name, machine.id, grace_s)
        )

    async def _call_api(self, work: Callable[["CoreV1Api"], T]) -> T:
        return await asyncio.to_thread(self._asked, work)

    def _asked(self, work: Callable[["CoreV1Api"], T]) -> T:
        """Call the API in a thread; report errors in the cluster's words."""
        if self._api is None:
            self._api = _connected(self._config.context)
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError, NewConnectionError, TimeoutError

        try:
            return work(self._api)
        except ValidationError as error:
            text = f"`pod:` is not a valid pod: {_first(error)}"
            raise PlacementError(text, hint=_HINT) from error
        except ApiException as error:
            raise _refusal(error) from error
        except HTTPError as error:
            reason = getattr(error, "reason", None) or error
            late = isinstance(reason, TimeoutError) and not isinstance(reason, NewConnectionError)
            kind = DeadlineError if late else PlacementError
            raise kind(f"Kubernetes cannot be reached: {reason}", hint=_HINT) from error


def pool_label(names: MachineNames) -> str:
    """Return the label of a pool's pods."""
    return names.prefix.strip("-")


def pod(config: MachinesConfig, url: str, name: str) -> dict[str, Any]:
    """Return the pod of one machine; the pool owner's additions take precedence."""
    variables = {CREDENTIALS_VARIABLE: config.credentials} if config.credentials else {}
    size = {_GPU: str(config.slots)} if config.gpus else {"cpu": str(config.slots)}
    container = {
        "name": CONTAINER,
        "image": config.image,
        "command": node_command(config, url, name),
        "env": [{"name": key, "value": value} for key, value in variables.items()],
        "resources": {"limits": size} if config.gpus else {"requests": size},
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],  # noqa: S108  the pod's own
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"labels": {"app.kubernetes.io/name": "tinkermq-machine"}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": config.drain_s,
            "automountServiceAccountToken": False,
            "shareProcessNamespace": True,  # its first process reaps orphans
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        },
    }
    named = {"name": name, "labels": {POOL_LABEL: pool_label(MachineNames(url))}}
    return _merged(_merged(made, config.pod), {"metadata": named})


def _merged(base: Any, over: Any) -> Any:
    """Return `base` overlaid with `over`: maps by key, lists of named items by name."""
    if isinstance(base, dict) and isinstance(over, dict):
        left, right = cast("dict[str, Any]", base), cast("dict[str, Any]", over)
        changed = {
            key: _merged(left[key], value) if key in left else value for key, value in right.items()
        }
        return {**left, **changed}
    left, right = _by_name(base), _by_name(over)
    if left is None or right is None:
        return over
    return list(_merged(left, right).values())


def _by_name(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, list):
        return None
    result = cast("list[Any]", value)
    named = all(isinstance(item, Mapping) and "name" in item for item in result)
    return {item["name"]: item for item in result} if named else None


def _connected(context: str) -> "CoreV1Api":
    """Return the API of the cluster in which this runs, or of a kubeconfig's context."""
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise NotFoundError(
            "the Kubernetes client is not installed for the scheduler",
            hint="pip install 'tinkermq[kubernetes]'",
        ) from error
    settings = client.Configuration()
    try:
        _load(config, settings, context)
    except (config.ConfigException, OSError) as error:
        raise PlacementError(f"Kubernetes is not configured: {error}", hint=_HINT) from error
    settings.retries = False
    return client.CoreV1Api(client.ApiClient(settings))


def _load(config: Any, settings: Any, context: str) -> None:
    """Load the cluster's address; reads the variable now, as the client reads it only once."""
    file = os.environ.get("KUBECONFIG")
    if "KUBERNETES_SERVICE_HOST" in os.environ and not (file or context):
        config.load_incluster_config(client_configuration=settings)
        return
    config.load_kube_config(file, context or None, client_configuration=settings)


def _listed(api: "CoreV1Api", namespace: str, selector: str) -> list["V1Pod"]:
    pods: list[V1Pod] = []
    further: str | None = None
    while True:
        page = api.list_namespaced_pod(
            namespace,
            label_selector=selector,
            limit=_PAGE,
            _continue=further,
            _request_timeout=_TIMEOUT_S,
        )
        pods += page.items
        further = page.metadata.var_continue if page.metadata else None
        if not further:
            return pods


def _made(api: "CoreV1Api", namespace: str, name: str, made: Any) -> None:
    """Create a pod, replacing an ended pod of that name; a running one is returned."""
    from kubernetes.client.exceptions import ApiException

    try:
        api.create_namespaced_pod(namespace, made, _request_timeout=_TIMEOUT_S)
        return
    except ApiException as error:
        if _status(error) != _CONFLICT:
            raise
    there = api.read_namespaced_pod(name, namespace, _request_timeout=_TIMEOUT_S)
    if _has_ended(there):
        _deleted(api, namespace, name, _uid(there), 0)
        api.create_namespaced_pod(namespace, made, _request_timeout=_TIMEOUT_S)


def _deleted(api: "CoreV1Api", namespace: str, name: str, uid: str, grace_s: int | None) -> None:
    from kubernetes.client import V1DeleteOptions, V1Preconditions
    from kubernetes.client.exceptions import ApiException

    options = V1DeleteOptions(preconditions=V1Preconditions(uid=uid), grace_period_seconds=grace_s)
    try:
        api.delete_namespaced_pod(name, namespace, body=options, _request_timeout=_TIMEOUT_S)
    except ApiException as error:
        if _status(error) not in (_NOT_FOUND, _CONFLICT):  # another pod took the name
            raise


def _machine(pod: "V1Pod") -> Machine:
    metadata, name = pod.metadata, (pod.metadata.name if pod.metadata else None) or ""
    leaving = metadata is not None and metadata.deletion_timestamp is not None
    started = _started(pod)
    state: Literal["asked", "started", "leaving"] = "asked" if started is None else "started"
    log = f"`kubectl logs {name}`"
    return Machine(name, _uid(pod), "leaving" if leaving else state, started, None, _why(pod), log)


def _uid(pod: "V1Pod") -> str:
    return (pod.metadata.uid if pod.metadata else None) or ""


def _has_ended(pod: "V1Pod") -> bool:
    return pod.status is not None and pod.status.phase in _ENDED


def _started(pod: "V1Pod") -> float | None:
    """Return when the node's container started; None: not yet."""
    for status in (pod.status.container_statuses if pod.status else None) or []:
        running = status.state.running if status.state else None
        if status.name == CONTAINER and running is not None and running.started_at is not None:
            return running.started_at.timestamp()
    return None


def _why(pod: "V1Pod") -> str:
    """Return why a pod waits: for room, its image, or its volumes."""
    if pod.status is None or _started(pod) is not None:
        return ""
    for status in pod.status.container_statuses or []:
        waiting = status.state.waiting if status.state else None
        if waiting is not None:
            return ": ".join(filter(None, (waiting.reason, waiting.message)))
    unmet = [each for each in pod.status.conditions or [] if each.status == "False"]
    reasons = [": ".join(filter(None, (each.reason, each.message))) for each in unmet]
    return next(filter(None, reasons), "")


def _refusal(error: Any) -> PlacementError:
    """Return an ApiException in the cluster's words."""
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason or "no word"
    return PlacementError(f"Kubernetes refused (HTTP {error.status}): {message}", hint=_HINT)


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    return (
        f"{'.'.join(map(str, first['loc'][1:]))}: {requirement(first)} (it is {first['input']!r})"
    )


def _status(error: Any) -> int:
    return int(error.status or 0)
