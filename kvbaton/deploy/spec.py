"""What a deployment is made from: one file or one command line, checked before a manifest is written.

Invariants: a spec that exists is complete and consistent; an error names the field and the fix. Knows nothing about
Kubernetes beyond the names and quantities it has to pass on.
"""

from __future__ import annotations

import re
import shlex
from typing import Literal

import msgspec

from kvbaton.deploy.rules import Gates
from kvbaton.types import LocalError

PoolName = Literal["prefill", "decode", "colocated"]
EngineName = Literal["embedded", "vllm", "sglang"]
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|Ki|Mi|Gi|Ti)?")


class Resources(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one worker asks for; requests and limits are the same, so that nothing is taken from it later."""

    cpu: str = "4"
    memory: str = "16Gi"
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"
    rdma: int = 0  # devices of the RDMA plugin
    rdma_resource: str = "rdma/hca_shared_devices_a"
    shm: str = "2Gi"  # /dev/shm, for shared memory between the processes of one pod

    def __post_init__(self) -> None:
        for name in ("cpu", "memory", "shm"):
            if _QUANTITY.fullmatch(getattr(self, name)) is None:
                raise LocalError(f"{getattr(self, name)!r} is not a quantity", field=name, fix="write 4, 500m or 16Gi")
        if self.gpus < 0 or self.rdma < 0:
            raise LocalError("a number of devices is not negative", field="gpus")


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pool of equal workers."""

    replicas: int
    max_replicas: int = 0  # above replicas: the pool is scaled between the two
    resources: Resources = Resources()
    waiting_tokens_per_worker: int = 8192  # prefill: a standing queue of so many prompt tokens adds a worker
    queue_delay_s: float = 0.5  # prefill: so does a p95 wait of this long
    sequences_per_worker: int = 48  # decode: running and waiting ones together
    min_free_share: float = 0.15  # decode: fewer free blocks than this adds a worker

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise LocalError(f"replicas is {self.replicas}", field="replicas", fix="a pool has one worker or more")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise LocalError("max_replicas is below replicas", field="max_replicas")
        if self.queue_delay_s <= 0 or self.waiting_tokens_per_worker <= 0 or self.sequences_per_worker <= 0:
            raise LocalError("a scaling target must be above 0", field="queue_delay_s")
        if not 0 < self.min_free_share < 1:
            raise LocalError("a share lies between 0 and 1", field="min_free_share")

    @property
    def scaled(self) -> bool:
        return self.max_replicas > self.replicas


def _check_image(image: str, field: str) -> None:
    if re.search(r"[\s]", image) or image.endswith(":latest"):
        fix = "name a version or a digest: workers of two builds must not meet under one tag"
        raise LocalError(f"image {image!r} is not pinned", field=field, fix=fix)


class DeploySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole deployment. Either prefill and decode pools, or a colocated one."""

    model: str  # a directory inside the model volume
    image: str
    name: str = "kvbaton"
    namespace: str = "default"
    prefill: Pool | None = None
    decode: Pool | None = None
    colocated: Pool | None = None
    router_replicas: int = 2
    model_claim: str = "models"  # PersistentVolumeClaim that holds the model, mounted read-only at /models
    key_secret: str = ""  # an existing Secret with `internal-key` and `api-keys`; empty: <name>-internal
    anonymous: bool = False  # routers ask nobody for an API key: something before them lets in whom it should
    dtype: str = "bfloat16"
    transport: Literal["auto", "shm", "tcp", "nixl"] = "auto"
    engine: EngineName = "embedded"  # what computes; for another, its server runs beside each worker
    engine_image: str = ""  # of that server
    engine_args: str = ""  # more flags of that server's, as on a command line
    drain_s: int = 120
    fabric_key: str = "topology.kubernetes.io/zone"  # nodes with the same value share a fast fabric
    prometheus_url: str = "http://prometheus-operated.monitoring.svc:9090"
    monitoring_namespace: str = "monitoring"
    gates: Gates = Gates()

    def __post_init__(self) -> None:
        for field, limit in (("name", 40), ("namespace", 40)):
            if _NAME.fullmatch(getattr(self, field)) is None:
                fix = f"lower-case letters, digits and dashes, {limit} characters at most"
                raise LocalError(f"{getattr(self, field)!r} is no Kubernetes name", field=field, fix=fix)
        if not self.model or not self.image:
            raise LocalError("model and image are needed", field="model" if not self.model else "image")
        _check_image(self.image, "image")
        self._check_engine()
        if (self.prefill is None) != (self.decode is None):
            raise LocalError(
                "a split needs both pools",
                field="decode" if self.decode is None else "prefill",
                fix="give prefill and decode, or colocated alone",
            )
        if (self.colocated is None) == (self.prefill is None):
            raise LocalError("give prefill and decode pools, or a colocated one", field="colocated")
        if self.router_replicas < 1:
            raise LocalError("there must be a router", field="router_replicas")
        if self.drain_s < 1:
            raise LocalError("draining takes a second or more", field="drain_s")

    def _check_engine(self) -> None:
        if self.engine == "embedded":
            if self.engine_image or self.engine_args:
                fix = "say which: engine vllm or sglang"
                raise LocalError("the embedded engine has no server of its own", field="engine", fix=fix)
            return
        if not self.engine_image:
            raise LocalError(f"a {self.engine} server needs an image", field="engine_image", fix="name its version")
        _check_image(self.engine_image, "engine_image")
        if self.transport != "auto":
            raise LocalError(f"{self.engine} moves KV its own way", field="transport", fix="leave it out")
        try:
            shlex.split(self.engine_args)
        except ValueError as error:
            raise LocalError(f"engine_args cannot be read: {error}", field="engine_args") from None

    @property
    def pools(self) -> dict[PoolName, Pool]:
        named: dict[PoolName, Pool | None] = {
            "prefill": self.prefill,
            "decode": self.decode,
            "colocated": self.colocated,
        }
        return {name: pool for name, pool in named.items() if pool is not None}

    @property
    def secret_name(self) -> str:
        return self.key_secret or f"{self.name}-internal"
