"""Accelerator and fabric presets with their sources, and dated price examples.

Peak numbers are the vendors' dense ones, with float32 accumulation where they differ; what is reached of them is the
step model's business (MFU, MBU). Every figure was compared with the public page or document that its source names, on
the day in ``CHECKED``; where the figure is an assumption the source says so. Prices are inputs: the examples only show
the form and how far apart real ones lie.
"""

from __future__ import annotations

import msgspec

from kvbaton.types import LocalError


class Gpu(msgspec.Struct, frozen=True):
    name: str
    bf16_tflops: float  # dense
    fp8_tflops: float | None  # dense; None where the hardware has none
    memory_gb: float  # 1e9 bytes, as sold
    memory_gb_per_s: float
    link_gb_per_s: float  # between GPUs of one host, one direction
    source: str

    def flops(self, weight_bits: int) -> float:
        """Peak FLOP/s for weights of that width (8 bits uses the FP8 units where there are any)."""
        tflops = self.fp8_tflops if weight_bits <= 8 and self.fp8_tflops else self.bf16_tflops
        return tflops * 1e12


class GpuNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A GPU without a preset, by its own numbers."""

    name: str = "own GPU"
    bf16_tflops: float
    fp8_tflops: float | None = None
    memory_gb: float
    memory_gb_per_s: float
    link_gb_per_s: float = 32.0
    source: str = "given in the scenario"


CHECKED = "2026-11-29"

A100 = (
    "NVIDIA A100 datasheet nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf, SXM, "
    "by glennklockwood.com/garden/processors/A100"
)
HOPPER = "NVIDIA H100 datasheet by glennklockwood.com/garden/processors/h100 (dense: half of the sparse figures)"

GPUS = {
    each.name.lower(): each
    for each in (
        Gpu("A100-80G", 312, None, 80, 2039, 300, A100),
        Gpu("H100-SXM", 989, 1979, 80, 3350, 450, HOPPER),
        Gpu("H200-SXM", 989, 1979, 141, 4800, 450, f"compute as {HOPPER}; memory by aiwiki.ai/wiki/nvidia_h200"),
        Gpu(
            "B200", 2250, 4500, 180, 8000, 900,
            "HGX at 1,000 W: compute by glennklockwood.com/garden/processors/B200; 8.0 TB/s, and NVLink 1.8 TB/s both "
            "ways, by docs.vultr.com/inference-cookbook/cuda/getting-started/hardware-overview; 180 GB by "
            "lambda.ai/instances",
        ),
        Gpu(
            "L40S", 362, 733, 48, 864, 32,
            "NVIDIA L40S datasheet by mullet.se/product.html?product_id=355414; PCIe 4 x16, 64 GB/s both ways",
        ),
        Gpu("RTX-4090", 165, 330, 24, 1008, 32, "waredb.com/processor/nvidia-geforce-rtx-4090; PCIe 4 x16"),
        Gpu(
            "RTX-PRO-6000", 468, 936, 96, 1597, 64,
            "Server Edition: 1,597 GB/s by NVIDIA datasheet 4682150 (2025-12); compute at its 2,430 MHz by "
            "github.com/ai-dynamo/aiconfigurator, systems/rtx_pro_6000_server.yaml; PCIe 5 x16",
        ),
        Gpu(
            "MI300X", 1307, 2615, 192, 5300, 448,
            "amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf by "
            "arxiv.org/pdf/2510.27583 and ROCm docs; 7 links of 64 GB/s one way",
        ),
        Gpu(
            "Trainium2", 667, 1299, 103, 2900, 512,
            "awsdocs-neuron.readthedocs-hosted.com/en/latest, neuron-hardware/trainium2: one chip, 96 GiB; the "
            "1,024 GB/s within an instance taken as both ways together",
        ),
    )
}  # fmt: skip


class Fabric(msgspec.Struct, frozen=True):
    """A way between two workers. ``gb_per_s`` is the line rate; efficiency is the part of it large messages reach."""

    name: str
    gb_per_s: float  # 1e9 bytes a second, one direction
    efficiency: float
    efficiency_low: float
    startup_ms: float
    source: str

    @property
    def effective_bytes_per_s(self) -> float:
        return self.gb_per_s * 1e9 * self.efficiency

    def floor_s(self, num_bytes: float) -> float:
        """No transfer over this fabric is faster."""
        return num_bytes / (self.gb_per_s * 1e9)

    def expected_s(self, num_bytes: float) -> float:
        return self.startup_ms / 1e3 + num_bytes / self.effective_bytes_per_s if num_bytes else 0.0


class FabricNumbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A way without a preset."""

    name: str = "own fabric"
    gb_per_s: float
    efficiency: float = 0.8
    startup_ms: float = 0.5
    source: str = "given in the scenario"


MOONCAKE = "github.com/kvcache-ai/Mooncake"
RDMA = (
    f"line rate: bits / 8; 0.74 of 8 x 200G RoCE in {MOONCAKE} docs/source/performance, 0.87 of 4 x 200G in its README"
)
TCP = (
    f"line rate: bits / 8; 0.36 of 4 x 200G and 0.10 of 8 x 400G: the RDMA rates of {MOONCAKE} README over 2.4 and 4.6"
)
ALONE = "efficiency is an assumption, not a measurement"
FABRICS = {
    each.name: each
    for each in (
        Fabric("25G-tcp", 3.125, 0.60, 0.40, 0.5, f"line rate: bits / 8; kernel TCP; {ALONE}"),
        Fabric("100G-tcp", 12.5, 0.36, 0.20, 0.5, TCP),
        Fabric("100G", 12.5, 0.80, 0.70, 0.374, RDMA),
        Fabric("200G", 25.0, 0.80, 0.70, 0.374, RDMA),
        Fabric("400G", 50.0, 0.80, 0.70, 0.374, RDMA),
        Fabric("800G", 100.0, 0.80, 0.70, 0.374, RDMA),
        Fabric("8x200G", 200.0, 0.74, 0.70, 0.374, RDMA),
        Fabric("8x400G", 400.0, 0.475, 0.40, 0.374, f"line rate: bits / 8; 190 GB/s measured, {MOONCAKE} README"),
        Fabric("PCIe4-x16", 31.5, 0.80, 0.70, 0.05, f"16 GT/s x 16 lanes, 128b/130b, one way; {ALONE}"),
        Fabric("PCIe5-x16", 63.0, 0.80, 0.70, 0.05, f"32 GT/s x 16 lanes, 128b/130b, one way; {ALONE}"),
        Fabric("NVLink4", 450.0, 0.80, 0.70, 0.03, f"H100 and H200: 900 GB/s both ways, {HOPPER}; {ALONE}"),
        Fabric("shm", 10.0, 0.70, 0.40, 0.2, f"a memory copy by one core: measure yours with kvbaton link; {ALONE}"),
    )
}


class PriceExample(msgspec.Struct, frozen=True):
    """What somebody asked for one GPU hour. An illustration of the input, not a quote."""

    what: str
    usd_per_gpu_hour: float
    as_of: str
    source: str


LAMBDA = "lambda.ai/instances, eight GPUs on demand"
DEEPSEEK = "github.com/deepseek-ai/open-infra-index, day 6: an assumed lease price"
PRICE_EXAMPLES = (
    PriceExample("H800", 2.00, "2025-02-28", DEEPSEEK),
    PriceExample("A100-80G", 2.79, "2026-09-20", LAMBDA),
    PriceExample("H100-SXM", 3.99, "2026-09-20", LAMBDA),
    PriceExample("B200", 6.69, "2026-09-20", LAMBDA),
    PriceExample("H100-SXM", 2.69, "2026-11-09", "runpod.io/pricing, Community Cloud"),
    PriceExample("H100-SXM", 6.88, "2026-11-09", "AWS p5.48xlarge on demand, us-east-1, an eighth of $55.04"),
)


def gpu(name: str | GpuNumbers) -> Gpu:
    if isinstance(name, GpuNumbers):
        _positive(name, "hardware.gpu", "bf16_tflops", "memory_gb", "memory_gb_per_s", "link_gb_per_s")
        return Gpu(name.name, name.bf16_tflops, name.fp8_tflops, name.memory_gb, name.memory_gb_per_s,
                   name.link_gb_per_s, name.source)  # fmt: skip
    key = name.lower().replace(" ", "-").replace("_", "-")
    short = {"h100": "h100-sxm", "h200": "h200-sxm", "a100": "a100-80g", "rtxpro6000": "rtx-pro-6000"}
    key = short.get(key, key)
    if key not in GPUS:
        known = ", ".join(each.name for each in GPUS.values())
        raise LocalError(f"no GPU preset {name!r}", field="gpu", fix=f"use one of {known}; a scenario may give numbers")
    return GPUS[key]


def fabric(name: str | FabricNumbers) -> Fabric:
    if isinstance(name, FabricNumbers):
        _positive(name, "hardware.fabric", "gb_per_s", "efficiency")
        if name.efficiency > 1 or name.startup_ms < 0:
            raise LocalError("an efficiency is at most 1, and no start-up time negative", field="hardware.fabric")
        return Fabric(name.name, name.gb_per_s, name.efficiency, name.efficiency, name.startup_ms, name.source)
    for each in FABRICS.values():
        if each.name.lower() == name.lower():
            return each
    raise LocalError(f"no fabric preset {name!r}", field="fabric",
                     fix=f"use one of {', '.join(FABRICS)}; a scenario may give numbers")  # fmt: skip


def _positive(numbers: object, field: str, *names: str) -> None:
    for name in names:
        if getattr(numbers, name) <= 0:
            raise LocalError(f"{name} must be positive, got {getattr(numbers, name)}", field=f"{field}.{name}")
