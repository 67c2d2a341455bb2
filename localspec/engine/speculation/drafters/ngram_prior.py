"""The calibration of n-gram drafts that fits any pair, as from `Calibration.as_dict`.

Written by `scripts/bench tasks replay FOLDER --learn`, from answers of Qwen2.5-Coder 0.5B and from commits
and pages, which `scripts/bench tasks record FOLDER --learned` and `history FOLDER` had put there.
"""

LEARNED = {
    "prior": [
        0.002951,
        0.004296,
        0.006951,
        0.2309,
        0.4012,
        0.2344,
        0.03134,
        0.02355,
        0.03784,
        0.0184,
        0.002927,
        0.002593,
        0.002627,
    ],
    "offset": [-0.2451, 0.3768, 1.025, 1.611, 2.324, 2.685, 3.407, 3.534, 3.899, 5.994],
    "share": [
        0.1376,
        0.02533,
        0.06336,
        0.03024,
        0.04167,
        0.02652,
        0.03279,
        0.05287,
        0.05232,
        0.5373,
    ],
    "count": [60, 60, 60, 60, 60, 60, 60, 60, 60, 60],
}
