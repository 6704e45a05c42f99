"""SnapKV: what the last queries look at, and what stands around it."""

from dataclasses import dataclass

from kvcache.policies.heavy_hitters import HeavyHitters
from kvcache.policies.observation import Last, Observation
from kvcache.policies.pooling import Pool


@dataclass(frozen=True)
class SnapKV(HeavyHitters):
    """Mass of the last queries only, pooled over neighbours.

    Source: Li et al., arXiv 2404.14469, section 4 and listing 1, for one prefill. While decoding, each query takes the
    place of an average one of the window (`Last`). The published kernel of 7 is shorter than most facts: 15 keeps a
    sentence's core in one piece. `published()` is the paper's.
    """

    observed: Observation = Last(8)  # noqa: RUF009  # frozen
    pool: Pool | None = Pool(15)  # noqa: RUF009

    @classmethod
    def published(cls) -> "SnapKV":
        """The paper's setting for LongBench: 32 queries, maximum over 7 tokens; the authors' code: 32, mean over 5."""
        return cls(Last(32), Pool(7, "max"))
