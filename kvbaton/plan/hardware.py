"""Accelerator and fabric presets with their sources, and dated price examples.

Peak numbers are the vendors' dense ones, with float32 accumulation where they differ; what is reached of them is the
step model's business (MFU, MBU). Prices are inputs: the examples only show the form.
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


GPUS = {
    each.name.lower(): each
    for each in (
        Gpu("A100-80G", 312, None, 80, 2039, 300, "NVIDIA A100 80GB SXM datasheet (2021)"),
        Gpu("H100-SXM", 989, 1979, 80, 3350, 450, "NVIDIA H100 SXM datasheet, half of the sparse figures"),
        Gpu("H200-SXM", 989, 1979, 141, 4800, 450, "NVIDIA H200 SXM datasheet, half of the sparse figures"),
        Gpu("B200", 2250, 4500, 180, 7700, 900, "NVIDIA HGX B200, an eighth of it, half of the sparse figures"),
        Gpu("L40S", 362, 733, 48, 864, 32, "NVIDIA L40S datasheet; GPUs meet over PCIe 4 x16"),
        Gpu("RTX-4090", 165, 330, 24, 1008, 32, "NVIDIA Ada GPU architecture paper, FP32 accumulate; PCIe 4 x16"),
        Gpu("RTX-PRO-6000", 503, 1007, 96, 1597, 64, "NVIDIA RTX PRO 6000 Blackwell Server Edition; PCIe 5 x16"),
        Gpu("MI300X", 1307, 2614, 192, 5300, 448, "AMD Instinct MI300X datasheet; 7 x 64 GB/s Infinity Fabric"),
        Gpu("Trainium2", 667, 1299, 96, 2900, 512, "AWS Neuron documentation, Trainium2 architecture, one chip"),
    )
}


class Fabric(msgspec.Struct, frozen=True):
    """A way between two workers. ``gb_per_s`` is the line rate; efficiency is the part of it large messages reach."""

    name: str
    gb_per_s: float  # 1e9 bytes a second, one direction
    efficiency: float
    efficiency_low: float
    startup_ms: float
    note: str

    @property
    def effective_bytes_per_s(self) -> float:
        return self.gb_per_s * 1e9 * self.efficiency

    def floor_s(self, num_bytes: float) -> float:
        """No transfer over this fabric is faster."""
        return num_bytes / (self.gb_per_s * 1e9)

    def expected_s(self, num_bytes: float) -> float:
        return self.startup_ms / 1e3 + num_bytes / self.effective_bytes_per_s if num_bytes else 0.0


RDMA = "RDMA engine: 0.74 measured on 8 x 200G RoCE (Mooncake, Qwen3-8B), 0.70 to 0.86 reported"
TCP = "kernel TCP: 0.36 of 4 x 200G, 0.10 of 8 x 400G (Mooncake transfer engine, compared with TCP)"
FABRICS = {
    each.name: each
    for each in (
        Fabric("25G-tcp", 3.125, 0.60, 0.40, 0.5, "kernel TCP over 25 Gb/s: one stream nearly fills a slow line"),
        Fabric("100G-tcp", 12.5, 0.36, 0.20, 0.5, TCP),
        Fabric("100G", 12.5, 0.80, 0.70, 0.374, RDMA),
        Fabric("200G", 25.0, 0.80, 0.70, 0.374, RDMA),
        Fabric("400G", 50.0, 0.80, 0.70, 0.374, RDMA),
        Fabric("800G", 100.0, 0.78, 0.70, 0.374, RDMA),
        Fabric("8x200G", 200.0, 0.74, 0.70, 0.374, RDMA),
        Fabric("8x400G", 400.0, 0.70, 0.47, 0.374, RDMA),
        Fabric("PCIe4-x16", 32.0, 0.80, 0.70, 0.05, "PCIe 4.0 x16, one direction"),
        Fabric("PCIe5-x16", 64.0, 0.80, 0.70, 0.05, "PCIe 5.0 x16, one direction"),
        Fabric("NVLink4", 450.0, 0.80, 0.70, 0.03, "H100 and H200, 18 links, one direction"),
        Fabric("shm", 10.0, 0.70, 0.40, 0.2, "memory copy between two processes of one host, one core"),
    )
}


class PriceExample(msgspec.Struct, frozen=True):
    """What somebody asked for one GPU hour. An illustration of the input, not a quote."""

    what: str
    usd_per_gpu_hour: float
    as_of: str
    source: str


PRICE_EXAMPLES = (
    PriceExample(
        "H100, eight GPUs at $2 an hour each", 2.0, "2025-02", "DeepSeek open-source week, assumed H800 price"
    ),
)


def gpu(name: str) -> Gpu:
    key = name.lower().replace(" ", "-").replace("_", "-")
    short = {"h100": "h100-sxm", "h200": "h200-sxm", "a100": "a100-80g", "rtxpro6000": "rtx-pro-6000"}
    key = short.get(key, key)
    if key not in GPUS:
        known = ", ".join(each.name for each in GPUS.values())
        raise LocalError(f"no GPU preset {name!r}", field="gpu", fix=f"use one of {known}, or give its numbers")
    return GPUS[key]


def fabric(name: str) -> Fabric:
    for each in FABRICS.values():
        if each.name.lower() == name.lower():
            return each
    raise LocalError(f"no fabric preset {name!r}", field="fabric", fix=f"use one of {', '.join(FABRICS)}")
