"""GPUlayer: a declarative job runner over SSH for mixed fleets of Macs, CUDA machines and CPU hosts."""
