"""Arithmetic of ZeRO and ZeRO-Infinity as sympy formulas: bytes of model states, communication, efficiency, working memory.

Each formula is an expression of the symbols below; `evaluate` puts numbers in. Sources: [Z] Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (2020); [I] Rajbhandari et al., "ZeRO-Infinity: Breaking the GPU Memory
Wall for Extreme Scale Deep Learning" (2021).
"""

from __future__ import annotations

from typing import TypeAlias

import sympy as sp

PARAMETERS = sp.Symbol("Psi", positive=True)
"""Parameters of the model."""
RANKS = sp.Symbol("N", positive=True)
VALUE = sp.Symbol("v", positive=True)
"""Bytes of a parameter and of its gradient where they are stored and sent: 2 in 16 bits."""
STATE = sp.Symbol("K", positive=True)
"""Bytes of optimizer states of a parameter: 12 for Adam with a master copy in fp32."""
BANDWIDTH = sp.Symbol("bw", positive=True)
"""Bytes per second of a link, for one rank."""
PEAK = sp.Symbol("peak", positive=True)
"""FLOP per second of a rank's compute."""
INTENSITY = sp.Symbol("ait", positive=True)
"""FLOP for each byte that a link moves."""
BATCH, LENGTH, HIDDEN, LAYERS = sp.symbols("b s h L", positive=True)
"""Sequences of a rank, tokens of a sequence, width, blocks."""
TILES = sp.Symbol("T", positive=True)
"""Tiles of the largest parameter."""
BETWEEN = sp.Symbol("c", positive=True)
"""Blocks between two checkpoints of activations."""
HEADS = sp.Symbol("a", positive=True)

Expression: TypeAlias = sp.Expr

MODEL_STATES: dict[int, Expression] = {
    0: 2 * VALUE * PARAMETERS + STATE * PARAMETERS,
    1: 2 * VALUE * PARAMETERS + STATE * PARAMETERS / RANKS,
    2: VALUE * PARAMETERS + (VALUE + STATE) * PARAMETERS / RANKS,
    3: (2 * VALUE + STATE) * PARAMETERS / RANKS,
}
"""Bytes of parameters, gradients and optimizer states on a rank, by stage of ZeRO; 0: replicated. [Z], figure 1."""

VOLUME: dict[int, Expression] = {
    0: 2 * PARAMETERS,
    1: 2 * PARAMETERS,
    2: 2 * PARAMETERS,
    3: 3 * PARAMETERS,
}
"""Elements that a rank receives (or sends) in a step, for many ranks. [Z], section 7: an all-reduce is a reduce-scatter and an
all-gather of Psi each; stage 3 gathers in forward and backward."""

MOVED: dict[int, Expression] = {stage: volume * (RANKS - 1) / RANKS for stage, volume in VOLUME.items()}
"""The same with the part that each rank has itself taken off."""

EFFICIENCY: Expression = INTENSITY * BANDWIDTH / (INTENSITY * BANDWIDTH + PEAK)
"""Share of the peak that compute reaches if nothing hides a transfer. [I], equation 6."""

INTENSITIES: dict[str, Expression] = {
    "parameters and gradients": BATCH * LENGTH,
    "optimizer states": BATCH * LENGTH / 4,
    "activation checkpoints": 24 * HIDDEN * BETWEEN,
}
"""FLOP for each byte moved of these. [I], section 4.1: 8 FLOP a parameter and token with recomputation, over the bytes that pass
in 16 bits: 4 times 2 for parameters and gradients, 2 times 16 for states, and for checkpoints 2 bytes of which each passes
twice."""

WORKING: dict[str, Expression] = {
    "parameters": 4 * HIDDEN * 4 * HIDDEN,
    "activations": BATCH * LENGTH * BETWEEN * (16 * HIDDEN + 2 * HEADS * LENGTH),
}
"""Bytes of model-state and activation working memory. [I], equations 4 and 5: the largest operator maps h to 4 h, its parameter
and its gradient are there in 16 bits; between two checkpoints activations are there in 16 bits."""

TILED: Expression = WORKING["parameters"] / TILES
"""The same for parameters, if the largest operator is computed tile by tile. [I], section 5.1.3."""

PARAMETERS_OF: Expression = 12 * LAYERS * HIDDEN**2
"""Parameters of a transformer. [I], equation 1."""


def evaluate(expression: Expression, **numbers: float) -> float:
    """Return the value of a formula; raise `ValueError` naming the symbols that have no number, or that it does not have."""
    names = {symbol.name: symbol for symbol in expression.free_symbols}
    if unknown := numbers.keys() - names.keys():
        raise ValueError(f"the formula {expression} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(names))}")
    if missing := names.keys() - numbers.keys():
        raise ValueError(f"the formula {expression} needs {', '.join(sorted(missing))}")
    return float(expression.subs({names[name]: number for name, number in numbers.items()}))


def bandwidth_for(efficiency: Expression | float) -> Expression:
    """Return the bandwidth at which compute reaches a share of its peak. [I], equation 6, solved for bw."""
    (found,) = sp.solve(sp.Eq(EFFICIENCY, efficiency), BANDWIDTH)
    return found
