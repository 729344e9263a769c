"""Copies between host memory and a device with memory of its own.

link — Between host memory and a device's own.
"""
