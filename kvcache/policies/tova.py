"""TOVA: what the last query looks at."""

from dataclasses import dataclass

from kvcache.policies.heavy_hitters import HeavyHitters
from kvcache.policies.observation import Last, Observation


@dataclass(frozen=True)
class TOVA(HeavyHitters):
    """The mass of the last query alone. Source: Oren et al., arXiv 2401.06104, section 4.2; there a layer's heads share
    one choice, here every KV head makes its own."""

    observed: Observation = Last(1)  # noqa: RUF009  # frozen

    @classmethod
    def published(cls) -> "TOVA":
        """As in the paper: the last query, each token for itself."""
        return cls(Last(1), None)
