"""Kubernetes manifests of a deployment: plain objects, one list for each file.

Invariants: a worker that is told to end has as long as draining takes; nobody but the router reaches a worker's HTTP
port, and nobody but decode workers a prefill worker's KV port; the key shared by the fleet comes from a Secret and
appears in no manifest. Knows nothing about YAML, nor about whether a cluster is there.
"""

from __future__ import annotations

from typing import Any

from kvbaton.deploy import engines
from kvbaton.deploy.spec import DeploySpec, Pool, PoolName, Resources
from kvbaton.router.discovery import ROLE_LABEL

Manifest = dict[str, Any]

WORKER_PORT, KV_PORT, ROUTER_PORT = 8101, 8102, 8000
ROLES: dict[PoolName, str] = {"prefill": "prefill", "decode": "decode", "colocated": "both"}
_GRACE_EXTRA_S = 30  # after the drain: for the process to close and the kubelet to notice
_UID = 10001
API_KEYS, _KEYS_PATH = "api-keys", "/keys"  # in the Secret, and where it is mounted
_CANARY_S = 30  # between two canary prompts of a router: the alert on wrong tokens has nothing to say without them
_OTHERS: dict[PoolName, PoolName] = {"prefill": "decode", "decode": "prefill"}


def render_pool(spec: DeploySpec, name: PoolName, pool: Pool) -> list[Manifest]:
    """Deployment, headless Service and disruption budget of one pool."""
    labels = _labels(spec, ROLES[name])
    deployment = _object("apps/v1", "Deployment", spec, f"{spec.name}-{name}", labels)
    deployment["spec"] = {
        "replicas": pool.replicas,
        "selector": {"matchLabels": labels},
        # One more at a time and none less: a rollout never takes capacity away before its replacement is ready.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": labels}, "spec": _worker_pod(spec, name, pool, labels)},
    }
    if pool.scaled:
        del deployment["spec"]["replicas"]  # the scaler owns it: applying the file again must not undo its work
    service = _object("v1", "Service", spec, f"{spec.name}-{name}", labels)
    service["spec"] = {
        "clusterIP": "None",
        "selector": labels,
        "ports": [{"name": "http", "port": WORKER_PORT, "targetPort": "http"}],
    }
    budget = _object("policy/v1", "PodDisruptionBudget", spec, f"{spec.name}-{name}", labels)
    budget["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
    return [deployment, service, budget]


def render_router(spec: DeploySpec) -> list[Manifest]:
    """The routers, the address clients use, and the right to see the fleet's pods."""
    labels = _labels(spec, "router")
    account = _object("v1", "ServiceAccount", spec, f"{spec.name}-router", labels)
    role = _object("rbac.authorization.k8s.io/v1", "Role", spec, f"{spec.name}-router", labels)
    role["rules"] = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    binding = _object("rbac.authorization.k8s.io/v1", "RoleBinding", spec, f"{spec.name}-router", labels)
    binding["roleRef"] = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": f"{spec.name}-router"}
    binding["subjects"] = [{"kind": "ServiceAccount", "name": f"{spec.name}-router", "namespace": spec.namespace}]
    deployment = _object("apps/v1", "Deployment", spec, f"{spec.name}-router", labels)
    deployment["spec"] = {
        "replicas": spec.router_replicas,
        "selector": {"matchLabels": labels},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "template": {"metadata": {"labels": labels}, "spec": _router_pod(spec, labels)},
    }
    service = _object("v1", "Service", spec, spec.name, labels)
    service["spec"] = {"selector": labels, "ports": [{"name": "http", "port": 80, "targetPort": "http"}]}
    manifests = [account, role, binding, deployment, service]
    if spec.router_replicas > 1:
        budget = _object("policy/v1", "PodDisruptionBudget", spec, f"{spec.name}-router", labels)
        budget["spec"] = {"maxUnavailable": 1, "selector": {"matchLabels": labels}}
        manifests.append(budget)
    return manifests


def render_network(spec: DeploySpec) -> list[Manifest]:
    """Who may reach whom. Everything that is not said here is refused to workers."""
    from_router = _from_pods(_labels(spec, "router"))
    scraper = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": spec.monitoring_namespace}}}
    policies = []
    for name in spec.pools:
        ingress: list[Manifest] = [{"from": [from_router, scraper], "ports": [_tcp(WORKER_PORT)]}]
        other = _OTHERS.get(name)
        if other is not None and spec.engine != "embedded":
            # Servers choose ports for their transfers, and either side may call the other: nobody else may.
            ingress.append({"from": [_from_pods(_labels(spec, other))]})
        elif name == "prefill":
            ingress.append({"from": [_from_pods(_labels(spec, "decode"))], "ports": [_tcp(KV_PORT)]})
        policy = _object(
            "networking.k8s.io/v1", "NetworkPolicy", spec, f"{spec.name}-{name}", _labels(spec, ROLES[name])
        )
        policy["spec"] = {
            "podSelector": {"matchLabels": _labels(spec, ROLES[name])},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        }
        policies.append(policy)
    return policies


def _from_pods(labels: dict[str, str]) -> Manifest:
    return {"podSelector": {"matchLabels": labels}}


def _tcp(port: int) -> Manifest:
    return {"protocol": "TCP", "port": port}


def _labels(spec: DeploySpec, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "kvbaton", "app.kubernetes.io/instance": spec.name, ROLE_LABEL: role}


def _object(api: str, kind: str, spec: DeploySpec, name: str, labels: dict[str, str]) -> Manifest:
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {"name": name, "namespace": spec.namespace, "labels": dict(labels)},
    }


def _worker_pod(spec: DeploySpec, name: PoolName, pool: Pool, labels: dict[str, str]) -> Manifest:
    arguments = ["worker", "--role", ROLES[name], "--model", f"/models/{spec.model}", "--dtype", spec.dtype]
    embedded = spec.engine == "embedded"
    arguments += ["--host", "$(POD_IP)", "--port", str(WORKER_PORT)]
    ports = [{"name": "http", "containerPort": WORKER_PORT}]
    if embedded:
        arguments += ["--transport", spec.transport]
        ports.append({"name": "kv", "containerPort": KV_PORT})
    if name != "colocated":
        arguments += ["--kv-host", "$(POD_IP)", *(("--kv-port", str(KV_PORT)) if embedded else ())]
    arguments += [*engines.worker_arguments(spec), "--drain-s", str(spec.drain_s)]
    container: Manifest = {
        "name": "worker",
        "image": spec.image,
        "args": arguments,
        "env": [*_environment(spec), *engines.key_of_servers(spec), _field("POD_IP", "status.podIP")],
        "ports": ports,
        # Loading a model takes minutes; a worker that is loaded answers /health whatever its load.
        "startupProbe": _probe("/ready", period_s=5, failures=360),
        "readinessProbe": _probe("/ready", period_s=5, failures=2),
        "livenessProbe": _probe("/health", period_s=10, failures=6),
        "resources": _resources(pool.resources if embedded else engines.ADAPTER),
        "securityContext": _locked_down(),
        "volumeMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": "/cache"},
        ],
    }
    computes = container
    pod = _pod(spec, container)
    if not embedded:
        computes = engines.server(spec, name, _resources(pool.resources), pool.resources.gpus)
        computes["securityContext"] = _locked_down()
        container["volumeMounts"].append({"name": "events", "mountPath": engines.EVENTS_DIR})
        pod["initContainers"] = [computes]
    if pool.resources.rdma:
        computes["securityContext"] = {**_locked_down(), "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    pod["volumes"] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": spec.model_claim, "readOnly": True}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pool.resources.shm}},
        {"name": "cache", "emptyDir": {}},
        *({"name": volume, "emptyDir": {}} for volume in (() if embedded else ("events", "tmp"))),
    ]
    pod["automountServiceAccountToken"] = False
    pod["topologySpreadConstraints"] = [_spread("kubernetes.io/hostname", labels)]
    other = _OTHERS.get(name)
    if other is not None:  # pairs on one fabric: a hand-off across it costs far more
        term = {"labelSelector": {"matchLabels": _labels(spec, other)}, "topologyKey": spec.fabric_key}
        preferred = [{"weight": 100, "podAffinityTerm": term}]
        pod["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    if pool.resources.gpus:
        pod["tolerations"] = [{"key": pool.resources.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}]
    return pod


def _router_pod(spec: DeploySpec, labels: dict[str, str]) -> Manifest:
    selector = f"app.kubernetes.io/name=kvbaton,app.kubernetes.io/instance={spec.name}"
    container: Manifest = {
        "name": "router",
        "image": spec.image,
        "args": [
            "router",
            *("--host", "0.0.0.0", "--port", str(ROUTER_PORT), "--model", f"/models/{spec.model}"),
            *("--discover", f"kubernetes:{selector}", "--worker-port", str(WORKER_PORT)),
            *(("--allow-anonymous",) if spec.anonymous else ("--api-keys", f"{_KEYS_PATH}/{API_KEYS}")),
            *("--ttft-slo-s", f"{spec.gates.ttft_s:g}", "--tpot-slo-s", f"{spec.gates.tpot_s:g}", *_band(spec)),
            # Servers of other engines answer a greedy prompt a little differently from batch to batch.
            *(("--canary-interval", str(_CANARY_S)) if spec.engine == "embedded" else ()),
        ],
        "env": [*_environment(spec), _field("POD_NAMESPACE", "metadata.namespace")],
        "ports": [{"name": "http", "containerPort": ROUTER_PORT}],
        "startupProbe": _probe("/health", period_s=2, failures=60),
        "readinessProbe": _probe("/ready", period_s=2, failures=2),
        "livenessProbe": _probe("/health", period_s=10, failures=3),
        "resources": {
            "requests": {"cpu": "2", "memory": "2Gi"},
            "limits": {"memory": "2Gi"},
        },
        # Clients are sent here until every node has heard that it ends. Workers need no pause: the router asks them.
        "lifecycle": {"preStop": {"sleep": {"seconds": 5}}},
        "securityContext": _locked_down(),
        "volumeMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "cache", "mountPath": "/cache"},
        ],
    }
    pod = _pod(spec, container)
    pod["serviceAccountName"] = f"{spec.name}-router"
    pod["volumes"] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": spec.model_claim, "readOnly": True}},
        {"name": "cache", "emptyDir": {}},
    ]
    if not spec.anonymous:  # as files and not as variables: what changes in the Secret is read again while they serve
        container["volumeMounts"].append({"name": "api-keys", "mountPath": _KEYS_PATH, "readOnly": True})
        items = [{"key": API_KEYS, "path": API_KEYS}]
        secret = {"secretName": spec.secret_name, "defaultMode": 0o440, "items": items}
        pod["volumes"].append({"name": "api-keys", "secret": secret})
    pod["topologySpreadConstraints"] = [_spread("kubernetes.io/hostname", labels)]
    return pod


def _band(spec: DeploySpec) -> tuple[str, ...]:
    """What the live page and the gauge of drift hold the ratio against."""
    low, high = spec.gates.ratio_low, spec.gates.ratio_high
    return () if low is None or high is None else ("--plan-band", f"{low:g},{high:g}")


def _pod(spec: DeploySpec, container: Manifest) -> Manifest:
    return {
        "terminationGracePeriodSeconds": spec.drain_s + _GRACE_EXTRA_S,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _UID,
            "fsGroup": _UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }


def _environment(spec: DeploySpec) -> list[Manifest]:
    secret = {"secretKeyRef": {"name": spec.secret_name, "key": "internal-key"}}
    return [
        {"name": "KVBATON_INTERNAL_KEY", "valueFrom": secret},
        {"name": "KVBATON_CACHE", "value": "/cache"},
        {"name": "HOME", "value": "/cache"},
    ]


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _probe(path: str, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": "http"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(wanted: Resources) -> Manifest:
    amounts: dict[str, str] = {"cpu": wanted.cpu, "memory": wanted.memory}
    if wanted.gpus:
        amounts[wanted.gpu_resource] = str(wanted.gpus)
    if wanted.rdma:
        amounts[wanted.rdma_resource] = str(wanted.rdma)
    return {"requests": dict(amounts), "limits": dict(amounts)}


def _locked_down() -> Manifest:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _spread(key: str, labels: dict[str, str]) -> Manifest:
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }
