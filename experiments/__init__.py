"""Launcher, workloads, benchmarks and reports built on jspec."""
