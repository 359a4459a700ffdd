"""The oracle for rollout corrections: the weight of each token, computed in plain floats with loops
over a sequence's tokens.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from megatron_rl.config import AlgoSettings


def textbook_weights(
    algo: AlgoSettings, *, log_r: Sequence[float], drift: Sequence[float], advantage: Sequence[float], sequence: Sequence[object]
) -> list[float]:
    """Return the weight of each token.

    `log_r` is the log ratio of the trainer's old probability to the engine's, `drift` the engine's
    logprob minus the current one, and `sequence` identifies the sequence of each token.
    """
    weights = []
    for t, own in enumerate(sequence):
        members = [s for s, other in enumerate(sequence) if other == own]
        logs = [log_r[s] for s in members]
        r, product, mean = math.exp(log_r[t]), math.exp(sum(logs)), math.exp(fmean(logs))
        k3 = fmean(math.exp(each) - 1 - each for each in logs)
        says = {
            "none": 1.0,
            "bypass": 1.0,
            "token_tis": min(r, algo.is_weight_cap),
            "sequence_tis": min(product, algo.is_weight_cap),
            "token_mask": r if algo.token_mask_low <= r <= algo.token_mask_high else 0.0,
            "sequence_mask": product if algo.sequence_mask_low <= product <= algo.sequence_mask_high else 0.0,
            "geo_mask": 1.0 if algo.geo_mask_low <= mean <= algo.geo_mask_high else 0.0,
            "k3_mask": 1.0 if k3 <= algo.k3_mask_high else 0.0,
            "opsm": 0.0 if advantage[t] < 0 and fmean(drift[s] for s in members) > algo.opsm_delta else 1.0,
        }
        weights.append(math.prod(says[name] for name in algo.rollout_correction.split("+")))
    return weights
