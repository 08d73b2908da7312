"""Search of the layers whose activations are saved for the backward pass, not recomputed.

All layers save them if that fits and is not slower. Else layer types save them one after the other,
first the one that saves most time; then only some layers of a type, if that is better: saved
activations are transferred to the host and back, which a step may hide for some layers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planning.program_variants import HIDDEN, PlacementTrial, RematPolicy, layer_types_faster_saved

_SHARES = (0.5,), (0.25, 0.75)  # fractions of a type's layers, tried in turn


def search_remat_policy(
    best: PlacementTrial, fastest: Callable[[PlacementTrial, Sequence[RematPolicy]], PlacementTrial]
) -> PlacementTrial:
    """Return the fastest trial over choices of the layers that save activations.

    Args:
        best: a trial that recomputes all activations.
        fastest: returns the fastest trial of policies, or its first argument if none is faster.
    """
    types = remaining = layer_types_faster_saved(best.program, best.traced)
    all_saved = fastest(best, [frozenset((name, 1.0) for name in types)])
    if all_saved is not best and all_saved.waits <= max(best.waits, HIDDEN * all_saved.seconds):
        return all_saved
    while remaining:
        saved = best.variant.saved_layers
        faster = fastest(best, [saved | {(name, 1.0)} for name in remaining])
        if faster is best:
            break
        best = faster
        remaining = [name for name in remaining if (name, 1.0) not in best.variant.saved_layers]
    for name in types:
        for shares in () if name in best.program.all_or_none_types else _SHARES:
            others = {pair for pair in best.variant.saved_layers if pair[0] != name}
            faster = fastest(best, [frozenset(others | {(name, share)}) for share in shares])
            if faster is best:
                break
            best = faster
    return best
