"""The command `kvcache-lm-eval`: lm-evaluation-harness' own, with the model type `kvcache` in it."""

from __future__ import annotations

import sys


def main() -> int:
    """Takes all that `lm_eval` takes; returns 2 where the harness is not installed."""
    try:
        from kvcache.evals.lm_eval_adapter import main as evaluate
    except ImportError as error:
        print(f"kvcache-lm-eval: error: {error}", file=sys.stderr)
        return 2
    evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
