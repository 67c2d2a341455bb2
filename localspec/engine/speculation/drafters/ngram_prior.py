"""What is known of looked-up drafts of any pair, as `Calibration.as_dict` gives it.

Written by `scripts/bench tasks replay FOLDER --learn`, from answers of Qwen2.5-Coder 0.5B and from commits
and pages, which `scripts/bench tasks record FOLDER --learned` and `history FOLDER` had put there.
"""

LEARNED = {
    "prior": [
        0.002,
        0.003754,
        0.01994,
        0.1608,
        0.3089,
        0.2307,
        0.04185,
        0.02314,
        0.05797,
        0.1136,
        0.0305,
        0.003318,
        0.003611,
    ],
    "offset": [-1.069, 0.01414, 0.7797, 1.313, 2.009, 2.353, 2.656, 2.702, 2.898, 6],
    "share": [
        0.01795,
        0.1003,
        0.07803,
        0.02556,
        0.09348,
        0.05848,
        0.06118,
        0.08731,
        0.06993,
        0.4078,
    ],
    "count": [60, 60, 60, 60, 60, 60, 60, 60, 60, 60],
}
