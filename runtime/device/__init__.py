"""Copies between host memory and a device with memory of its own.

link — Between host memory and a device's own.
simulated — A device that the CPU plays: for machines without one, and for plans of a device that isn't there.
"""
