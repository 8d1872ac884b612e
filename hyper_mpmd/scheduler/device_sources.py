"""Where the figures of the devices come from: a unit and a source for each, for `hyper-mpmd devices`."""

from __future__ import annotations

UNITS: dict[str, str] = {
    "aic": "cores",
    "aiv": "cores",
    "cube_flops_per_us": "FLOP/µs a core, float32 and 16-bit",
    "vector_flops_per_us": "FLOP/µs a core, float32 and 16-bit",
    "cube_ramp": "rows, columns",
    "vector_ramp": "rows, columns",
    "cube_bytes_per_us": "B/µs a core",
    "vector_bytes_per_us": "B/µs a core",
    "row_bytes": "B",
    "memory_bytes_per_us": "B/µs",
    "link_bytes_per_us": "B/µs to one rank",
    "link_total_bytes_per_us": "B/µs in, and out",
    "task_ns": "ns",
    "event_ns": "ns",
    "remote_ns": "ns",
    "launch_ns": "ns",
    "row_tiles": "rows",
    "col_tiles": "columns",
    "l2_bytes": "B",
    "near": "(ranks, ns)",
    "cube_peak_per_us": "FLOP/µs a core, float32 and 16-bit",
}

_ASCEND: dict[str, str] = {
    "aic": "visible to kernels: CANN platform files",
    "aiv": "visible to kernels: CANN platform files",
    "cube_flops_per_us": "0.75 of the peak (0.67 to 0.83: arXiv 2506.12708, 2605.23764); float32 half [derived]",
    "vector_flops_per_us": "22 TFLOP/s fp16 over 48 cores, fp32 half: Ascend/msmodeling",
    "cube_ramp": "assumed: half an L0 fractal of pipeline fill",
    "vector_ramp": "a vector register, 256 bytes",
    "cube_bytes_per_us": "L2 4.9 TB/s read over 24 cores: CANN platform files [derived]",
    "vector_bytes_per_us": "L2 4.9 TB/s read over 48 cores: CANN platform files [derived]",
    "row_bytes": "assumed: half of the 512 bytes from which a transfer runs at full rate",
    "memory_bytes_per_us": "0.6 of 1.6 TB/s: Ascend/msmodeling",
    "link_total_bytes_per_us": "0.7 of 196 GB/s: arXiv 2506.12708, Ascend/msmodeling",
    "task_ns": "switch from a static queue: arXiv 2605.23764",
    "event_ns": "event through global memory: hw-native-sys/simpler mmio notes",
    "launch_ns": "5 to 10 µs from C++: Ascend/msmodeling",
    "row_tiles": "chosen among, by cost",
    "col_tiles": "chosen among, by cost",
    "l2_bytes": "CANN platform files",
    "cube_peak_per_us": "8192 fp16 FLOP a clock at 1.85 GHz: CANN best practice; float32 half [derived]",
}
_CPU = "one core of a current x86 server, assumed; `make bench` prints what this machine reaches"

SOURCES: dict[str, dict[str, str]] = {
    "ascend-a2": {
        **_ASCEND,
        "link_bytes_per_us": "0.7 of 28 GB/s: arXiv 2506.12708, Ascend/msmodeling",
        "remote_ns": "UBEP, arXiv 2607.06202",
    },
    "ascend-a3": {
        **_ASCEND,
        "link_bytes_per_us": "0.7 of 196 GB/s a die: arXiv 2506.12708",
        "remote_ns": "one hop: UBEP, arXiv 2607.06202",
        "near": "other die, one hop, two hops: UBEP, arXiv 2607.06202; 16 dies within one hop [derived]",
    },
    "cpu": {
        **dict.fromkeys(UNITS, _CPU),
        "aic": "processors that this process may use",
        "aiv": "processors that this process may use",
        "link_bytes_per_us": "a memory copy",
        "link_total_bytes_per_us": "a memory copy a core",
        "vector_ramp": "a vector register",
        "row_bytes": "a cache line",
    },
}
