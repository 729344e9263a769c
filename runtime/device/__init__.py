"""Copies between host memory and a device with memory of its own.

link — The link between host memory and a device's own: buffers on both sides, and copies.
measured_rates — Measures an accelerator's products and its copies to host memory and from there.
simulated — A simulated device, for machines without one and for plans of a device that isn't there: the CPU computes in its
    place.
"""
